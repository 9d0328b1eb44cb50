"""Errors injected at a chosen operator of the program or of a rematerialization, and checks afterwards."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from dtrrun.runtime import storage as memory
from tests.kernels import use_replays


class Attempt:
    """Context in the program: errors are injected only inside it, and it swallows them.

    The class attribute `failures` counts them.
    """

    under_way = False
    failures = 0

    def __enter__(self) -> None:
        Attempt.under_way = True

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        Attempt.under_way = False
        ours = error is not None and str(error) == INJECTED
        Attempt.failures += ours
        return ours


INJECTED = "injected by the test"


class Injector(TorchDispatchMode):
    """Raises at one operator of the program, before that operator reaches the session.

    `at` counts the operators of the attempts from 0. With `after`, raises once the operator has returned.
    It does not see replays: they run below all modes.
    """

    def __init__(self, at: int, error: type[BaseException], *, after: bool = False) -> None:
        super().__init__()
        self.at, self.error, self.after = at, error, after
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = Attempt.under_way and self.seen == self.at
        self.seen += Attempt.under_way
        if mine and not self.after:
            raise self.error(INJECTED)
        result = func(*args, **(kwargs or {}))
        if mine:
            raise self.error(INJECTED)
        return result


@contextmanager
def failing_replays(at: int, error: type[BaseException], *, after: bool = False) -> Iterator[list[str]]:
    """Raise once, in the `at`-th operator replayed in an attempt; yield the names of those that ran."""
    ran: list[str] = []
    count = itertools.count()

    def replay(name: str, compute: Callable[[], Any]) -> None:
        if not Attempt.under_way:
            compute()
            return
        ran.append(name)
        if next(count) != at:
            compute()
            return
        if after:
            compute()
        raise error(INJECTED)

    with pytest.MonkeyPatch.context() as patch:
        use_replays(patch, replay)
        yield ran


def run_together(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def check_accounts(session: Any) -> None:
    """Check that nothing is locked, and that the ledger's byte counts match the existing storages."""
    ledger = session.ledger
    ledger.collect_dead()
    assert session.dtr.eviction.replaying == 0
    locked = [record.operation or record.pin for record in ledger.versions.values() if record.locks]
    assert not locked, f"{len(locked)} storages are still locked"
    assert not any(record.locks for record in ledger.scratch), "recomputed storages are still locked"
    resident = evicted = 0
    for record in ledger.versions.values():
        storage = record()
        assert storage is not None
        if record.resident:
            assert not memory.is_empty(storage) or not record.nbytes, "counted as resident, but empty"
            resident += (storage.nbytes() + 63) // 64 * 64
        else:
            assert memory.is_empty(storage), "counted as evicted, but in memory"
            evicted += record.nbytes
    held = sum(record.nbytes for record in ledger.scratch)
    assert ledger.scratch_bytes == held
    assert ledger.resident_bytes == resident + held + sum(ledger.pinned_blocks().values())
    assert ledger.evicted_bytes == evicted
