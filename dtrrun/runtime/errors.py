"""The one error that the runtime may raise into the user's program."""

from __future__ import annotations

import torch


class BudgetError(torch.OutOfMemoryError):
    """A budget too small for one operator, raised before anything of the program's state was lost.

    `operator`: its name; `needed_bytes`: what it had to allocate; `least_budget_bytes`: the least budget that
    would have done for it at this point; `pinned`: bytes that could not be evicted, by reason.
    """

    def __init__(
        self,
        operator: str,
        needed_bytes: int,
        budget_bytes: int,
        least_budget_bytes: int,
        pinned: dict[str, int],
    ) -> None:
        self.operator = operator
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.least_budget_bytes = least_budget_bytes
        self.pinned = pinned
        held = ", ".join(f"{reason} {size:,} B" for reason, size in pinned.items()) or "nothing"
        super().__init__(
            f"dtrrun: the budget of {budget_bytes:,} bytes is too small: {operator} needs {needed_bytes:,} "
            f"bytes more, and nothing else can be evicted. In memory and not evictable: {held}. "
            f"The least budget that would have done for this operator: {least_budget_bytes:,} bytes."
        )
