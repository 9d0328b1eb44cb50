"""Lets Python's core do in a native session what the extension does: it declines while anything observes."""

from __future__ import annotations

import pytest

from dtrrun.core.ledger import Ledger
from dtrrun.core.observer import Observer


def use_python_core(patch: pytest.MonkeyPatch) -> None:
    """From now on, evictions and rematerializations are those of Python: of new sessions."""
    begin = Ledger.__init__

    def begin_observed(ledger: Ledger, *args: object, **named: object) -> None:
        begin(ledger, *args, **named)  # type: ignore[arg-type]
        ledger.observers.append(Observer())

    patch.setattr(Ledger, "__init__", begin_observed)
