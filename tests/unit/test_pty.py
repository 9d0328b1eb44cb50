"""`launch.pty`: exactly what the script writes to its terminal reaches us."""

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dtrrun.launch import pty
from dtrrun.launch.pty import Terminal


class Real:
    """The terminal that we are started on: 80×24, resizable."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        self.resize(80, 24)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[Real]:
    made = Real()
    monkeypatch.setattr(pty, "STDOUT", made.slave)
    monkeypatch.setattr(pty, "STDERR", made.slave)
    yield made
    os.close(made.master)
    os.close(made.slave)


class Run:
    def __init__(self, program: str, rows_taken: int = 0) -> None:
        self.output = b""
        self.terminal = Terminal(self.take, lambda: rows_taken)
        self.child = subprocess.Popen([sys.executable, "-c", program], **self.terminal.child_fds())  # type: ignore[call-overload]

    def take(self, data: bytes) -> None:
        self.output += data

    def to_its_end(self) -> bytes:
        while self.child.poll() is None:
            self.terminal.pump(0.05)
        self.terminal.drain()
        self.terminal.close()
        return self.output.replace(b"\r\n", b"\n")


def test_the_script_sees_a_terminal_of_the_right_size(real: Real) -> None:
    program = "import os; print(os.isatty(2), *os.get_terminal_size(1), os.ttyname(1) == os.ttyname(2))"
    assert Run(program, rows_taken=10).to_its_end() == b"True 80 14 True\n"


def test_stdin_and_the_process_group_are_ours(real: Real) -> None:
    run = Run(f"import os; print(os.getpgrp() == {os.getpgrp()}, os.getsid(0) == {os.getsid(0)})")
    assert run.terminal.child_fds()["stdin"] is None
    assert run.to_its_end() == b"True True\n"


def test_nothing_is_lost_at_the_end(real: Real) -> None:
    """More than one read's worth may still be in the kernel when the child has been reaped."""
    run = Run("import os; os.write(2, b'x' * 6_000 + b'end')")
    assert run.child.wait(timeout=300) == 0
    assert run.output == b""
    assert run.to_its_end() == b"x" * 6_000 + b"end"


def test_a_flood_comes_through_whole(real: Real) -> None:
    output = Run("for i in range(50_000): print(i)").to_its_end()
    assert output == b"".join(b"%d\n" % i for i in range(50_000))


def test_stdout_to_a_file_is_the_files_own(
    real: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "out", "wb") as file:
        monkeypatch.setattr(pty, "STDOUT", file.fileno())
        terminal = Terminal(lambda data: None)
        fds = terminal.child_fds()
        terminal.close()
    assert fds["stdout"] is None
    assert fds["stderr"] is not None


def test_stdout_on_another_terminal_is_left_alone(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Real()
    monkeypatch.setattr(pty, "STDOUT", other.slave)
    with Terminal(lambda data: None) as terminal:
        assert terminal.child_fds()["stdout"] is None


def test_no_terminal_nothing_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    out, into = os.pipe()
    monkeypatch.setattr(pty, "STDERR", into)
    with Terminal(lambda data: None) as terminal:
        assert terminal.child_fds() == {"stdin": None, "stdout": None, "stderr": None}
        begun = time.monotonic()
        terminal.pump(0.05)
        assert time.monotonic() - begun >= 0.05  # a wait loop must not spin
        terminal.drain()
    os.close(out)
    os.close(into)


def test_no_pseudo_terminal_left(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left() -> tuple[int, int]:
        raise OSError("out of pty devices")

    monkeypatch.setattr(os, "openpty", none_left)
    with Terminal(lambda data: None) as terminal:
        assert terminal.child_fds()["stderr"] is None


def test_a_new_size_reaches_the_script(real: Real) -> None:
    program = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGWINCH, lambda *_: (print(os.get_terminal_size(1).columns), os._exit(0)))\n"
        "print('ready', flush=True); time.sleep(20)"
    )
    run = Run(program)
    while b"\n" not in run.output:
        run.terminal.pump(1)
    real.resize(99, 24)
    assert run.to_its_end() == b"ready\n99\n"
    assert run.child.returncode == 0


def test_a_script_that_closes_its_terminal_does_not_make_us_spin(real: Real) -> None:
    run = Run("import os, time; os.close(1); os.close(2); time.sleep(0.6)")
    turns = 0
    while run.child.poll() is None:
        run.terminal.pump(0.1)
        turns += 1
    assert turns < 20
    run.terminal.close()


def test_the_end_of_the_script_wakes_us(real: Real) -> None:
    run = Run("print(1)")
    begun = time.monotonic()
    while run.terminal._master is not None:  # closed when no process has it open
        run.terminal.pump(30)
    assert time.monotonic() - begun < 20
    assert run.child.wait(timeout=300) == 0
    run.terminal.close()


def test_someone_who_keeps_the_terminal_does_not_keep_us(real: Real) -> None:
    """A daemon that the script left behind may write all the time."""
    program = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'while True: print(1)'])\n"
        "print('pid', child.pid, flush=True)"
    )
    run = Run(program)
    begun = time.monotonic()
    output = run.to_its_end()
    assert time.monotonic() - begun < 10
    pid = int(output.split(b"pid ")[1].split()[0])
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_no_descriptor_is_left_open(real: Real) -> None:
    before = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    Run("print(1)").to_its_end()
    with Terminal(lambda data: None):
        pass
    after = os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd") else []
    assert len(before) == len(after)
