"""What a program is told of each of its steps (`Session.on_step`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtrrun.runtime.session import Session

Figures = Mapping[str, int | float]


class OnStep:
    """Calls one function of the program at each step's end."""

    def __init__(self, session: Session, callback: Callable[[Figures], object]) -> None:
        self._session, self._callback = session, callback
        self._copied = self._copies()

    def __call__(self) -> None:
        if not self._session.left:
            self._callback(self._figures())

    def _figures(self) -> Figures:
        session, step = self._session, self._session.steps.last
        assert step is not None
        before, self._copied = self._copied, self._copies()
        figures: dict[str, int | float] = {
            "step": step["index"],
            "seconds": step["wall_ns"] / 1e9,
            "peak_bytes": step["peak_bytes"],
            "evictions": step["evictions"],
            "rematerializations": step["rematerializations"],
            "rematerialization_seconds": step["rematerialization_ns"] / 1e9,
            "host_copies": self._copied[0] - before[0],
            "host_copied_bytes": self._copied[1] - before[1],
        }
        if session.ledger.budget_bytes is not None:
            figures["budget_bytes"] = session.ledger.budget_bytes
        return figures

    def _copies(self) -> tuple[int, int]:
        """Return how many tensors have been copied to the host and back so far, and their bytes."""
        host = self._session.host.counters()
        return host["copies_out"] + host["copies_in"], host["copied_out_bytes"] + host["copied_in_bytes"]
