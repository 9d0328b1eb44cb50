"""Storages that the program releases (paper, Sec. 2, and App. C.4 and C.5).

`Ledger.collect_dead` accounts for deallocations at once. This module decides about memory that the program
has released, or is about to release, and that rematerializations may still need.
"""

from __future__ import annotations

from typing import Any

from dtrrun.core.graph import Operation, Version, read_by_others
from dtrrun.core.ledger import Ledger

KEPT = 4  # times the cost per byte
SCRATCH_SHIFT = 3  # an eighth of the budget


class Deallocation:
    """Keeps released storages while that saves more than it costs."""

    __slots__ = ("__dict__", "swept")  # what the native extension writes

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.swept = 0  # evictions at the last `sweep`, plus the sweeps since
        self._came_back: list[tuple[Operation, tuple[Any, ...]]] = []  # replayed, and what was kept for it

    # -- inputs of what is evicted ---------------------------------------------------------------

    def keep_inputs(self, version: Version) -> None:
        """Keep the inputs of a version about to be evicted that cost much more to recompute than it does.

        The program may release them before it needs the version: a DenseNet's feature maps, from which cheap
        concatenations are made; a gradient from which the next one was computed. They stay evictable.
        """
        operation = version.operation
        assert operation is not None
        projected_cost, key_of = self._ledger.policy.projected_cost, self._ledger.key_of
        kept = [
            content
            for source in operation.inputs
            if source.operation is not None
            and source.resident
            and source.scratch is None
            and projected_cost(source) * version.nbytes > KEPT * version.cost * source.nbytes
            and (content := source()) is not None
        ]
        operation.kept_inputs = tuple(kept)
        for reference in version.needed_by or ():
            node = reference()
            if node is not None and node.operation is not None and node.operation.kept_inputs:
                others = node.operation.kept_inputs
                node.operation.kept_inputs = tuple(one for one in others if key_of(one) != version.key)

    def came_back(self, operation: Operation) -> None:
        """The output of `operation` is in memory again, so its inputs need not be kept any longer."""
        if operation.kept_inputs:
            self._came_back.append((operation, operation.kept_inputs))

    def release_kept_inputs(self) -> None:
        """Release kept inputs. No rematerialization that may read them is in progress.

        An output that was evicted again meanwhile has a new set of kept inputs.
        """
        if not self._came_back:
            return
        for operation, kept in self._came_back:
            if operation.kept_inputs is kept:
                operation.kept_inputs = ()
        self._came_back.clear()
        del operation, kept
        self._ledger.collect_dead()

    # -- scratch: recomputed storages that the program does not have --------------------------------

    def was_read(self, version: Version, *, others: bool) -> None:
        """An operation has read a scratch version, which is not locked now.

        others: whether other recipes may read it. If not, it was recomputed for that operation alone and is
        freed at once (App. C.4).
        """
        ledger = self._ledger
        if others:  # keep it while there is memory
            if ledger.pressure:
                ledger.policy.insert(version)
        else:
            ledger.drop_scratch(version)
            ledger.policy.released(version)

    def trim(self) -> None:
        """Keep scratch versions up to a fraction of the budget, the latest first.

        The paper keeps all of them (App. C.4). On an LSTM at 40 % of its peak they then displaced what the
        program was about to use, and the step did not end. Keeping none recomputes more.
        """
        ledger = self._ledger
        allowed = 0 if ledger.budget_bytes is None else ledger.limit >> SCRATCH_SHIFT
        if ledger.scratch_bytes <= allowed:
            return
        idle = [version for version in ledger.scratch.values() if not version.locks]
        excess = sum(version.nbytes for version in idle) - allowed
        for version in idle:
            if excess <= 0:
                break
            excess -= version.nbytes
            ledger.drop_scratch(version)
            ledger.policy.released(version)

    def sweep(self, evictions: int) -> bool:
        """Call `sweep_all` if there have been enough evictions since the last call; return whether it ran.

        evictions: the number so far.
        """
        scratch = self._ledger.scratch
        if not scratch or evictions - self.swept < len(scratch) >> 4:
            return False
        self.sweep_all(evictions + 1)
        return True

    def sweep_all(self, evictions: int) -> None:
        """Free the scratch versions that no recipe reads any more."""
        ledger = self._ledger
        self.swept = evictions
        for place in reversed(list(ledger.scratch)):
            version = ledger.scratch[place]
            if not version.locks and not read_by_others(version, 1 + (version.bound is not None)):
                ledger.policy.discard(version)
                ledger.drop_scratch(version)
