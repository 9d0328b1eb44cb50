"""`torch.compile` compiles nothing under a dispatch mode, and says nothing: we say it once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

TEXT = (
    "torch.compile compiles nothing under dtrrun: the function runs eagerly, with the same results but "
    "without the compiler's speed (fullgraph=True raises)"
)


class CompileNotice:
    """Wraps `torch.compile` while installed."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn

    def install(self) -> None:
        self._original = original = torch.compile
        warn = self._warn

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            warn(TEXT)
            return original(*args, **kwargs)

        torch.compile = compile

    def remove(self) -> None:
        torch.compile = self._original
