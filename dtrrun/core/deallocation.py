"""Storages that the program releases (`core/deallocation.h`)."""

from __future__ import annotations

from collections.abc import Callable

from dtrrun.core.ledger import Ledger


class Deallocation:
    """Keeps released storages while that saves more than it costs."""

    free_all_unread_scratch: Callable[[], None]
    """Free recomputed versions that the program does not have and no recipe reads any more."""

    def __init__(self, ledger: Ledger) -> None:
        """ledger: one of the same extension."""
