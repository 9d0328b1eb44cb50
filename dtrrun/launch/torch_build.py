"""Finds an interpreter's PyTorch, and what it is built for, without importing it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

from dtrrun.monitor import gpus

SECONDS = 20
# Exclude the current folder, not on the path of a script elsewhere. A namespace package has no origin.
WHERE = (
    "import sys; sys.path = [folder for folder in sys.path if folder]; "
    "from importlib.util import find_spec; print(find_spec('torch').origin or '')"
)
_VERSIONS = re.compile(r"""^(cuda|hip)\b[^=\n]*=\s*["']([^"'\n]+)["']""", re.MULTILINE)


def build_of(python: str) -> str | None:
    """Return a build as in `monitor.gpus`; None if there is no PyTorch, or it lacks its `version.py`."""
    origin = origin_of(python)
    if not origin:
        return None
    try:
        with open(os.path.join(os.path.dirname(origin), "version.py")) as file:
            return gpus.build_of(SimpleNamespace(**dict(_VERSIONS.findall(file.read()))))
    except (OSError, ValueError):
        return None


def origin_of(python: str) -> str:
    """Return the path of the `__init__.py` of an interpreter's PyTorch; "" if it has none."""
    try:
        if os.path.abspath(python) == sys.executable:
            spec = find_spec("torch")
            return spec.origin or "" if spec is not None else ""
        command = [python, "-c", WHERE]
        done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True, text=True)
        return done.stdout.strip().rpartition("\n")[2]
    except (OSError, ValueError, ImportError, subprocess.SubprocessError):
        return ""
