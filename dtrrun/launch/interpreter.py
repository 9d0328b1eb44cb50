"""Chooses the Python that runs a script: the one that `python` means at the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

from dtrrun.launch.errors import NOT_EXECUTABLE, NOT_FOUND, LaunchError
from dtrrun.launch.torch_build import origin_of

ENVIRONMENTS = ("VIRTUAL_ENV", "CONDA_PREFIX")


def choose(wanted: str | None, environ: Mapping[str, str] = os.environ, called: str | None = None) -> str:
    """Return the interpreter for a script, `-m` or `-c`. The first of these that exists:

    1. `wanted`: what `--python` says, a path or a command; 2. our own, where dtrrun was called by its path
    (`.venv/bin/dtrrun`) or as `python -m dtrrun`; 3. that of the active environment (VIRTUAL_ENV, then
    CONDA_PREFIX); 4. `python` or `python3` on PATH, if it has torch: dtrrun may have a separate environment;
    5. our own if it has torch; 6. `python` on PATH; 7. our own.

    But our own without torch, which suffices for the command, comes after any other that has torch.

    `called` is how dtrrun was called (`sys.argv[0]`). Raises LaunchError if `wanted` cannot be run.
    """
    if wanted is not None:
        return _checked(wanted)
    ours = _called_by_path(sys.argv[0] if called is None else called, environ)
    others: list[str] = []
    for name in ENVIRONMENTS:
        if prefix := environ.get(name):
            python = os.path.join(prefix, "bin", "python")
            if _same(prefix, sys.prefix):
                ours = ours or not others
            elif os.access(python, os.X_OK):
                others.append(python)
    torch_is_here = bool(origin_of(sys.executable))
    if ours and torch_is_here:
        return sys.executable
    if others and not ours:
        return others[0]
    found = (shutil.which(name, path=environ.get("PATH")) for name in ("python", "python3"))
    others += [python for python in found if python and not _is_ours(python)]
    for python in others:
        if origin_of(python):
            return python
    return others[0] if others and not (ours or torch_is_here) else sys.executable


def _checked(wanted: str) -> str:
    if found := shutil.which(os.path.expanduser(wanted)):
        return found
    if os.path.exists(wanted):
        raise LaunchError(f"--python: {wanted}: cannot be executed", NOT_EXECUTABLE)
    raise LaunchError(f"--python: no such interpreter: {wanted}", NOT_FOUND)


def _called_by_path(called: str, environ: Mapping[str, str]) -> bool:
    """Return whether dtrrun was not found through PATH.

    called: the script, or __main__.py after `python -m`.
    """
    found = shutil.which("dtrrun", path=environ.get("PATH"))
    return found is None or not _same(found, called)


def _same(one: str, other: str) -> bool:
    try:
        # Not realpath, since the pythons of two environments may be links to one file.
        return os.path.abspath(one) == os.path.abspath(other) or (
            os.path.isdir(one) and os.path.samefile(one, other)
        )
    except OSError:
        return False


def _is_ours(python: str) -> bool:
    """Return whether `python` is the interpreter that runs us, by this name or another in the same folder."""
    return _same(os.path.dirname(os.path.abspath(python)), os.path.dirname(sys.executable)) and (
        os.path.realpath(python) == os.path.realpath(sys.executable)
    )
