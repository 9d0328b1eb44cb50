"""`torch.compile` compiles nothing under a dispatch mode, and says nothing: we say it once.

And Dynamo, its front end, is told to keep off our own frames. PyTorch does so for every dispatch mode by
wrapping its handler, which costs a microsecond an operator whether anything is compiled or not; a mark at
the handler's code does the same for nothing. The mark is private to PyTorch: where it is missing, the
wrapper stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame

CAN_MARK = all(
    hasattr(eval_frame, name) for name in ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
)

TEXT = (
    "torch.compile compiles nothing under dtrrun: the function runs eagerly, with the same results but "
    "without the compiler's speed"
)


def keep_off(function: Any) -> None:
    """Dynamo shall compile neither `function` nor anything that it calls."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))


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
            if kwargs.get("fullgraph"):  # it would raise, in flex_attention too, which asks for it itself
                kwargs["fullgraph"] = False
            return original(*args, **kwargs)

        torch.compile = compile

    def remove(self) -> None:
        torch.compile = self._original
