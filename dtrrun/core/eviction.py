"""Making room, and the error raised if there is none. C++ decides what is evicted (`core/eviction.h`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from dtrrun.core import bound
from dtrrun.core.garbage import Garbage
from dtrrun.core.graph import Signature, Version
from dtrrun.core.ledger import Decision, Ledger, beside_tensors

STEP_SHIFT = 4  # a sixteenth of the limit


class Refusal(NamedTuple):
    """A request for which there is no room. least_bytes: the least budget that would have been enough."""

    operator: str
    nbytes: int
    least_bytes: int


class Adapting(Protocol):
    """Changes the budget."""

    def too_small(self, refusal: Refusal, failed: Signature | None = None) -> bool:
        """Raise the budget to what is needed. Returns whether that was possible.

        failed: the program's call that does not fit, if it is one.
        """

    def refused(self, most: int) -> bool:
        """Lower the budget to what the device gives, in bytes. Returns whether that was done."""


class Eviction(bound.Eviction):
    """Evicts until there is room."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        budget_error: type[Any],
        warn_only: bool = False,
        adapts: bool = False,
        garbage: Garbage,
    ) -> None:
        """budget_error: called with the operator, the bytes that it needs, the budget, the least sufficient
        budget, and the bytes that can't be evicted, by reason."""
        super().__init__(ledger)
        self._ledger, self.garbage = ledger, garbage
        self.BudgetError = budget_error
        self.warn_only, self.adapts = warn_only, adapts
        self._short_of, self._for = (
            0,
            "",
        )  # the latest request without room: what would have had to fit
        self.exceeded_by = ""  # the operator for which the limit was raised last
        self.adapting: Adapting | None = None  # under `raise`
        self._refusal = Refusal("", 0, 0)  # the latest one
        self._reach: dict[int, int] = {}  # by device
        self.refresh: Callable[[], bool] = lambda: False  # on a GPU: measure it again; has it grown?
        self.constants_leave: Callable[[], None] = lambda: None  # called when the first one is about to
        self.adopt_counted: Callable[[], None] = lambda: None  # enters what has only been counted

    @property
    def reach(self) -> int:
        """On a GPU: what tensors could use without fragmentation; otherwise -1."""
        return self._reach.get(self._ledger.device, -1)

    @reach.setter
    def reach(self, nbytes: int) -> None:
        self._reach[self._ledger.device] = nbytes

    def make_room(self, nbytes: int, operator: str) -> None:
        """Evict until `nbytes` more fit into the budget.

        operator: named in the error. Raises the budget error if they can't be made to fit.
        """
        if not self.try_room(nbytes):
            self.no_room(nbytes + self._ledger.reserved_bytes, operator)

    def no_room(self, nbytes: int, what: str | Signature) -> None:
        """Handle that `nbytes`, including what is reserved, do not fit although everything has been evicted.

        what: the call that needs them, or what to call it. Raises the budget error, unless the budget is
        exceeded or raised.
        """
        ledger, failed = self._ledger, None if isinstance(what, str) else what
        operator = what if isinstance(what, str) else what.operator.name
        self.garbage.hopeless = nbytes > ledger.limit and not self.replaying
        if self.reach >= 0 and (self._may_fit(nbytes) or (self.refresh() and self._may_fit(nbytes))):
            return  # the limit is an estimate: the allocator decides
        ledger.decided(Decision.REFUSED, nbytes, 0, 0)
        if self.warn_only and not self.adapts:
            self.over_budget += 1
            return
        self._short_of, self._for = ledger.resident_bytes + nbytes, operator
        refused = nbytes - ledger.reserved_bytes, operator
        self._refusal = self.refusal_of(*refused)
        if not self.replaying and self.exceeds(failed):
            return
        raise self.too_small(*refused)

    def exceeds(self, failed: Signature | None = None) -> bool:
        """Under `warn`, raise the limit to what has not fitted; under `raise`, the budget. Returns whether
        that was done.

        What must stay and the largest operator then fit, and the program goes on as inside a budget of that
        size. At least by a sixteenth, since each attempt to bring something back may take long.
        """
        ledger = self._ledger
        if self.adapting is not None:
            if ledger.others_reserve():  # they will have ended when it is tried again
                return False
            raised = self.adapting.too_small(self._refusal, failed)
            self.garbage.hopeless = self.garbage.hopeless and not raised
            return raised
        if not self.adapts:
            return False
        ledger.exceed(max(self._short_of, ledger.limit + (ledger.limit >> STEP_SHIFT)))
        self.over_budget += 1
        self.exceeded_by = self._for
        return True

    def stops_waiting(self) -> bool:
        """Under `raise`, raise the budget for the latest refusal, whatever other threads may still give back.

        Returns whether that was done.
        """
        return self.adapting is not None and self.adapting.too_small(self._refusal)

    def _may_fit(self, nbytes: int) -> bool:
        return not (self.replaying and self._ledger.resident_bytes + nbytes > self.reach)

    def release(self, nbytes: int) -> bool:
        """Evict `nbytes`. If there are fewer, evict all and return False."""
        return self.evict_to(max(self._ledger.resident_bytes - nbytes, 0))

    def collect_garbage(self) -> bool:
        """Collect garbage, as nothing is left to evict. Returns whether that has freed memory."""
        # If False, something else is tried first, or the program continues.
        certain = not (self.replaying or self.warn_only or self.reach >= 0)
        return self.garbage.without_room(certain=certain)

    # -- what the error says -----------------------------------------------------------------------

    def pinned_by_reason(self) -> dict[str, int]:
        """Return the resident bytes that can't be evicted now, by reason, largest first."""
        ledger = self._ledger
        pinned: dict[str, int] = {}
        for version in (*ledger.versions.values(), *ledger.scratch):
            if (
                version.device == ledger.device
                and version.resident
                and (version.locks or version.operation is None)
            ):
                # A constant stays whether it is in use or not, unless it could leave.
                constant = version.operation is None and not (version.locks and self.could_leave(version))
                reason = version.pin or "constant" if constant else "in use by the operator"
                pinned[reason] = pinned.get(reason, 0) + version.nbytes
        for reason, nbytes in ledger.pinned_blocks().items():
            pinned[reason] = pinned.get(reason, 0) + nbytes
        return by_size(pinned)

    def least_bytes_with(self, versions: Sequence[Version]) -> int:
        """Return the bytes of these versions and of all that can never be evicted. Locks don't count."""
        ledger = self._ledger
        constants = (one for one in ledger.versions.values() if one.resident and one.operation is None)
        all_of_them = (*constants, *versions)
        wanted = {id(one): one.nbytes for one in all_of_them if one.device == ledger.device}
        blocks = sum(ledger.pinned_blocks().values())
        return sum(wanted.values()) + blocks + sum(ledger.overhead.values())

    def too_small(self, nbytes: int, operator: str, *, missing: int | None = None) -> Exception:
        """Return the error for an operator that needs `nbytes` more than are available.

        missing: bytes that the device's allocator lacked for it, whatever room the ledger sees.
        """
        ledger = self._ledger
        self._refusal = refusal = self.refusal_of(nbytes, operator, missing=missing)
        reserved = ledger.reserved_bytes
        under_way = {"results of running operators": reserved} if reserved else {}
        error: Exception = self.BudgetError(
            operator,
            nbytes,
            ledger.budget_bytes,
            refusal.least_bytes,
            by_size(self.pinned_by_reason() | ledger.overhead | under_way),
            frozenset(ledger.overhead),
        )
        return error

    def refusal_of(self, nbytes: int, operator: str, *, missing: int | None = None) -> Refusal:
        """Return what is known of a refused request; see `too_small`."""
        ledger = self._ledger
        assert ledger.budget_bytes is not None
        reserved = ledger.reserved_bytes
        if missing is None:
            least = ledger.resident_bytes + reserved + nbytes + beside_tensors(ledger)
        else:  # what it needs may be reserved already, and the limit is an estimate
            needed = ledger.resident_bytes + max(reserved, nbytes) + sum(ledger.overhead.values())
            least = max(needed, ledger.budget_bytes + missing)
        return Refusal(operator, nbytes, least)


def by_size(sizes: dict[str, int]) -> dict[str, int]:
    """Return these bytes by name, largest first."""
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))
