"""The one error that the runtime may raise into the user's program."""

from __future__ import annotations

import os

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
        ours = f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        held = ", ".join(f"{reason} {size:,} B" for reason, size in pinned.items()) or "nothing"
        super().__init__(
            f"dtrrun: {ours}the budget of {budget_bytes:,} bytes is too small: {operator} needs "
            f"{needed_bytes:,} bytes more, and nothing else can be evicted. In memory and not evictable: "
            f"{held}. The least budget that would have done for this operator: {least_budget_bytes:,} bytes."
        )
