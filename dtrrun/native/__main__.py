"""Builds the native extension ahead of its first use, if need be: python -m dtrrun.native."""

from __future__ import annotations

import sys

try:
    from dtrrun.extensions import build, building
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(f"dtrrun: PyTorch is not installed for {sys.executable}: use the Python that runs the script")

try:
    print(build.find(lambda text: print(text, file=sys.stderr, flush=True)))
except building.CannotBuild as error:
    sys.exit(f"dtrrun: {error}")
