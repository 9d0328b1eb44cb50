"""dtrrun.launch.process"""

import os
import signal
import sys
import threading
import time

import psutil
import pytest

from dtrrun.launch import process, signals
from dtrrun.launch.errors import LaunchError
from dtrrun.launch.process import run
from tests.waiting import until


def python(code, *words):
    return [sys.executable, "-c", code, *words]


@pytest.mark.parametrize(
    ("code", "returncode"),
    [("pass", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_how_it_ended(code, returncode):
    assert run(python(code), os.environ) == returncode


def test_the_environment_is_the_one_given():
    assert run(python("import os; raise SystemExit(int(os.environ['X']))"), {"X": "5"}) == 5


def test_same_process_group_and_the_streams_given(tmp_path):
    with open(tmp_path / "out", "wb") as out:
        run(python("import os; print(os.getpgrp())"), os.environ, {"stdout": out.fileno()})
    assert int((tmp_path / "out").read_text()) == os.getpgrp()


def test_descriptors_that_were_handed_down_are_the_targets():
    read, write = os.pipe()
    os.set_inheritable(write, True)
    run(python("import os, sys; os.write(int(sys.argv[1]), b'x')", str(write)), os.environ)
    os.close(write)
    assert os.read(read, 2) == b"x"
    os.close(read)


@pytest.mark.parametrize("attend", [None, lambda: time.sleep(0.01)])
def test_it_can_be_sent_a_signal_once_it_runs(attend):
    sent = []

    def started(send):
        sent.append(send)
        send(signal.SIGTERM)

    assert run(["sleep", "20"], os.environ, None, attend, started) == -signal.SIGTERM
    sent[0](signal.SIGTERM)  # it has ended: no other process gets the signal


def test_it_is_attended_while_it_runs(tmp_path):
    calls, enough = [], tmp_path / "enough"

    def attend():
        calls.append(time.sleep(0.01))
        if len(calls) == 5:
            enough.touch()

    code = f"import os, time\nwhile not os.path.exists({str(enough)!r}): time.sleep(0.01)"
    run(python(code), os.environ, None, attend)
    assert len(calls) >= 5


@pytest.mark.parametrize(
    ("text", "mode", "status"),
    [("#!/no/such/interpreter\n", 0o755, 127), ("\0\0\0\0", 0o755, 126), ("#!/bin/sh\n", 0o644, 126)],
)
def test_what_cannot_be_started(tmp_path, text, mode, status):
    (tmp_path / "x").write_text(text)
    (tmp_path / "x").chmod(mode)
    with pytest.raises(LaunchError) as caught:
        run([str(tmp_path / "x")], os.environ)
    assert caught.value.exit_status == status


def test_arguments_that_are_too_long():
    with pytest.raises(LaunchError, match="longer than the system allows"):
        run(["true", *["x" * 100_000] * 100], os.environ)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_signals_are_passed_on(tmp_path, name):
    ready = tmp_path / "ready"
    code = (
        "import signal, sys, time, pathlib\n"
        f"signal.signal(signal.{name}, lambda *_: sys.exit(9))\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "time.sleep(20)\n"
    )

    def send():
        until(ready.exists)
        os.kill(os.getpid(), getattr(signal, name))

    thread = threading.Thread(target=send)
    thread.start()
    before = signal.getsignal(getattr(signal, name))
    assert run(python(code, str(ready)), os.environ) == 9
    assert signal.getsignal(getattr(signal, name)) is before
    thread.join()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_from_before_it_was_there_reaches_it(monkeypatch, number):
    """This includes Ctrl-C, which the terminal sends only to processes that already exist."""

    def start(*words, **options):
        signal.raise_signal(number)
        return real(*words, **options)

    real = process.start
    monkeypatch.setattr(process, "start", start)
    monkeypatch.setattr(signals, "in_foreground", lambda: True)
    assert run(["sleep", "10"], os.environ) == -number


def test_an_ignored_signal_stays_ignored_as_under_nohup(tmp_path):
    code = "import signal; raise SystemExit(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(python(code), os.environ) == 1
    finally:
        signal.signal(signal.SIGHUP, before)
    assert run(python(code), os.environ) == 0


def test_a_target_that_cannot_be_attended_to_is_ended(tmp_path):
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(20)"

    def attend():
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(python(code, str(tmp_path / "pid")), os.environ, None, attend)
    pid = int((tmp_path / "pid").read_text())
    remaining = [psutil.Process(pid)] if psutil.pid_exists(pid) else []
    assert not psutil.wait_procs(remaining, timeout=10)[1]  # it would have slept 20 s
