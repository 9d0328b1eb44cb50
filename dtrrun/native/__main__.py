"""Builds the native extension ahead of its first use: python -m dtrrun.native."""

from __future__ import annotations

import sys

try:
    from dtrrun.native import build
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(f"dtrrun: PyTorch is not installed for {sys.executable}: use the Python that runs the script")

try:
    print(build.build(lambda text: print(text, file=sys.stderr, flush=True)))
except build.CannotBuild as error:
    sys.exit(f"dtrrun: operators will be handled in Python, which is slower: {error}")
