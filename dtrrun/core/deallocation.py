"""Storages that the program releases (`core/deallocation.h`)."""

from __future__ import annotations

from collections.abc import Callable

from dtrrun.core.graph import Operation
from dtrrun.core.ledger import Ledger


class Deallocation:
    """Keeps released storages while that saves more than it costs."""

    came_back: Callable[[Operation], None]
    """Note that the output of an operation is in memory again: its inputs need not be kept any longer."""
    release_kept_inputs: Callable[[], None]
    """Release such inputs. Call it only while no rematerialization may read them."""
    cap_scratch: Callable[[], None]
    """Limit recomputed versions that the program does not have to a fraction of the budget."""
    free_all_unread_scratch: Callable[[], None]
    """Free those of them that no recipe reads any more."""

    def __init__(self, ledger: Ledger) -> None:
        """ledger: one of the same extension."""
