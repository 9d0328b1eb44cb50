"""Chooses the Python that runs a script: the one that `python` means at the terminal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

from dtrrun.launch.errors import NOT_EXECUTABLE, NOT_FOUND, LaunchError

ENVIRONMENTS = ("VIRTUAL_ENV", "CONDA_PREFIX")


def choose(wanted: str | None, environ: Mapping[str, str] = os.environ, called: str | None = None) -> str:
    """Return the interpreter for a script, `-m` or `-c`. The first of these that exists:

    1. `wanted`: what `--python` says, a path or a command; 2. our own, where dtrrun was called by its path
    (`.venv/bin/dtrrun`) or as `python -m dtrrun`; 3. that of the active environment (VIRTUAL_ENV, then
    CONDA_PREFIX); 4. `python3` on PATH, if torch can be imported there: dtrrun may live in an environment of
    its own; 5. our own.

    `called` is how dtrrun was called (`sys.argv[0]`). Raises LaunchError if `wanted` cannot be run.
    """
    if wanted is not None:
        return _checked(wanted)
    if _called_by_path(sys.argv[0] if called is None else called, environ):
        return sys.executable
    for name in ENVIRONMENTS:
        if prefix := environ.get(name):
            python = os.path.join(prefix, "bin", "python")
            if os.access(python, os.X_OK):
                return sys.executable if _same(prefix, sys.prefix) else python
    found = shutil.which("python3", path=environ.get("PATH"))
    if found and not _same(found, sys.executable) and _has_torch(found):
        return found
    return sys.executable


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


def _has_torch(python: str) -> bool:
    """Return whether torch can be found there, without importing it."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
