"""A mutant: a function or a constant of dtrrun, what it is replaced with, and the tests that must notice.

The tables are in `mutants_of_*.py`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import reduce
from importlib import import_module
from typing import Any, NamedTuple

ROWS = (
    "in-place operators",
    "mutated constants",
    "gradients",
    "schemas that lie",
    "randomness",
    "uninitialised memory",
    "views by identity",
    "escapes",
    "native extensions",
    "storages that are not ours",
    "several outputs",
    "other layouts and subclasses",
    "DDP and FSDP",
    ".data, set_, swap_tensors",
    "torch.compile",
    "opaque operators",
    "operators that are not replayed",
    "threads",
    "fork",
    "long chains",
    "failing operators",
    "thrashing",
    "accounting",
    "replays",
)

NOT_APPLICABLE: dict[str, str] = {}


class around:  # as a decorator, and in tables, where it reads like a function
    """A replacement that receives the original before the arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def over(self, original: Any) -> Any:
        return lambda *args, **kwargs: self.function(original, *args, **kwargs)


def paths_of(mutant: Any) -> list[str]:
    """Return the tests that must notice a mutant.

    They are "file::test file::test", without "tests/conformance/test_" and ".py", or "folder/file::test".
    """
    found = []
    for test in mutant.tests.split():
        folder, _, rest = test.rpartition("/")
        found.append(f"tests/{folder or 'conformance'}/test_{rest.replace('::', '.py::test_')}")
    return found


class Mutant(NamedTuple):
    row: str  # in the design's hazard table
    name: str
    target: str  # "module:name" or "module:Class.name", without "dtrrun."; the module is the one that uses it
    replacement: Any
    tests: str  # see `paths_of`

    def found(self) -> tuple[Any, str, Any]:
        """Return the module or class, the name in it, and its value. AttributeError: this row is stale."""
        module, _, path = self.target.partition(":")
        *classes, name = path.split(".")
        owner = reduce(getattr, classes, import_module(f"dtrrun.{module}"))
        return owner, name, inspect.getattr_static(owner, name)

    def apply(self) -> None:
        owner, name, original = self.found()
        new = self.replacement
        setattr(owner, name, new.over(original) if isinstance(new, around) else new)


MUTANTS: list[Mutant] = []


def row(name: str, *mutants: tuple[str, str, Any, str]) -> None:
    MUTANTS.extend(Mutant(name, *mutant) for mutant in mutants)


# -- common replacements -------------------------------------------------------------------------------------


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing."""


def yes(*_args: Any, **_kwargs: Any) -> bool:
    return True


def no(*_args: Any, **_kwargs: Any) -> bool:
    return False


def called_from(module: str) -> bool:
    """Return whether the calling replacement was called from that module of dtrrun."""
    frame = sys._getframe()
    while frame.f_globals["__name__"].startswith("mutant"):
        frame = frame.f_back  # type: ignore[assignment]
    return bool(frame.f_globals["__name__"] == f"dtrrun.{module}")


def only_in(module: str, instead: Callable[..., Any]) -> around:
    """Return a replacement that calls `instead` if called from that module, else the original."""
    return around(
        lambda original, *args, **kwargs: (instead if called_from(module) else original)(*args, **kwargs)
    )
