"""Turns of threads at a session: its lock, and code of the program, which runs without it.

**No code of the program runs under our lock.** It may wait for a lock of the program's own, whose holder may
be waiting for its turn at the session, to run an operator. So wherever dtrrun calls code of the program, its
thread gives up the lock, and looks again at what may have changed once it has it back:

- The kernel of an operator that is not PyTorch's own runs unlocked when the program calls it
  (`KernelRun::run_foreign`), and so it does when it runs again (`Replays::given_up`), unless its replay
  changes what all threads share: it draws random numbers, needs other settings than the present ones, or
  writes to the memory of what it reads.
- Finalizers run in garbage collections that dtrrun starts (`Session._collect_garbage`).
- Functions registered with `os.register_at_fork`, once the first session has begun, run before ours, which
  takes the lock, and after ours, which releases it (`patches/fork.py`).

Python may also call a signal handler, or a finalizer in a collection of its own, at any moment, even in a
turn, and shape functions (`register_fake`) run in one. If these wait for a thread that waits for its turn,
a line says so (`late`).

While a thread has given up its turn in the middle of an operator, the others look before each of theirs. What
it reads is locked in memory, and an operator that writes to that waits (`Turns.wait_for_replays`).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from time import monotonic, sleep
from types import FrameType
from typing import Any

import torch

from dtrrun.core.graph import Version
from dtrrun.core.ledger import Ledger

PATIENCE_SECONDS = 30.0
LOOK_SECONDS = 20e-6
POLL_SECONDS = 0.01
GIVEN_UP = "a replay of a foreign kernel"

LATE = (
    "thread {waiting} has waited {seconds:.0f} s for dtrrun, which thread {owner} is using; {owner} is at "
    "{place}. If that line waits for {waiting}, neither will go on"
)
_PACKAGES = tuple(
    os.path.join(os.path.dirname(os.path.abspath(path)), "")
    for path in (torch.__file__, os.path.dirname(os.path.dirname(__file__)), threading.__file__)
)


def lock_of_session(native: Any, alert: Callable[[str], None]) -> Any:
    """Return a reentrant lock (`turn_lock.h`). If a thread waits long for it, `alert` is told who has it."""
    return native.TurnLock(lambda owner: alert(late(owner)), PATIENCE_SECONDS)


class Turns:
    """Lets threads of the program give up their turns."""

    def __init__(
        self,
        lock: Any,
        ended: threading.Condition,
        ledger: Ledger,
        reasons: Any,
        native: Any,
        alert: Callable[[str], None],
    ) -> None:
        """ended: a condition of the lock, notified when an operator has ended. reasons: why operators
        are handled with care. native: the extension. alert: called with a line for the user."""
        self._lock, self._ended, self._ledger = lock, ended, ledger
        self._reasons, self._native, self._alert = reasons, native, alert
        self.away: list[tuple[int, Sequence[Version]]] = []
        """The threads that have given up their turns in the middle of an operator, and what they read."""

    @contextmanager
    def given_up(self, reads: Sequence[Version] = ()) -> Iterator[None]:
        """Context for code of the program, in the middle of an operator: other threads have their turns.

        reads: versions that the code reads, and that are locked.
        """
        one = (get_ident(), reads)
        alone = self._native.leave_turn()  # without the lock
        self.away.append(one)
        self._reasons.add(GIVEN_UP)
        owned, device = self._lock._is_owned(), self._ledger.device
        try:
            with self._lock.given_up():
                yield
        finally:
            if owned:
                self._ledger.use(device)
            self.away.remove(one)
            if not self.away:
                self._reasons.remove(GIVEN_UP)
            while alone and not self._native.rejoin_turn():
                sleep(LOOK_SECONDS)
            if owned:
                self._ended.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until an operator of another thread ends. Returns False on timeout.

        The caller holds the lock, which is released meanwhile, and then uses the same device again.
        """
        device = self._ledger.device
        try:
            return self._ended.wait(seconds)
        finally:
            self._ledger.use(device)

    def others(self) -> bool:
        """Return whether another thread has given up its turn in the middle of an operator."""
        return any(thread != get_ident() for thread, _ in self.away)

    def wait_for_replays(self, written: Sequence[Version]) -> bool:
        """Wait until no other thread's replay reads what is about to be written.

        The caller holds the lock, which is released meanwhile. Returns whether it has waited: then anything
        may have changed.
        """
        if not self.away or self._reader_of(written) is None:
            return False
        ends = monotonic() + PATIENCE_SECONDS
        while (reader := self._reader_of(written)) is not None:
            self.wait(POLL_SECONDS)
            if monotonic() > ends:
                self._alert(late(reader))
                ends = float("inf")
        return True

    def _reader_of(self, written: Sequence[Version]) -> int | None:
        keys = {id(version) for version in written}
        for thread, reads in self.away:
            if thread != get_ident() and any(id(one) in keys for one in reads):
                return thread
        return None


def wait_while(is_inside: Callable[[], bool]) -> bool:
    """Wait for an operator of another thread to end. Returns False if that takes too long."""
    ends = monotonic() + PATIENCE_SECONDS
    while is_inside():
        if monotonic() > ends:
            return False
        sleep(LOOK_SECONDS)
    return True


def late(owner: int) -> str:
    """Return a line that says for whom this thread waits."""
    names = {one.ident: repr(one.name) for one in threading.enumerate()}
    return LATE.format(
        waiting=names.get(get_ident(), get_ident()),
        owner=names.get(owner, owner),
        seconds=PATIENCE_SECONDS,
        place=_place_of(sys._current_frames().get(owner)),
    )


def _place_of(frame: FrameType | None) -> str:
    """Return the innermost line of the program in a thread."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((*_PACKAGES, "<frozen")):
            return f"{code.co_filename}:{frame.f_lineno} ({code.co_name})"
        frame = frame.f_back
    return "no line of Python"
