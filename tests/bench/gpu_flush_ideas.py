"""Ways to avoid allocator flushes, compared by `gpu_flush_counts --idea`; none is in the runtime.

They see the allocator's free blocks at every moment, which on a GPU takes a snapshot: their gain here is an
upper bound.
"""

from collections.abc import Callable
from typing import Any

import torch

from dtrrun.core.ledger import UNLIMITED
from dtrrun.runtime.cuda import budget as constants
from dtrrun.runtime.cuda.budget import LEAST_SLACK, MIB, SLACK_SHARE, Accounts
from dtrrun.runtime.cuda.fragmentation import Block, best_hole
from dtrrun.runtime.cuda.session import Cuda

address_of = torch._C.StorageBase.data_ptr  # type: ignore[attr-defined]

Idea = Callable[[Any, Any, Any], None]


def would_flush(allocator: Any, nbytes: int) -> bool:
    """Return whether a request of that size would unmap all free memory."""
    if allocator.cap is None or nbytes <= allocator.unit:  # small blocks have their own pool
        return False
    fits = any(block.free and block.nbytes >= nbytes for blocks in large(allocator) for block in blocks)
    return not fits and bool(allocator.reserved + allocator.counted(nbytes) > allocator.cap)


def large(allocator: Any) -> list[list[Block]]:
    found: list[list[Block]] = allocator.blocks(UNLIMITED)
    return found


def projected(policy: Any, record: Any) -> float:
    return float(policy.projected_cost(record))


def neighbours(ms: float) -> Idea:
    """Before a flush, evict neighbors that make room for the request, if that costs at most `ms`."""

    def use(session: Any, allocator: Any, patch: Any) -> None:
        ledger, eviction, policy = session.ledger, session.dtr.eviction, session.dtr.policy
        operators, executor = session.dtr.operators, session.dtr.executor
        admit, execute = operators.admit, executor.execute

        def evict_neighbours(nbytes: int) -> None:
            records = {}
            for record in policy:
                if record.resident and not record.locks and (storage := record.memory()) is not None:
                    records[address_of(storage)] = record

            def price(address: int) -> float | None:
                record = records.get(address)
                return None if record is None else projected(policy, record)

            window = best_hole(large(allocator), nbytes, price)
            if window and sum(projected(policy, records[address]) for address in window) <= ms * 1e6:
                for address in window:
                    eviction.evict_if_possible(records[address])

        def room_is_made(signature: Any) -> None:
            if ledger.pressure and would_flush(allocator, signature.output_bytes):
                evict_neighbours(signature.output_bytes)

        def admitted(call: Any) -> None:
            admit(call)
            room_is_made(call.signature)

        def run_again(operation: Any, taken: Any) -> Any:
            room_is_made(operation.signature)
            return execute(operation, taken)

        operators.admit, executor.execute = admitted, run_again

    return use


def at_step_end(session: Any, allocator: Any, patch: Any) -> None:
    """Flush at the end of each step, when the activations are gone."""
    step_ended = Cuda.step_ended

    def flushed(self: Any) -> None:
        step_ended(self)
        allocator._flush()

    patch.setattr(Cuda, "step_ended", flushed)


def slack(share: float) -> Idea:
    """Leave that share of the cap free."""

    def use(session: Any, allocator: Any, patch: Any) -> None:
        def more(self: Any) -> int:
            cap = self.cap or 0
            return int(min(max(self._slack, LEAST_SLACK, share * cap), cap // SLACK_SHARE))

        patch.setattr(Accounts, "slack", property(more))

    return use


def pages(mib: int) -> Idea:
    """Use pages of another size, and keep a matching amount free."""

    def use(session: Any, allocator: Any, patch: Any) -> None:
        allocator.page = mib
        patch.setattr(constants, "SEGMENT", mib * MIB)
        patch.setattr(constants, "LEAST_SLACK", (mib + 2) * MIB)

    return use


def both(*ideas: Idea) -> Idea:
    def use(session: Any, allocator: Any, patch: Any) -> None:
        for idea in ideas:
            idea(session, allocator, patch)

    return use


IDEAS: dict[str, Idea | None] = {
    "none": None,
    "holes-1ms": neighbours(1),
    "holes-4ms": neighbours(4),
    "holes": neighbours(float("inf")),
    "step-end": at_step_end,
    "slack-6%": slack(0.06),
    "slack-12%": slack(0.12),
    "slack-holes": both(slack(0.06), neighbours(1)),
    "pages-50": pages(50),
    "pages-100": pages(100),
}
