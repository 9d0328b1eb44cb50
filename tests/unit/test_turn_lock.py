"""The lock of a session, and interrupts."""

import signal
import threading
import time

import pytest

import dtrrun
from dtrrun.runtime.dispatch.turns import lock_of_session

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer's signals")


class Interrupt(Exception):
    pass


@pytest.fixture
def interrupted():
    """Repeat a function until a signal's handler raises: 300 times, at other moments each time."""

    def interrupt(*_):
        raise Interrupt

    def forever(function, seconds):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            function()

    def until_interrupted(function):
        for moment in range(300):
            with pytest.raises(Interrupt):
                forever(function, 1e-4 + moment * 1e-6)
            yield

    before = signal.signal(signal.SIGALRM, interrupt)
    yield until_interrupted
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def lock():
    with dtrrun.budget("1GB") as session:
        yield lock_of_session(session._native, print)


class Other:
    """Context: another thread takes the lock now and then."""

    def __init__(self, lock):
        self.lock, self.over = lock, False
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.over:
            with self.lock:
                time.sleep(3e-4)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.over = True
        self.thread.join(10)
        assert not self.thread.is_alive()


def test_an_interrupt_leaves_it_taken_or_not(lock, interrupted):
    def take():
        with lock:
            pass

    with Other(lock):
        for _ in interrupted(take):
            assert not lock._is_owned()


def test_whoever_gave_it_up_has_it_again_whatever_is_raised(lock, interrupted):
    def give_up():
        with lock.given_up():
            pass

    with Other(lock):
        with lock, lock:
            for _ in interrupted(give_up):
                assert lock._is_owned()
        assert not lock._is_owned()  # it was taken twice, and released twice
    with pytest.raises(RuntimeError, match="does not have its turn"):
        lock.release()
