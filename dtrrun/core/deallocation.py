"""Storages that the program releases (paper, Sec. 2, and App. C.4 and C.5).

`Ledger.collect_dead` accounts for deallocations at once. This module decides about memory that the program
has released, or is about to release, and that rematerializations may still need.
"""

from __future__ import annotations

from typing import Any

from dtrrun.core.graph import Operation, Version, read_by_others
from dtrrun.core.ledger import Ledger

KEPT = 4  # times the cost per byte
FARTHEST = 16  # number of released versions through which inputs are looked for
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
        What it reads may have been released already (`r - a * h`): then what that was computed from counts.
        """
        assert version.operation is not None
        version.operation.kept_inputs = tuple(self._dear_inputs(version))
        key_of = self._ledger.key_of
        seen: set[int] = set()
        pending = [version]
        for node in pending:  # grows during the loop
            for reference in node.needed_by or ():
                reader = reference()
                if reader is None or reader.operation is None or id(reader) in seen:
                    continue
                seen.add(id(reader))
                if others := reader.operation.kept_inputs:
                    reader.operation.kept_inputs = tuple(one for one in others if key_of(one) != version.key)
                if not reader.alive and len(pending) < FARTHEST:
                    pending.append(reader)

    def _dear_inputs(self, version: Version) -> list[Any]:
        """Return the storages of those that `keep_inputs` keeps."""
        projected_cost = self._ledger.policy.projected_cost
        kept: list[Any] = []
        seen: set[int] = set()
        pending = [(version, version.cost)]  # with the cost from there to `version`
        for node, cost in pending:  # grows during the loop
            for source in node.inputs:
                if source.operation is None or id(source) in seen:
                    continue
                seen.add(id(source))
                if source.resident and source.scratch is None:
                    dear = projected_cost(source) * version.nbytes > KEPT * cost * source.nbytes
                    if dear and (content := source()) is not None:
                        kept.append(content)
                elif not source.alive and len(pending) < FARTHEST:
                    pending.append((source, cost + source.cost))
        return kept

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
            if not version.locks and not read_by_others(version, 1 + (version.pool_id is not None)):
                ledger.policy.discard(version)
                ledger.drop_scratch(version)
