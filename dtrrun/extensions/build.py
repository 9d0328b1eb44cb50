"""Finds the native extension, or builds it, once for each PyTorch and Python.

A wheel may bring a binary for this version of PyTorch (`shipped.py`). Otherwise the extension is compiled
here, and kept in the user's cache.

`dtrrun doctor` has the target's interpreter run this package under another name, since dtrrun need not be
installed there: so it imports nothing else from dtrrun, and its own files by relative names.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from . import compiling, shipped
from .building import (
    ERRORS,
    NO_SOURCES,
    UNWRITABLE,
    CannotBuild,
    cache_folder,
    compiler,
    found_at,
    import_from,
    last_failure,
    make,
    python_headers,
    spare,
)
from .compiling import FILES, NAME, Recipe

OLDEST = (2, 9)
"""See docs/design/native.md."""
WHAT, ABOUT = "the native part", "for PyTorch {} (once, about a minute)"
NO_TORCH_HEADERS = (
    "PyTorch's headers are missing",
    "install a PyTorch that includes its C++ headers, as the one from pip does",
)
TOO_OLD = "PyTorch {} is too old for dtrrun", "install {}.{} or later"
KEY = "CustomRNGKeyId"
"""The dispatch key at which operators come to the extension (`way_in.h`)."""
TAKEN = (
    f"PyTorch {{}}, or an extension, uses the dispatch key {KEY}, at which operators would come to dtrrun",
    "run the program without that extension, or with another version of PyTorch or dtrrun",
)


def recipe(whole: bool = True) -> Recipe:
    """Return how it is compiled here. whole: in as few units as possible. Raises CannotBuild."""
    python = python_headers()
    root = _torch()
    if not (root / "include" / "torch" / "library.h").exists():
        raise CannotBuild(*NO_TORCH_HEADERS)
    against = f"{torch.__version__} {torch.version.git_version}"
    return compiling.native(root, python, int(torch._C._GLIBCXX_USE_CXX11_ABI), whole, against)


def _torch() -> Path:
    """Return PyTorch's folder; environments that link to one PyTorch share what is built for it."""
    return Path(torch.__file__).resolve().parent


def key() -> str:
    """Return what a built extension depends on, as one word: sources, PyTorch, Python."""
    digest = hashlib.sha256()
    abi = sysconfig.get_config_var("SOABI")
    for part in (compiling.sources(), torch.__version__, torch.version.git_version, abi):
        digest.update(str(part).encode() + b"\0")
    return f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def built() -> Path:
    """Return where the extension for this PyTorch and Python is, once it has been built."""
    return cache_folder() / key() / f"{NAME}.so"


def find(say: Callable[[str], None]) -> Path:
    """Return the path of the extension: what was built here, else the wheel's, else what is built now.

    Raises CannotBuild.
    """
    _check_place()
    target = built()
    if found := found_at(target):
        return found
    binary = shipped.binary()
    unfit = shipped.why_not(binary, target.parent)
    if binary and not unfit:
        return binary
    try:
        return build(say)
    except CannotBuild as error:
        raise CannotBuild(_both(error.why, unfit), error.do) from None


def build(say: Callable[[str], None]) -> Path:
    """Return the path of the extension, after building it if need be. Raises CannotBuild."""
    _check_place()
    return make(built(), recipe, WHAT, ABOUT.format(torch.__version__), say)


def _check_place() -> None:
    """Raise CannotBuild if there is nothing to build, or if this PyTorch is too old."""
    if not FILES[0][0].exists():
        raise CannotBuild(NO_SOURCES[0].format(FILES[0][0]), NO_SOURCES[1])
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST:
        raise CannotBuild(TOO_OLD[0].format(torch.__version__), TOO_OLD[1].format(*OLDEST))


def check_key() -> None:
    """Raise CannotBuild if anyone uses the dispatch key. To be called before the extension does."""
    has_fallback = torch._C._dispatch_has_backend_fallback(torch._C._dispatch_key_parse(KEY))
    if has_fallback or torch._C._dispatch_get_registrations_for_dispatch_key(KEY):
        raise CannotBuild(TAKEN[0].format(torch.__version__), TAKEN[1])


def outlook() -> dict[str, Any]:
    """Return what a run would find, as JSON values, without building anything.

    path: where the extension is or would be, if anywhere. built: whether it is there. shipped: whether it is
    the wheel's. compiler: what would build it, or None. why, do: why there is none, and what would help, or
    None.
    """
    unfit = ""
    found: dict[str, Any] = {"path": None, "built": False, "shipped": False, "compiler": None}
    found |= {"why": None, "do": None}
    try:
        _check_place()
        target = built()
        found["path"] = str(target)
        if ready := found_at(target):
            found |= {"built": True, "path": str(ready)}
            import_from(NAME, ready)
            return found
        binary = shipped.binary()
        unfit = shipped.why_not(binary, target.parent)
        if binary and not unfit:
            import_from(NAME, binary)
            return found | {"path": str(binary), "built": True, "shipped": True}
        found["compiler"] = shlex.join(compiler())
        recipe()
        there = next(folder for folder in target.parents if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            other = spare(target)
            if other is None:
                raise CannotBuild(f"{there}: cannot be written", UNWRITABLE[1])
            target, found["path"] = other, str(other)
        if why := last_failure(target.parent):
            raise CannotBuild(why, f"see {target.parent / ERRORS}; the next run tries again")
    except CannotBuild as error:
        found["why"], found["do"] = _both(error.why, unfit), error.do
    return found


def _both(why: str, unfit: str) -> str:
    """Return why nothing can be built, and why the wheel's binary cannot be used."""
    return f"{why}, and {unfit}" if unfit else why


def load(say: Callable[[str], None]) -> ModuleType:
    """Find or build the extension, and import it. Raises CannotBuild; a process does not try twice."""
    found = _loaded(say)
    if isinstance(found, CannotBuild):
        raise CannotBuild(found.why, found.do)
    return found


@cache
def _loaded(say: Callable[[str], None]) -> ModuleType | CannotBuild:
    if NAME in sys.modules:  # another one, from sources changed meanwhile, could not register beside it
        return sys.modules[NAME]
    try:
        path = find(say)
        try:
            return import_from(NAME, path)
        except CannotBuild:
            if path == built():
                raise
            # The wheel's binary was tried with other libraries than this process has.
            return import_from(NAME, build(say))
    except CannotBuild as error:
        return error
