"""Builds the native extension ahead of its first use: python -m dtrrun.native."""

from __future__ import annotations

import sys

from dtrrun.native import build

try:
    print(build.build(lambda text: print(text, file=sys.stderr, flush=True)))
except build.CannotBuild as error:
    sys.exit(f"dtrrun: operators will be handled in Python, which is slower: {error}")
