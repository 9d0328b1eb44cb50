"""A pseudo-terminal for the script's output, so that it appears above the live table.

Only output goes through it. Standard input remains the real terminal, in its present mode, and the child
stays in our session and process group: Ctrl-C, Ctrl-Z, `input`, `getpass` and `pdb` work as without dtrrun.
The pseudo-terminal controls no session; it only gives the script a terminal of the right size.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Callable

STDOUT, STDERR = 1, 2
READ_BYTES = 65536  # maximum; the kernel returns 4 KiB at a time
READS = 16  # per `pump`: a script that floods its terminal must not starve the table
LAST_READS = 256  # more than a pseudo-terminal buffers; bounded, since others may go on writing


class Terminal:
    """Our end of the script's terminal. If standard error is not a terminal, nothing is inserted.

    `on_output` gets each piece of the script's output; `rows_taken` returns how many rows of the real
    terminal are taken by us. Create it before the child is started, and always `close` it.
    """

    def __init__(self, on_output: Callable[[bytes], None], rows_taken: Callable[[], int] = lambda: 0) -> None:
        self._on_output, self._rows_taken = on_output, rows_taken
        self._master: int | None = None
        self._slave: int | None = None
        self._size: tuple[int, int] | None = None
        if not os.isatty(STDERR):
            return
        try:
            self._master, self._slave = os.openpty()
        except OSError:  # none left, or no /dev/pts: the script keeps the real terminal, and the table copes
            return
        os.set_blocking(self._master, False)
        termios.tcsetattr(self._slave, termios.TCSANOW, termios.tcgetattr(STDERR))
        self._follow_size()

    def child_fds(self) -> dict[str, int | None]:
        """Return descriptors for `subprocess.Popen`; None: inherit. Redirected streams are left alone."""
        same = self._slave is not None and os.isatty(STDOUT) and os.ttyname(STDOUT) == os.ttyname(STDERR)
        return {"stdin": None, "stdout": self._slave if same else None, "stderr": self._slave}

    def pump(self, timeout: float) -> None:
        """Pass on the script's output. Returns after `timeout` seconds, or earlier if there was some."""
        self._release_slave()
        if self._master is None:
            time.sleep(timeout)
            return
        self._follow_size()
        if select.select([self._master], [], [], timeout)[0]:
            self._read(READS)

    def drain(self) -> None:
        """After the child has ended, pass on the rest. Do not wait for others that have the terminal open."""
        self._release_slave()
        self._read(LAST_READS)

    def close(self) -> None:
        """Close the pseudo-terminal. Processes that still write to it get an error."""
        self._release_slave()
        if self._master is not None:
            os.close(self._master)
            self._master = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release_slave(self) -> None:
        """Close our copy, which would hide that all others are closed."""
        if self._slave is not None:
            os.close(self._slave)
            self._slave = None

    def _read(self, most: int) -> None:
        for _ in range(most):
            if self._master is None:
                return
            try:
                data = os.read(self._master, READ_BYTES)
            except BlockingIOError:
                return
            except OSError:  # EIO: no process has it open
                data = b""
            if not data:
                self.close()
                return
            self._on_output(data)

    def _follow_size(self) -> None:
        """Give the script's terminal the size of the real one, less the rows taken."""
        assert self._master is not None
        try:
            columns, rows = os.get_terminal_size(STDERR)
        except OSError:
            return
        size = (max(1, rows - self._rows_taken()) if rows else 0, columns)
        if size == self._size:
            return
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        if self._size is not None:
            # The terminal's own signal, if any, came before the new size could be read.
            os.kill(0, signal.SIGWINCH)
        self._size = size
