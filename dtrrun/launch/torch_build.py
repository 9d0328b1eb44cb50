"""Finds what an interpreter's PyTorch is built for without importing it, from its `version.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

from dtrrun.monitor import gpus

SECONDS = 20
WHERE = (
    "import sys; sys.path = [folder for folder in sys.path if folder]; "
    "from importlib.util import find_spec; print(find_spec('torch').origin)"
)
_VERSIONS = re.compile(r"""^(cuda|hip)\b[^=\n]*=\s*["']([^"'\n]+)["']""", re.MULTILINE)


def build_of(python: str) -> str | None:
    """Return a build as in `monitor.gpus`; None if there is no PyTorch, or it lacks that file."""
    try:
        with open(os.path.join(os.path.dirname(_origin(python)), "version.py")) as file:
            return gpus.build_of(SimpleNamespace(**dict(_VERSIONS.findall(file.read()))))
    except (OSError, ValueError, ImportError, subprocess.SubprocessError):
        return None


def _origin(python: str) -> str:
    """Return the path of torch's `__init__.py`. Raises one of several errors if there is none."""
    if os.path.abspath(python) == sys.executable:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            raise ImportError("no torch")
        return spec.origin
    command = [python, "-c", WHERE]
    done = subprocess.run(command, capture_output=True, timeout=SECONDS, check=True, text=True)
    return done.stdout.strip().rpartition("\n")[2]
