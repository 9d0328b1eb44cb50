"""What is seen while the script runs: a table at the bottom of the terminal, or a line now and then."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TextIO

from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.record import Snapshot
from dtrrun.views.picture import line, picture, running
from dtrrun.views.rates import Rates
from dtrrun.views.screen import BottomRows, writer_to
from dtrrun.views.text import for_encoding

REFRESH = 0.25
"""Seconds between two pictures of the table."""
LINE_EVERY = 5.0
"""Seconds between two lines where there is no terminal."""


def live_view(settings: RuntimeSettings, stream: TextIO, mode: str) -> LiveTable | LiveLines | None:
    """What `--live` (auto, always, never) means for `stream`; None is nothing at all."""
    if mode == "never":
        return None
    if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", ""):
        return LiveTable(settings, stream)
    return LiveLines(settings, stream) if mode == "always" else None


class LiveTable:
    """The table. It keeps to the bottom rows of the terminal; what the script writes passes above it.

    `stream` must be a terminal. Call `update` as often as you like, and `close` whatever happens.
    """

    def __init__(self, settings: RuntimeSettings, stream: TextIO, *, width: int | None = None) -> None:
        self._settings, self._stream, self._width = settings, stream, width
        self._rates = Rates()
        self._rows = BottomRows(writer_to(stream.fileno()), self._size)
        self._next = 0.0
        self._most = 0  # rows of the tallest picture so far, lest the table jump up and down

    @property
    def rows(self) -> int:
        """Terminal rows that the table takes now."""
        return self._rows.taken

    def start(self) -> None:
        """Nothing is drawn before there is something to show: a target without torch sees no table."""
        self._stream.flush()

    def update(self, snapshots: Sequence[Snapshot]) -> None:
        """Draw the newest figures, unless that was done a moment ago."""
        now = time.monotonic()
        if not snapshots or now < self._next:
            return
        self._next = now + REFRESH
        self._rates.add(snapshots)
        if not _in_foreground(self._stream.fileno()):
            self._rows.erase()  # `bg`: the terminal is somebody else's now
            return
        columns, height = self._size()
        lines = picture(snapshots, self._settings, self._rates, self._stream, columns, height)
        if self._rows.taken == 0:
            self._most = 0
        self._most = min(max(self._most, len(lines)), height // 2)
        self._rows.show(lines + [""] * (self._most - len(lines)))

    def write(self, data: bytes) -> None:
        """Bytes that the script wrote to its terminal."""
        self._rows.pass_through(data)

    def note(self, line: str) -> None:
        """A line of our own, on a line of its own above the table."""
        start = "" if self._rows.at_line_start else "\r\n"
        self._rows.pass_through(f"{start}{line}\r\n".encode())

    def close(self) -> None:
        """Take the table away, and leave the cursor at the start of a line below the script's output."""
        self._rows.erase()
        if not self._rows.at_line_start:
            self._rows.pass_through(b"\r\n")

    def _size(self) -> tuple[int, int]:
        try:
            columns, height = os.get_terminal_size(self._stream.fileno())
        except OSError:
            columns, height = 0, 0
        return self._width or columns or 80, height or 24


class LiveLines:
    """The same figures as one line every few seconds, for a log file (`--live always` without a terminal)."""

    rows = 0

    def __init__(self, settings: RuntimeSettings, stream: TextIO, *, width: int | None = None) -> None:
        self._settings, self._stream = settings, stream
        self._rates = Rates()
        self._next = 0.0
        self._read = 0.0

    def start(self) -> None:
        self._next = time.monotonic() + LINE_EVERY

    def update(self, snapshots: Sequence[Snapshot]) -> None:
        """Remember the figures, and every few seconds write a line of them for each process."""
        now = time.monotonic()
        if not snapshots or now < self._read:
            return
        self._read = now + REFRESH
        self._rates.add(snapshots)
        if now < self._next:
            return
        self._next = now + LINE_EVERY
        for snapshot in running(snapshots):
            self._stream.write(for_encoding(line(snapshot, self._rates), self._stream.encoding) + "\n")
        self._stream.flush()

    def write(self, data: bytes) -> None:
        self._stream.flush()
        self._stream.buffer.write(data)
        self._stream.buffer.flush()

    def note(self, line: str) -> None:
        self._stream.write(for_encoding(line, self._stream.encoding) + "\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


def _in_foreground(descriptor: int) -> bool:
    """Whether the terminal is ours to draw on: not while the shell has us in the background."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not our controlling terminal: nobody takes it from us
        return True
