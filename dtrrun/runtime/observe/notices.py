"""One-line notices when the program does something that dtrrun does not support.

These only use hooks: they cost operators no time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from dtrrun.runtime.tracebacks import hide

MODULES = {"deepspeed": "DeepSpeed moves and frees memory itself; dtrrun was not tried with it"}
"""Packages whose import causes a notice."""

EMPTIED = "its data is not allocated yet"
"""Part of the error that PyTorch's native code raises when it reads an evicted tensor."""

READ_UNSEEN = (
    "native code read an evicted tensor; dtrrun sees only PyTorch's operators. "
    "Register the function as one (torch.library), or keep the tensor in memory (session.pin)"
)
SCRIPTED = "TorchScript has turned a BudgetError into a plain RuntimeError. It was: "
FORKED = (
    "process {pid}, a child made by os.fork(), trains without a budget; children of multiprocessing, "
    "subprocess and torchrun get their own"
)
OTHER_DEVICE = "tensors on {device} are outside the budget: only those on {ours} are counted and evicted"


class Notices:
    """Inspects uncaught exceptions while installed. `budget_error`: the text of the last BudgetError."""

    def __init__(
        self, warn: Callable[[str], None], alert: Callable[[str], None], has_evicted: Callable[[], bool]
    ) -> None:
        """has_evicted: returns whether anything is evicted at present."""
        self._warn, self._alert, self._has_evicted = warn, alert, has_evicted
        self.budget_error = ""
        self._seen: set[str] = set()

    def install(self) -> None:
        self._original = original = sys.excepthook

        def hook(kind: Any, error: Any, traceback: Any) -> None:
            whole = traceback is error.__traceback__
            hide(error)
            original(kind, error, error.__traceback__ if whole else traceback)
            text = str(error)
            if EMPTIED in text and self._has_evicted():  # a program may empty storages itself, as FSDP does
                self._alert(READ_UNSEEN)
            elif self.budget_error and "TorchScript" in text:
                self._alert(SCRIPTED + self.budget_error)

        self._hook = sys.excepthook = hook
        self.look_for_modules()

    def remove(self) -> None:
        if sys.excepthook is self._hook:
            sys.excepthook = self._original

    def look_for_modules(self) -> None:
        """Called periodically."""
        for name, text in MODULES.items():
            if name in sys.modules and name not in self._seen:
                self._seen.add(name)
                self._warn(text)


def warn_when_it_trains(wanted: Callable[[], bool]) -> None:
    """Print a line at the first optimizer step of a forked child without a session, if `wanted()`."""

    def stepping(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        handle.remove()
        if wanted():
            text = FORKED.format(pid=os.getpid())
            print(f"dtrrun: warning: {text}", file=sys.stderr, flush=True)

    handle = register_optimizer_step_pre_hook(stepping)
