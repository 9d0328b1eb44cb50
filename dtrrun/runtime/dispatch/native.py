"""Decides whether the native interposer brings the operators, or a Python dispatch mode."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from dtrrun.native import build
from dtrrun.settings import RuntimeSettings

NOT_BUILT = "operators are handled in Python, which is slower: {}"
REQUIRED = "the native fast path is required: {}"


def choose(settings: RuntimeSettings, on_cpu: bool, warn: Callable[[str], None]) -> ModuleType | None:
    """Return the native extension, or None for a Python dispatch mode.

    on_cpu: whether operators are run as on a CPU. warn: called with one line if it cannot be built. Raises
    RuntimeError, of one line, if it is required.
    """
    if settings.native == "off" or not on_cpu:
        return None
    try:
        return build.load(_say)
    except build.CannotBuild as error:
        if settings.native == "require":
            raise RuntimeError(REQUIRED.format(error)) from None
        warn(NOT_BUILT.format(error))
        return None


def _say(text: str) -> None:
    print(f"dtrrun: {text}", file=sys.stderr, flush=True)
