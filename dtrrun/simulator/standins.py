"""Stand-ins that the live runtime's core uses in a simulation: storages with a size and no content."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from dtrrun.bindings import load

from .replay import Stopped


def new_content(nbytes: int, device: int = 0) -> Any:
    """Return a stand-in for a storage. Like a storage, it dies when nothing refers to it any more.

    device: in whose account it is (`Ledger.use`).
    """
    return load().Content(nbytes, device=device)


class StandInMemory:
    """What the core asks Python about storages, answered for stand-ins (compare `runtime.storage`)."""

    @staticmethod
    def size_of(content: Any) -> int:
        nbytes: int = content.nbytes
        return nbytes

    @staticmethod
    def device_type_of(_content: Any) -> str:
        return "ours"

    @staticmethod
    def is_ours(_content: Any) -> bool:
        return True

    @staticmethod
    def span_of(_content: Any) -> tuple[int, int]:
        return 0, 0  # no address, so it overlaps nothing

    @staticmethod
    def mapping_of(_span: tuple[int, int]) -> str:
        return ""

    @staticmethod
    def is_from_worker(_span: tuple[int, int]) -> bool:
        return False

    @staticmethod
    def is_held(_content: Any) -> bool:
        return True

    @staticmethod
    def checksum(_content: Any) -> int:
        return 0


class OutOfBudget(Exception):
    """The budget can't hold an operator. Constructed like the runtime's `BudgetError`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.least_budget_bytes: int = given[3]


class StandInExecutor:
    """Runs nothing: C++ adds up the costs (`bindings/standins.h`), and calls `stop` above its limit."""

    @staticmethod
    def below() -> AbstractContextManager[None]:
        return nullcontext()

    @staticmethod
    def quietly(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    @staticmethod
    def stop() -> NoReturn:
        raise Stopped("thrash")
