"""The display while the script runs: a table at the bottom of the terminal, or periodic lines."""

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
"""Seconds between updates of the table."""
LINE_EVERY = 5.0
"""Seconds between lines if there is no terminal."""


def live_view(settings: RuntimeSettings, stream: TextIO, mode: str) -> LiveTable | LiveLines | None:
    """Return the view for `--live` (auto, always, never) on `stream`; None for no view."""
    if mode == "never":
        return None
    if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", ""):
        return LiveTable(settings, stream)
    return LiveLines(stream) if mode == "always" else None


class LiveTable:
    """The table. It occupies the bottom rows of the terminal; the script's output passes above it.

    `stream` must be a terminal. `update` may be called at any rate; always call `close`.
    """

    def __init__(self, settings: RuntimeSettings, stream: TextIO) -> None:
        self._settings, self._stream = settings, stream
        self._rates = Rates()
        self._rows = BottomRows(writer_to(stream.fileno()), self._size)
        self._next = 0.0
        self._most = 0  # rows of the tallest picture so far, so that the table's height is stable

    @property
    def rows(self) -> int:
        """Number of terminal rows that the table occupies."""
        return self._rows.taken

    def start(self) -> None:
        """Draw nothing until there are figures: a target without torch gets no table."""
        self._stream.flush()

    def update(self, snapshots: Sequence[Snapshot]) -> None:
        """Draw the newest figures, at most once per `REFRESH`."""
        now = time.monotonic()
        if not snapshots or now < self._next:
            return
        self._next = now + REFRESH
        self._rates.add(snapshots)
        if not _in_foreground(self._stream.fileno()):
            self._rows.erase()  # after `bg`: another program has the terminal
            return
        columns, height = self._size()
        lines = picture(snapshots, self._settings, self._rates, self._stream, columns, height)
        if self._rows.taken == 0:
            self._most = 0
        self._most = min(max(self._most, len(lines)), height // 2)
        self._rows.show(lines + [""] * (self._most - len(lines)))

    def write(self, data: bytes) -> None:
        """Write the script's output."""
        self._rows.pass_through(data)

    def note(self, line: str) -> None:
        """Write a line of our own above the table."""
        start = "" if self._rows.at_line_start else "\r\n"
        self._rows.pass_through(f"{start}{line}\r\n".encode())

    def close(self) -> None:
        """Remove the table, and leave the cursor at the start of a line below the script's output."""
        self._rows.erase()
        if not self._rows.at_line_start:
            self._rows.pass_through(b"\r\n")

    def _size(self) -> tuple[int, int]:
        try:
            columns, height = os.get_terminal_size(self._stream.fileno())
        except OSError:
            columns, height = 0, 0
        return columns or 80, height or 24


class LiveLines:
    """The same figures as a line every few seconds, for a log file (`--live always` without a terminal)."""

    rows = 0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rates = Rates()
        self._next = 0.0
        self._read = 0.0

    def start(self) -> None:
        self._next = time.monotonic() + LINE_EVERY

    def update(self, snapshots: Sequence[Snapshot]) -> None:
        """Store the figures, and every few seconds write a line for each process."""
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
    """Return whether we may draw on the terminal: not while in the background."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not our controlling terminal, so always in the foreground
        return True
