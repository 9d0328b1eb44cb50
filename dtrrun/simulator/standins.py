"""Stand-ins for the core of the live runtime in a simulation: storages with a size and no content."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from dtrrun.core.graph import Operation, Overwritten

from .replay import Stopped


class Content:
    """Stands in for a storage. Like a storage, it dies when nothing refers to it any more."""

    __slots__ = ("__weakref__", "device", "nbytes", "ours")

    def __init__(self, nbytes: int, device: str = "ours", ours: bool = True) -> None:
        self.nbytes = nbytes
        self.device = device
        self.ours = ours


class StandInMemory:
    """The operations on storages, applied to stand-ins (compare `runtime.storage`)."""

    @staticmethod
    def size_of(content: Content) -> int:
        return content.nbytes

    @staticmethod
    def holds(content: Content, nbytes: int) -> bool:
        return True  # results of a replay have no size

    @staticmethod
    def device_type_of(content: Content) -> str:
        return content.device

    @staticmethod
    def is_ours(content: Content) -> bool:
        return content.ours

    @staticmethod
    def span_of(content: Content) -> tuple[int, int]:
        return 0, 0  # no address, so it overlaps nothing

    @staticmethod
    def empty(content: Content) -> None:
        pass

    @staticmethod
    def is_empty(content: Content) -> bool:
        return False  # asked after an interrupt alone, of which there are none here

    @staticmethod
    def refill(content: Content, source: Content) -> None:
        pass

    @staticmethod
    def storage_of(content: Content) -> Content:
        return content

    @staticmethod
    def mapping_of(span: tuple[int, int]) -> str:
        return ""

    @staticmethod
    def is_held(content: Content) -> bool:
        return True

    @staticmethod
    def checksum(content: Content) -> int:
        return 0


class OutOfBudget(Exception):
    """The budget can't hold an operator. Made like the runtime's `BudgetError`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.least_budget_bytes: int = given[3]


class _Results:
    """An operator's result: a new object at every index."""

    def __getitem__(self, where: int) -> Content:
        return Content(0)


class StandInExecutor:
    """Runs nothing, but adds up the costs. Stops as `thrash` above `limit` ns."""

    def __init__(self, limit: float) -> None:
        self.recomputed = 0
        self.limit = limit

    @staticmethod
    def below() -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def quietly(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    @staticmethod
    def copy(content: Content) -> Content:
        return Content(content.nbytes)

    @staticmethod
    def hold(_operation: Operation) -> tuple[()]:
        return ()

    def execute(
        self, operation: Operation, mutated: set[int], taken: dict[int, Content]
    ) -> tuple[Any, list[Any], int]:
        self.recomputed += operation.signature.cost
        if self.recomputed > self.limit:
            raise Stopped("thrash")
        targets: list[Content | None] = []
        written: dict[int, Content] = {}
        for entry in operation.tensors:
            target = None
            if type(entry) is Overwritten:
                target = Content(entry.nbytes)
            elif id(entry) in mutated:
                target = written.get(id(entry))
                if target is None:
                    given = taken.get(id(entry))
                    target = written[id(entry)] = Content(entry.nbytes) if given is None else given
            targets.append(target)
        return _Results(), targets, operation.signature.cost
