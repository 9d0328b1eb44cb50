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
`TurnLock` says so.

While a thread has given up its turn in the middle of an operator, the others look before each of theirs. What
it reads is locked in memory, and an operator that writes to that waits (`Turns.wait_for_replays`).
"""

from __future__ import annotations

import _thread
import os
import re
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


_RLock: Any = _thread.RLock


class TurnLock(_RLock):  # type: ignore[misc]
    """A reentrant lock. A thread that has waited for long says who has it.

    A thread that gives it up for a while uses the same device afterwards (`Ledger.use`): another may have had
    its turn.
    """

    ledger: Any  # the session's, once it has one

    def __init__(self, alert: Callable[[str], None]) -> None:
        """alert: called with a line for the user."""
        self.alert = alert

    def __enter__(self) -> bool:
        return self.acquire(False) or self.wait()

    def wait(self) -> bool:
        """Acquire the lock, which another thread has."""
        if not self.acquire(timeout=PATIENCE_SECONDS):
            self.alert(late(self._owner()))
            self.acquire()
        return True

    def _owner(self) -> int:
        """Return the thread that has the lock; 0 if there is none."""
        found = re.search(r" owner=(\d+)", repr(self))
        return int(found[1]) if found else 0

    def give_up(self) -> tuple[int, int]:
        """Release the lock as often as this thread has acquired it.

        Returns how often that is, and the device in use.
        """
        if not self._is_owned():
            return 0, 0
        device = self.ledger.device
        return super()._release_save()[0], device

    _release_save = give_up  # called by conditions, before they wait

    def take_back(self, given_up: tuple[int, int]) -> None:
        """Acquire the lock as often as it was given up, and use the same device again."""
        count, device = given_up
        for _ in range(count):
            self.__enter__()
        if count:
            self.ledger.use(device)

    _acquire_restore = take_back  # once they have waited


class Turns:
    """Lets threads of the program give up their turns."""

    def __init__(self, lock: TurnLock, ended: threading.Condition, reasons: Any, native: Any) -> None:
        """ended: a condition of the lock, notified when an operator has ended. reasons: why operators
        are handled with care. native: the extension."""
        self._lock, self._ended, self._reasons, self._native = lock, ended, reasons, native
        self._alert = lock.alert
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
        given_up = self._lock.give_up()
        try:
            yield
        finally:
            self._lock.take_back(given_up)
            self.away.remove(one)
            if not self.away:
                self._reasons.remove(GIVEN_UP)
            while alone and not self._native.rejoin_turn():
                sleep(LOOK_SECONDS)
            if given_up[0]:
                self._ended.notify_all()

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
            self._ended.wait(POLL_SECONDS)
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
