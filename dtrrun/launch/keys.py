"""Keys that the user presses in our own terminal, one at a time and without Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dtrrun.launch.signals import in_foreground


class Keys:
    """Reads single keys. descriptor: of a terminal; None: nobody presses any."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __bool__(self) -> bool:
        return self._descriptor is not None

    def pressed(self, seconds: float) -> str:
        """Return the key that is pressed within so many seconds; "" if there is none, or no plain one."""
        if self._descriptor is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return ""
        found = os.read(self._descriptor, 64)
        if not found:  # the terminal has gone
            self._descriptor = None
        return found.decode() if len(found) == 1 and found.isascii() else ""


@contextmanager
def keys() -> Iterator[Keys]:
    """Context in which standard input, if it is our terminal, gives each key at once and shows none."""
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (AttributeError, OSError, ValueError, termios.error):  # no terminal
        yield Keys(None)
        return
    if not in_foreground():
        yield Keys(None)
        return
    try:
        tty.setcbreak(descriptor, termios.TCSANOW)
        yield Keys(descriptor)
    finally:
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, before)
