"""Fixed rows at the bottom of a terminal, while a program writes above them.

The rows lie outside the terminal's scroll region (DECSTBM), so the program's bytes pass through unchanged:
the terminal handles carriage returns, cursor movements, colours and echoed input as it would without us. We
do not know the cursor's position, only save and restore it. Lines that scroll out of a region that starts at
the top go to the terminal's scrollback. Needs a VT100-compatible terminal: any but TERM=dumb.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Callable, Sequence

SAVE, RESTORE, WHOLE_REGION, PLAIN = "\x1b7", "\x1b8", "\x1b[r", "\x1b[0m"
DOWN = "\x1bD"  # like a newline, but keeps the column

# An unfinished escape sequence or UTF-8 character at the end of output.
_UNFINISHED = re.compile(
    rb"(?:\x1b(?:\[[0-?]*[ -/]*|[\]P^_X][^\x07\x1b]*\x1b?|[ -/]*)"
    rb"|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z"
)
_ALTERNATE = re.compile(rb"\x1b\[\?(?:1049|1047|47)([hl])")
_LOOKBACK = 4096
_PATIENCE = 1.0  # seconds that a sequence may stay unfinished before we draw anyway


class BottomRows:
    """`write` takes bytes for the terminal, `size` returns (columns, rows); both may be called at any
    time."""

    def __init__(self, write: Callable[[bytes], None], size: Callable[[], tuple[int, int]]) -> None:
        self._write, self._size = write, size
        self._lines: list[str] = []  # currently shown
        self._drawn_at = (0, 0)  # the terminal's size when drawn
        self._tail = b""  # unfinished sequence
        self._tail_since = 0.0
        self._alternate = False
        self._last = b"\n"

    @property
    def taken(self) -> int:
        """Number of rows taken from the program."""
        return len(self._lines)

    @property
    def at_line_start(self) -> bool:
        return self._last == b"\n"

    def show(self, lines: Sequence[str]) -> None:
        """Show `lines` (ANSI text, each fitting the width) in the bottom rows, taking or releasing rows."""
        if self._alternate or (self._tail and time.monotonic() - self._tail_since < _PATIENCE):
            return
        out = "" if self._drawn_at == self._size() else self._after_resize()
        self._drawn_at = self._size()
        height = self._drawn_at[1]
        lines = list(lines)[: height - 1]
        if (more := len(lines) - self.taken) > 0:  # make room below the program's cursor
            out += DOWN * more + f"\x1b[{more}A"
        out += f"{SAVE}{PLAIN}\x1b[1;{height - len(lines)}r"
        for row in range(height - self.taken + 1, height - len(lines) + 1):
            out += f"\x1b[{row};1H\x1b[2K"
        for row, line in enumerate(lines, start=height - len(lines) + 1):
            out += f"\x1b[{row};1H\x1b[2K{line}"
        self._lines = lines
        self._write(f"{out}{RESTORE}".encode())

    def erase(self) -> None:
        """Give all rows back to the program."""
        if not self._lines:
            return
        if self._drawn_at != self._size():
            self._write(self._after_resize().encode())
            return
        rows = range(self._drawn_at[1] - self.taken + 1, self._drawn_at[1] + 1)
        wipe = "".join(f"\x1b[{row};1H\x1b[2K" for row in rows)
        self._lines = []
        self._write(f"{SAVE}{PLAIN}{WHOLE_REGION}{wipe}{RESTORE}".encode())

    def pass_through(self, data: bytes) -> None:
        """Write the program's output."""
        if self._lines and self._drawn_at != self._size():  # before the program overwrites our rows
            self.erase()
        recent = self._tail + data
        switches = _ALTERNATE.findall(recent)
        if switches:  # a full-screen program gets the whole screen
            if b"h" in switches:
                self.erase()
            self._alternate = switches[-1] == b"h"
        unfinished = _UNFINISHED.search(recent[-_LOOKBACK:])
        if unfinished and not self._tail:
            self._tail_since = time.monotonic()
        self._tail = unfinished[0] if unfinished else b""
        self._last = data[-1:] or self._last
        self._write(data)

    def _after_resize(self) -> str:
        """Erase our old rows: wherever the terminal moved them, they are below the program's cursor."""
        wipe = f"{SAVE}{PLAIN}{WHOLE_REGION}{RESTORE}\x1b[J" if self._lines else ""
        self._lines = []
        return wipe


def writer_to(descriptor: int) -> Callable[[bytes], None]:
    """Return a function that writes all bytes, even to a non-blocking terminal; drops them if it is gone."""

    def write(data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(descriptor, view) :]
            except BlockingIOError:
                select.select([], [descriptor], [], 0.1)
            except OSError:
                return

    return write
