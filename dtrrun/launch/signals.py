"""Signals between the terminal, us, and the target, which is in our process group.

The terminal sends its signals (Ctrl-C, Ctrl-\\) to the target as well: we only have to survive them. Signals
sent only to us are passed on. The two cannot be distinguished for SIGINT and SIGQUIT, except that a terminal
sends them only to its foreground group: there, they are assumed to come from the terminal.

A target waiting in native code does not react to Ctrl-C: Python notifies only the main thread, which waits
for a backward pass on a GPU, and that can take long if the budget is too small. Repeated Ctrl-C ends the
target.
"""

from __future__ import annotations

import os
import resource
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from types import FrameType
from typing import Any

FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INSISTING = 3  # number of Ctrl-C
INSISTING_SECONDS = 3.0


@contextmanager
def passed_on(send: Callable[[int], None], is_there: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Context that passes signals sent only to us to `send`, and SIGTERM after repeated Ctrl-C.

    is_there: whether the target has been started. Before that, the terminal's signals are passed as well.
    """
    pressed: deque[float] = deque(maxlen=INSISTING)

    def receive(number: int, frame: FrameType | None) -> None:
        if number not in FROM_TERMINAL or not is_there() or not in_foreground():
            send(number)
        elif number == signal.SIGINT:
            pressed.append(monotonic())
            if len(pressed) == INSISTING and pressed[-1] - pressed[0] < INSISTING_SECONDS:
                send(signal.SIGTERM)

    with _received(FROM_TERMINAL + FORWARDED, receive):
        yield


@contextmanager
def interrupting() -> Iterator[list[int]]:
    """Context in which Ctrl-C and termination requests raise KeyboardInterrupt; `number_of` reads the signal.

    Yields the signals received. Python drops an exception that a handler raises during a finalizer, so long
    work should check this list from time to time.
    """
    came: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt(number)

    with _received(ENDING, receive):
        yield came


def number_of(interrupt: KeyboardInterrupt) -> int:
    """Return the number of the signal that raised it."""
    number = interrupt.args[0] if interrupt.args else None
    return number if isinstance(number, int) else signal.SIGINT


@contextmanager
def held_back() -> Iterator[list[int]]:
    """Context in which Ctrl-C and termination requests are only noted; the last is raised again at its end.

    For work that an exception must not interrupt between two instructions. Yields the signals received, so
    that the work can end early.
    """
    came: list[int] = []
    try:
        with _received(ENDING, lambda number, frame: came.append(number)):
            yield came
    finally:
        if came:
            signal.raise_signal(came[-1])


@contextmanager
def _received(numbers: Iterable[int], receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    # exec resets Python's handlers in the child; an ignored signal (nohup) stays ignored in both.
    previous = {
        number: handler for number in numbers if (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }
    try:
        for number in previous:
            signal.signal(number, receive)
        yield
    finally:
        _put_back(dict(previous))


def _put_back(handlers: dict[int, Any]) -> None:
    """Restore all handlers, even if one that is still installed raises meanwhile."""
    try:
        while handlers:
            number, handler = next(iter(handlers.items()))
            signal.signal(number, handler)
            del handlers[number]
    except KeyboardInterrupt:
        _put_back(handlers)
        raise


def in_foreground() -> bool:
    """Return whether our terminal, if any, sends Ctrl-C to our process group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def die_of(number: int) -> None:
    """End this process by the signal that ended the target, for the shell to see. No second core file."""
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    with suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
