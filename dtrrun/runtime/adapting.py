"""`--over-budget raise`: changes the budget of a run that nobody watches, where it would otherwise end.

A budget that is too small is raised to what is needed, as far as there is memory. One that is larger than
what the device gives, because another process has grown there, is lowered, and rises again once that memory
has been free for a while. Each change is told in one line, and in the report. There are few of them: the
first raise is to what a rehearsal of the rest of the step needs, as the error would advise, and each further
one leaves twice the margin. Once a budget that was lowered has turned out to be too small, it is not lowered
again, and in any case at most `MOST_LOWERED` times: from then on more is evicted than the budget requires, as
without this option.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter_ns as now_ns
from typing import TYPE_CHECKING, Any

from dtrrun.core.eviction import Refusal
from dtrrun.core.graph import Signature, Version
from dtrrun.runtime.errors import BudgetError
from dtrrun.sizes import format_size, format_size_up
from dtrrun.telemetry.advice import Advised

if TYPE_CHECKING:
    from dtrrun.runtime.session import Session

MARGIN_SHIFT = 4
"""A raise leaves a sixteenth beyond what is needed, the next one an eighth, and so on up to as much again."""
BLIND_SHIFT = 2
"""The same of a program of which nobody knows what it will need: it is making its parameters."""
MOST_LOWERED = 8
PATIENCE_NS = 5_000_000_000
"""How long memory has to be free before a budget that was lowered rises again, the first time. Each further
time, twice as long: a neighbour that grows and shrinks would have it changed all the time."""
LOOKS = 4
"""How often it is looked for in that time, at the ends of steps."""
WORTH_SHIFT = 4
"""A rise by less than a sixteenth is not worth a change."""
TOO_SMALL, REFUSED, FREE = "too small", "refused", "free"
"""Reasons for a change, as reports name them."""

RAISED = "the budget is raised from {before} to {now}{all}: {operator}, with what must stay, takes {least}"
ALL = ", which is all that there is"
LOWERED = (
    "the budget is lowered from {before} to {now}: {where} has no more memory for this process (has another "
    "one grown?)"
)
RISEN = "the budget is raised from {before} to {now} again: {where} has had memory for it for {wait:.0f} s"
NO_MORE = "The budget was not raised (--over-budget raise): {where} has {most} for it at most"

Advise = Callable[[BudgetError, Sequence[Version], Signature | None], Advised]


class Adapting:
    """Changes a session's budget; see `core.eviction.Adapting`. Called with the ledger's lock."""

    def __init__(self, session: Session, advise: Advise) -> None:
        """advise: returns the budgets that an error names."""
        self._session, self._ledger, self._device = session, session.ledger, session.device
        self._advise = advise
        self._started_ns = now_ns()
        self._former = 0  # the budget before it was lowered; 0 if it stands
        self._free, self._since_ns = 0, 0  # the budget that there has been memory for since then; 0: none
        self._due_ns = 0  # when to look whether there is memory
        self.changes: list[dict[str, Any]] = []
        """What reports say about each change (docs/report.md)."""

    def too_small(self, refusal: Refusal, failed: Signature | None = None) -> bool:
        """Raise the budget to what is needed, and a margin. Returns whether there is so much memory.

        failed: the program's call that does not fit, if it is one.
        """
        ledger, (operator, nbytes, least) = self._ledger, refusal
        before = ledger.budget_bytes
        if before is None or not ledger.evicting or self._session.left:
            return False
        least, most = max(least, before + 1), self._device.most_bytes()
        if least > most:
            return False
        advised = self._advised(BudgetError(operator, nbytes, before, least), failed)
        raised = sum(one["reason"] == TOO_SMALL for one in self.changes)
        wanted = least + (least >> max((MARGIN_SHIFT if advised.expected else BLIND_SHIFT) - raised, 0))
        now = min(max(wanted, advised.expected if raised else advised.likely), most)
        text = RAISED.format(
            before=format_size(before),
            now=format_size(now),
            operator=operator,
            least=format_size_up(least),
            all=ALL if now == most else "",
        )
        self._change(now, text, TOO_SMALL, operator, least)
        if now >= self._former:
            self._former = 0
        return True

    def refused(self, most: int) -> bool:
        """Lower the budget to `most` bytes, as the device or the system refuses what it has room for.

        Returns whether that was done.
        """
        ledger, before = self._ledger, self._ledger.budget_bytes
        if before is None or not ledger.evicting or not 0 < most < before:
            return False
        reasons = [one["reason"] for one in self.changes]
        lowered = reasons.count(REFUSED)
        if lowered == MOST_LOWERED or (lowered and TOO_SMALL in reasons[reasons.index(REFUSED) :]):
            return False
        sizes = {"before": format_size(before), "now": format_size(most)}
        self._change(most, LOWERED.format(**sizes, where=self._where), REFUSED)
        self._former, self._free, self._due_ns = max(self._former, before), 0, now_ns()
        return True

    def step_ended(self) -> None:
        """Raise a budget that was lowered, once there has been memory for more for a while."""
        ledger, before, now = self._ledger, self._ledger.budget_bytes, now_ns()
        if not self._former or now < self._due_ns or before is None or not ledger.evicting:
            return
        if before != self.changes[-1]["to_bytes"]:  # the program has set another
            self._former = 0
            return
        patience = PATIENCE_NS << (sum(one["reason"] == REFUSED for one in self.changes) - 1)
        self._due_ns = now + patience // LOOKS
        there = min(self._device.most_bytes(), self._former)
        if there < before + (before >> WORTH_SHIFT):
            self._free = 0
        elif not self._free:
            self._free, self._since_ns = there, now
        else:
            self._free = min(self._free, there)
            if (waited := now - self._since_ns) >= patience:
                facts = {"before": format_size(before), "now": format_size(self._free), "where": self._where}
                self._change(self._free, RISEN.format(**facts, wait=waited / 1e9), FREE)
                self._former, self._free = 0 if self._free == self._former else self._former, 0

    def hint(self, least: int) -> str:
        """Return why the budget is not raised to so many bytes, for the error's text; "" if it could be."""
        most = self._device.most_bytes()
        return "" if least <= most else NO_MORE.format(where=self._where, most=format_size(most))

    @property
    def _where(self) -> str:
        return "this machine" if self._device.type == "cpu" else "the device"

    def _advised(self, error: BudgetError, failed: Signature | None) -> Advised:
        """Return the budgets that the error would name; none if that is unknown."""
        with suppress(Exception):  # optimizers and tensors may be of any class
            inputs = [one for one in self._ledger.versions.values() if one.locks] if failed else []
            return self._advise(error, inputs, failed)
        return Advised()

    def _change(self, now: int, text: str, reason: str, operator: str = "", least: int = 0) -> None:
        session = self._session
        self.changes.append(
            {
                "seconds": (now_ns() - self._started_ns) / 1e9,
                "step": session.steps.count + 1,
                "from_bytes": self._ledger.budget_bytes,
                "to_bytes": now,
                "reason": reason,
                "operator": operator or None,
                "least_bytes": least or None,
            }
        )
        session.tell(text)
        self._ledger.set_budget(now)
        self._device.set_budget(now)
