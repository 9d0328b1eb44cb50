"""BudgetError, raised to the program if its budget is too small, and the text that explains it."""

from __future__ import annotations

import os
from typing import Any

import torch

from dtrrun.sizes import format_size, format_size_up
from dtrrun.telemetry.advice import FOR_A_COMMAND, advice

SHOWN = 4
"""How many reasons why memory cannot be evicted are listed in the message."""


CPU_WORDS = "DefaultCPUAllocator: can't allocate memory"
"""PyTorch's message when the CPU has no memory left."""


class BudgetError(torch.OutOfMemoryError):
    """The budget is too small for one operator. The program's state is intact.

    The message begins with PyTorch's words for a device without memory, and on a CPU ends with its
    allocator's, because programs that retry with a smaller batch look for these words, not for the class.

    It has these attributes:

    - `operator`: the name of the operator that did not fit.
    - `needed_bytes`: how much it had to allocate; 0 if it had allocated already.
    - `budget_bytes`: the budget that was too small.
    - `least_budget_bytes`: the smallest budget that would have been enough at this point. A later operator
      may need more.
    - `pinned`: how many bytes in memory could not be evicted, by reason.
    - `held_by`: what refers to most of them, by reason, where a variable of the program was found.
    - `called`: the operator that the program called. It differs from `operator` if an input had to be
      recomputed.
    - `called_bytes`: the bytes of its inputs, its results and all memory that cannot be evicted; 0 if
      unknown.
    - `training`: about how many bytes parameters, gradients and optimizer state need; None if unknown.
    - `expected_bytes`: the budget that is expected to be enough for the whole program; 0 if unknown.
    - `device_type`: the type of the session's device.
    - `hint`: what the program itself can do, if that is known.
    - `explained`: whether the session has added what it knows.
    """

    def __init__(
        self,
        operator: str = "",
        needed_bytes: int = 0,
        budget_bytes: int | None = None,
        least_budget_bytes: int = 0,
        pinned: dict[str, int] | None = None,
    ) -> None:
        """Without figures, the first argument is the message: a library may re-create the error that way."""
        super().__init__()
        told = budget_bytes is None
        self.operator = "" if told else operator
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes or 0
        self.least_budget_bytes = least_budget_bytes
        self.pinned = pinned or {}
        self.called, self.called_bytes = self.operator, 0
        self.training: dict[str, int | None] | None = None
        self.expected_bytes = 0
        self.device_type = "cpu"
        self.hint = ""
        self.held_by: dict[str, str] = {}
        self.explained = told
        self.args = (operator if told else self._text(FOR_A_COMMAND),)

    def explain(
        self,
        training: dict[str, int | None] | None,
        expected_bytes: int,
        how: tuple[str, str] = FOR_A_COMMAND,
        device_type: str = "cpu",
    ) -> None:
        """Add to the message what training needs in any case, and which budget to try."""
        self.training, self.expected_bytes, self.explained = training, expected_bytes, True
        self.device_type = device_type
        self.args = (self._text(how),)

    @property
    def least_bytes(self) -> int:
        """The bytes known to be needed for the program's own operator and for the one that failed."""
        return max(self.least_budget_bytes, self.called_bytes)

    def __reduce__(self) -> Any:
        """Support pickling: a pool's workers send errors to another process."""
        given = (self.operator, self.needed_bytes, self.budget_bytes, self.least_budget_bytes, self.pinned)
        names = (
            "called",
            "called_bytes",
            "training",
            "expected_bytes",
            "device_type",
            "hint",
            "held_by",
            "explained",
            "args",
        )
        state = {name: getattr(self, name) for name in names}
        return type(self), given, state

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        for name, value in (state or {}).items():
            setattr(self, name, value)

    def _text(self, how: tuple[str, str]) -> str:
        rank = f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        excess = self.least_budget_bytes - self.budget_bytes
        if self.needed_bytes > 0:
            what = f"{self.operator} needs {format_size_up(self.needed_bytes)} more"
        elif excess > 0:
            what = f"{self.operator} exceeds it by {format_size_up(excess)}"
        else:
            what = f"it does not hold what {self.operator} uses"
        held = ", ".join(
            f"{reason} {format_size(size)}" + (f" [{self.held_by[reason]}]" if reason in self.held_by else "")
            for reason, size in list(self.pinned.items())[:SHOWN]
        )
        evictable = f"nothing else can be evicted ({held})" if held else "nothing can be evicted"
        if self.called != self.operator:
            what = f"{self.called} needs {self.operator} to run again, and {what}"
        least = advice(self.called, self.least_bytes, self.training, self.expected_bytes, how)
        budget = format_size(self.budget_bytes)
        full = f"{rank}{self.device_type.upper()} out of memory. "
        hint = f" {self.hint}." if self.hint else ""
        in_pytorch = f" [{CPU_WORDS}]" if self.device_type == "cpu" else ""
        return (
            f"{full}dtrrun's budget of {budget} is too small: {what}, and {evictable}. "
            f"It takes {least}.{hint}{in_pytorch}"
        )


BudgetError.__module__ = "dtrrun"  # the name that the program uses, also shown in tracebacks
