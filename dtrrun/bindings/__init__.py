"""The C++ core for Python: nodes of the graph, policies, and the parts of `core.dtr`.

A session finds them in the native extension. The simulator, which runs without PyTorch, has an extension of
its own, which `load` finds: in a wheel, or in the user's cache, where it is compiled once.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dtrrun.core.backend import Policy
from dtrrun.core.graph import Graph, Operation, Signature, Version
from dtrrun.core.heuristics import make_heuristic
from dtrrun.extensions import building, compiling
from dtrrun.extensions.building import CannotBuild

WHAT, ABOUT = "the simulator's core", "(once, some ten seconds)"


def load() -> ModuleType:
    """Find or build the extension, and import it. Raises CannotBuild; each process tries only once."""
    found = _loaded()
    if isinstance(found, CannotBuild):
        raise CannotBuild(found.why, found.do)
    return found


def is_there() -> bool:
    """Return whether `load` finds the extension without compiling it."""
    shipped, built = _places()
    return compiling.CORE_NAME in sys.modules or shipped.exists() or built.exists()


def _places() -> tuple[Path, Path]:
    """Return the files of the extension in a wheel and in the user's cache."""
    name = compiling.core_binary_name()
    built = building.cache_folder() / name.removesuffix(".so") / f"{compiling.CORE_NAME}.so"
    return compiling.HERE / compiling.BINARIES / name, built


@cache
def _loaded() -> ModuleType | CannotBuild:
    if compiling.CORE_NAME in sys.modules:
        return sys.modules[compiling.CORE_NAME]
    shipped, built = _places()
    try:
        if compiling.digest_of(shipped) and not compiling.digest_of(built):
            try:
                return building.import_from(compiling.CORE_NAME, shipped)
            except CannotBuild:  # because a library is missing here
                pass
        return building.import_from(compiling.CORE_NAME, build(built, _say))
    except CannotBuild as error:
        return error


def build(target: Path, say: Callable[[str], None]) -> Path:
    """Return `target`, after compiling the extension if it is not there. Raises CannotBuild."""
    return building.make(target, _recipe, WHAT, ABOUT, say)


def _recipe(whole: bool) -> compiling.Recipe:
    return compiling.core(building.python_headers(), building.pybind11_headers(), whole)


def _say(text: str) -> None:
    print(f"dtrrun: {text}", file=sys.stderr, flush=True)


def make_policy(
    heuristic: str,
    *,
    seed: int = 0,
    sample: bool = False,
    ignore_small: float = 0.0,
    latest: bool = False,
    scan: bool = False,
    extension: ModuleType | None = None,
) -> Policy:
    """Make a policy that evicts by `heuristic` (one of HEURISTIC_NAMES, h'(s=…,m=…,c=…) or module:function).

    seed: for the `random` heuristic and for sampling. sample: search only a random √n of the n nodes.
    ignore_small: nodes below this fraction of the mean size are chosen only when nothing else is left.
    latest: among equal scores, choose the node inserted last, not first. scan: compute every score at each
    choice; the choices are the same. extension: that of the nodes; the simulator's if None. Raises ValueError
    for a heuristic that is unknown or cannot be loaded, and CannotBuild.
    """
    made: Policy = (extension or load()).Policy(
        make_heuristic(heuristic, seed),
        latest=latest,
        scan=scan,
        ignore_small=ignore_small,
        sample=random.Random(seed).sample if sample else None,
    )
    return made


@cache
def graph_of(extension: Any) -> Graph:
    """Return the `Graph` that makes an extension's nodes, after giving them the methods of `core.graph`."""
    for native, own in (extension.Version, Version), (extension.Operation, Operation):
        for name, value in vars(own).items():
            is_method = callable(value) or isinstance(value, property)
            if is_method and not name.startswith("__") and name not in vars(native):
                setattr(native, name, value)
    return Graph(extension, type("Signature", (extension.SignatureFigures, Signature), {}))


def graph() -> Graph:
    """Return the `Graph` that makes the simulator's nodes. Raises CannotBuild."""
    return graph_of(load())
