"""Storages that the program releases (`core/deallocation.h`)."""

from __future__ import annotations

from collections.abc import Callable

from dtrrun.core.graph import Operation
from dtrrun.core.ledger import Ledger


class Deallocation:
    """Keeps released storages while that saves more than it costs."""

    came_back: Callable[[Operation], None]
    """The output of an operation is in memory again, so its inputs need not be kept any longer."""
    release_kept_inputs: Callable[[], None]
    """Release these. No rematerialization that may read them is in progress."""
    cap_scratch: Callable[[], None]
    """Keep recomputed versions that the program does not have up to a fraction of the budget."""
    free_all_unread_scratch: Callable[[], None]
    """Free those that no recipe reads any more."""

    def __init__(self, ledger: Ledger) -> None:
        """ledger: of the same extension."""
