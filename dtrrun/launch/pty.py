"""A pseudo-terminal for what the script writes, so that it can stand above the live table.

Only output goes through it. Standard input stays the real terminal, in the mode that it is in, and the child
stays in our session and process group: Ctrl-C, Ctrl-Z, `input`, `getpass` and `pdb` work as without us. The
pseudo-terminal controls no session; it is there so that the script sees a terminal of the right size.
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
from types import TracebackType

STDOUT, STDERR = 1, 2
READ_BYTES = 65536  # at most; the kernel hands out 4 KiB at a time
READS = 16  # in one `pump`: a script that floods its terminal must not starve the table
LAST_READS = 256  # more than fits into a pseudo-terminal; not without end, for others may go on writing


class Terminal:
    """Our end of the script's terminal; where standard error is none, nothing is put in between.

    `on_output` gets each piece of what the script writes there; `rows_taken` says how many rows of the real
    terminal are not the script's. Make it before the child is started, and `close` it whatever happens.
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
        except (
            OSError
        ):  # none left, or no /dev/pts: the script keeps the terminal itself, and the table copes
            return
        os.set_blocking(self._master, False)
        termios.tcsetattr(self._slave, termios.TCSANOW, termios.tcgetattr(STDERR))
        self._follow_size()

    def child_fds(self) -> dict[str, int | None]:
        """For `subprocess.Popen`; None is inherited. What was redirected to a file is the file's own."""
        same = self._slave is not None and os.isatty(STDOUT) and os.ttyname(STDOUT) == os.ttyname(STDERR)
        return {"stdin": None, "stdout": self._slave if same else None, "stderr": self._slave}

    def pump(self, timeout: float) -> None:
        """Pass on what the script wrote; returns after `timeout` seconds, sooner when there was something."""
        self._release_slave()
        if self._master is None:
            time.sleep(timeout)
            return
        self._follow_size()
        if select.select([self._master], [], [], timeout)[0]:
            self._read(READS)

    def drain(self) -> None:
        """After the child has ended: pass on the rest, without waiting for others who hold the terminal."""
        self._release_slave()
        self._read(LAST_READS)

    def close(self) -> None:
        """Let go of the pseudo-terminal. Who still writes to it gets an error from then on."""
        self._release_slave()
        if self._master is not None:
            os.close(self._master)
            self._master = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _release_slave(self) -> None:
        """The child has its own by now; ours would hide from us that all others have closed theirs."""
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
            except OSError:  # EIO: nobody has it open any more
                data = b""
            if not data:
                self.close()
                return
            self._on_output(data)

    def _follow_size(self) -> None:
        """Give the script's terminal the size of the real one, less the rows that are taken."""
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
            # The terminal's own signal, if there was one, came before the new size was there to be read.
            os.kill(0, signal.SIGWINCH)
        self._size = size
