"""The ledger of the live runtime over stand-ins: storages that have a size and nothing in them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dtrrun.ledger.ledger import Ledger
from dtrrun.ledger.record import Blank, Op, Record
from dtrrun.ledger.replay import Replay

from .replay import Stopped


class Content:
    """In a storage's place. It dies, as a storage does, when nobody refers to it any more."""

    __slots__ = ("__weakref__", "device", "nbytes", "ours")

    def __init__(self, nbytes: int, device: str = "ours", ours: bool = True) -> None:
        self.nbytes = nbytes
        self.device = device
        self.ours = ours


class Memory:
    """What the runtime does to storages, done to stand-ins (compare `runtime.storage`)."""

    def __init__(self, *, refill_copies: bool = False) -> None:
        self.REFILL_COPIES = refill_copies

    @staticmethod
    def size_of(content: Content) -> int:
        return content.nbytes

    @staticmethod
    def holds(content: Content, nbytes: int) -> bool:
        return True  # results of a replay are of no size

    @staticmethod
    def device_type_of(content: Content) -> str:
        return content.device

    @staticmethod
    def is_ours(content: Content) -> bool:
        return content.ours

    @staticmethod
    def span_of(content: Content) -> tuple[int, int]:
        return 0, 0  # no address: it lies over nothing else

    @staticmethod
    def empty(content: Content) -> None:
        pass

    @staticmethod
    def refill(content: Content, source: Content) -> None:
        pass

    @staticmethod
    def storage_of(content: Content) -> Content:
        return content


class OutOfBudget(Exception):
    """The budget can't hold an operator."""


class StandInLedger(Ledger):
    BudgetError = OutOfBudget
    out_of_memory = OutOfBudget

    def __init__(self, budget_bytes: int | None, policy: Any, *, memory: Any, warn_only: bool) -> None:
        self.memory = memory
        super().__init__(budget_bytes, policy, device_type="ours", warn_only=warn_only)

    def _collect_garbage(self) -> bool:
        return False


class _Results:
    """What an operator returns: something new in every place."""

    def __getitem__(self, where: int) -> Content:
        return Content(0)


class StandInReplay(Replay):
    """Runs nothing, and counts what it would have cost. Stops as `thrash` beyond `limit` ns of that."""

    def __init__(self, ledger: Ledger, limit: float) -> None:
        super().__init__(ledger)
        self.recomputed = 0
        self.limit = limit

    def below(self) -> AbstractContextManager[None]:
        return nullcontext()

    def execute(self, op: Op, mutated: set[int], stolen: list[Record]) -> tuple[Any, list[Any], int]:
        self.recomputed += op.signature.cost
        if self.recomputed > self.limit:
            raise Stopped("thrash")
        targets: list[Content | None] = []
        written: dict[int, Content] = {}
        for entry in op.tensors:
            target = None
            if type(entry) is Blank:
                target = Content(entry.nbytes)
            elif id(entry) in mutated:
                target = written.get(id(entry))
                if target is None:
                    take = any(record is entry for record in stolen)
                    target = written[id(entry)] = self._take(entry) if take else Content(entry.nbytes)
            targets.append(target)
        return _Results(), targets, op.signature.cost
