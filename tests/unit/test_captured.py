"""dtrrun.launch.captured"""

import dis
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from dtrrun.launch import captured
from dtrrun.launch.captured import TAIL_BYTES, run_captured
from dtrrun.launch.errors import LaunchError
from dtrrun.launch.signals import interrupting
from tests.waiting import is_running, until


def run(code, patience=60.0, attend=lambda: None):
    return run_captured([sys.executable, "-c", code], os.environ, patience, attend)


def test_output_is_kept_back_and_its_end_told(capfd):
    code = "import sys; print('a' * 9000); sys.stdout.flush(); print('end', file=sys.stderr); sys.exit(7)"
    ended = run(code)
    assert (ended.returncode, ended.timed_out) == (7, False)
    assert ended.tail.endswith("a\nend\n")
    assert len(ended.tail) == TAIL_BYTES
    assert capfd.readouterr() == ("", "")


def test_there_is_nothing_to_read():
    assert run("import sys; sys.exit(len(sys.stdin.read()))").returncode == 0


SLEEPS = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
"""


def test_what_takes_too_long_is_ended_with_its_children():
    ended = run(SLEEPS + "child.wait()", patience=1.0)
    assert ended.timed_out
    assert ended.returncode < 0
    until(lambda: not is_running(int(ended.tail.split()[0])))


def test_what_it_leaves_running_is_ended():
    ended = run(SLEEPS)
    assert ended.returncode == 0
    until(lambda: not is_running(int(ended.tail)))


def test_an_interruption_ends_it(tmp_path):
    path = tmp_path / "pid"
    code = f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    def attend():
        if path.exists() and path.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(code, attend=attend)
    until(lambda: not is_running(int(path.read_text())))


@contextmanager
def ends_within(seconds):
    """Raise if the test waits for longer."""

    def give_up(number, frame):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def signal_at(number, code, line):
    """Context in which this process gets a signal when `code` first reaches that line."""
    due = True

    def trace(frame, event, _):
        nonlocal due
        if due and event == "line" and frame.f_lineno == line:
            due = False
            signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    sys.settrace(lambda frame, event, _: trace if frame.f_code is code else None)
    try:
        yield
    finally:
        sys.settrace(before)


def test_a_signal_at_any_line_of_the_wait_for_it_ends_it():
    """A signal between two of the lines used to leave a lock of Popen's taken, and the wait never ended."""
    waiting, reached = subprocess.Popen._wait.__code__, 0
    for line in sorted({line for _, line in dis.findlinestarts(waiting) if line}):
        interrupted = False
        with ends_within(20), interrupting() as came, signal_at(signal.SIGTERM, waiting, line):
            try:
                run_captured(["sleep", "0.2"], os.environ, 60.0)
            except KeyboardInterrupt:
                interrupted = True
        assert interrupted == bool(came), line
        reached += interrupted
    assert reached > 5


def test_what_is_being_started_when_a_signal_comes_is_ended(monkeypatch):
    started = []

    def start(*words, **options):
        started.append(real(*words, **options))
        signal.raise_signal(signal.SIGTERM)
        return started[0]

    real = captured.start
    monkeypatch.setattr(captured, "start", start)
    with interrupting() as came, pytest.raises(KeyboardInterrupt):
        run("import time; time.sleep(60)")
    assert came == [signal.SIGTERM]
    until(lambda: not is_running(started[0].pid))


IGNORES = """
import pathlib, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(60)
"""


def test_a_second_signal_does_not_leave_it_running(tmp_path, monkeypatch):
    monkeypatch.setattr(captured, "GRACE_SECONDS", 2.0)
    path = tmp_path / "pid"

    def send():
        until(lambda: path.exists() and path.read_text())
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_captured([sys.executable, "-c", IGNORES, str(path)], os.environ, 60.0)
    thread.join()
    until(lambda: not is_running(int(path.read_text())))


def test_what_cannot_be_started():
    with pytest.raises(LaunchError) as caught:
        run_captured(["/nowhere/at-all"], os.environ, 1.0, lambda: None)
    assert caught.value.exit_status == 127
