"""dtrrun.launch.signals"""

import itertools
import os
import signal
import subprocess
import sys

import pytest

from dtrrun.launch import signals
from dtrrun.launch.signals import (
    ENDING,
    FORWARDED,
    FROM_TERMINAL,
    held_back,
    interrupting,
    number_of,
    passed_on,
)


@pytest.mark.parametrize("number", FORWARDED)
def test_what_was_sent_to_us_is_passed_on(number):
    sent = []
    with passed_on(sent.append):
        signal.raise_signal(number)
    assert sent == [number]


@pytest.mark.parametrize("number", FROM_TERMINAL)
@pytest.mark.parametrize(("foreground", "count"), [(True, 0), (False, 1)])
def test_what_the_terminal_sends_it_has_sent_to_the_target_too(monkeypatch, number, foreground, count):
    monkeypatch.setattr(signals, "in_foreground", lambda: foreground)
    sent = []
    with passed_on(sent.append):
        signal.raise_signal(number)
    assert sent == [number] * count


@pytest.mark.parametrize(("pause", "ended"), [(0, [signal.SIGTERM]), (signals.INSISTING_SECONDS, [])])
def test_who_insists_on_ctrl_c_has_the_target_ended(monkeypatch, pause, ended):
    clock = itertools.count(100, pause)
    monkeypatch.setattr(signals, "monotonic", lambda: next(clock))
    monkeypatch.setattr(signals, "in_foreground", lambda: True)
    sent = []
    with passed_on(sent.append):
        for _ in range(signals.INSISTING - 1):
            signal.raise_signal(signal.SIGINT)
        assert sent == []
        signal.raise_signal(signal.SIGINT)
    assert sent == ended


def test_handlers_are_put_back():
    before = {number: signal.getsignal(number) for number in FORWARDED + FROM_TERMINAL}
    with passed_on(lambda number: None):
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in FORWARDED + FROM_TERMINAL} == before


@pytest.mark.parametrize("number", ENDING)
def test_a_request_to_end_interrupts(number):
    before = signal.getsignal(number)
    with interrupting() as came, pytest.raises(KeyboardInterrupt) as interrupt:
        signal.raise_signal(number)
    assert came == [number]
    assert number_of(interrupt.value) == number
    assert signal.getsignal(number) is before


def test_without_a_context_it_is_ctrl_c_that_interrupts():
    assert number_of(KeyboardInterrupt()) == signal.SIGINT


def test_a_request_to_end_can_wait_until_it_does_no_harm():
    seen = []

    def work():
        with held_back() as waiting:
            signal.raise_signal(signal.SIGTERM)
            seen.append((list(came), list(waiting)))

    with interrupting() as came, pytest.raises(KeyboardInterrupt):
        work()
    assert seen == [([], [signal.SIGTERM])]
    assert came == [signal.SIGTERM]


def test_a_request_that_waited_ends_us_where_it_would_have():
    code = (
        "import signal\n"
        "from dtrrun.launch.signals import held_back\n"
        "with held_back():\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    print('waited', flush=True)\n"
        "print('went on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "waited\n")


@pytest.mark.parametrize("place", range(2 * len(ENDING)))
def test_handlers_are_put_back_even_if_one_of_them_raises_meanwhile(monkeypatch, place):
    calls, real = itertools.count(), signal.signal

    def handle(number, handler):
        previous = real(number, handler)
        if next(calls) == place:
            raise KeyboardInterrupt
        return previous

    before = {number: signal.getsignal(number) for number in ENDING}
    monkeypatch.setattr(signal, "signal", handle)
    with pytest.raises(KeyboardInterrupt), interrupting():
        pass
    assert {number: signal.getsignal(number) for number in ENDING} == before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupting() as came:
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert came == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV])
def test_dying_of_a_signal(number, tmp_path):
    code = f"from dtrrun.launch.signals import die_of; die_of({int(number)})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (-number, b"", b"")
    assert os.listdir(tmp_path) == []  # no core dump


def test_without_a_terminal_nothing_comes_from_one():
    code = "from dtrrun.launch.signals import in_foreground; raise SystemExit(in_foreground())"
    assert subprocess.run([sys.executable, "-c", code], start_new_session=True).returncode == 0
