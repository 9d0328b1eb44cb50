"""Warns about gradient checkpointing in the program, which recomputes what dtrrun might have kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from dtrrun.runtime.patches.registry import Function, Patches

CHECKPOINTING = (
    "the program uses gradient checkpointing (torch.utils.checkpoint), which recomputes in addition to "
    "dtrrun; without it, the program is likely to be faster inside the same budget"
)


class Checkpointing:
    """Watches for checkpointing while installed, until it has been seen."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._seen = False
        self._patches = Patches()

    def install(self) -> None:
        def noting(original: Function) -> Function:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._seen = True
                return original(*args, **kwargs)

            return call

        # Each of the two kinds of checkpointing calls one of these once per part of the network.
        if frame := getattr(torch_checkpoint, "_CheckpointFrame", None):  # private: it may go away
            self._patches.wrap(frame, "__init__", noting)
        self._patches.wrap(torch_checkpoint, "check_backward_validity", noting)

    def remove(self) -> None:
        self._patches.undo()

    def step_ended(self, recomputes: bool) -> None:
        """Warn once, if there is a budget that makes dtrrun recompute as well."""
        if self._seen and recomputes:
            self._warn(CHECKPOINTING)
            self._seen = False
            self._patches.undo()
