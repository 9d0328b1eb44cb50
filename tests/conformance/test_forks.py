"""Forked children, such as a data loader's workers, have every tensor and start at once."""

import gc
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import dtrrun
from dtrrun.runtime.dispatch import threads
from dtrrun.runtime.session import Session

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

COUNT = 1 << 16
NBYTES = 4 * COUNT


def told_by_child(function):
    """Return what `function` returns in a forked child, as text."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        try:
            os.write(write, str(function()).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        told = file.read()
    os.waitpid(child, 0)
    return told


SEVERAL_THREADS = """
import os, signal, threading, torch, dtrrun
torch.set_num_threads(2)
weight = torch.randn(512, 512)
def make():
    base = torch.ones(1 << 20)
    return [(base + i).sin() for i in range(6)] + [(weight @ weight).cos() for _ in range(3)]
expected = [one.numpy().tobytes() for one in make()]
with dtrrun.budget(16 << 20):
    made = make()
    child = os.fork()
    if child == 0:
        os._exit(0 if [one.numpy().tobytes() for one in made] == expected else 1)
    # It may wait for a thread that it does not have.
    timer = threading.Timer(60, os.kill, (child, signal.SIGKILL))
    timer.start()
    print(os.waitpid(child, 0)[1])
    timer.cancel()
"""


def test_a_child_of_a_parent_with_openmp_s_threads_gets_what_did_not_fit():
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SEVERAL_THREADS],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        timeout=300,
    )
    assert (run.stdout, run.returncode) == ("0\n", 0), run.stderr


def test_a_fork_under_pressure_evicts_nothing_to_bring_back_something_else():
    with dtrrun.budget(5 * NBYTES) as session:
        base = torch.ones(COUNT)
        kept = [(base + i).sin() for i in range(12)]
        before = session.report()
        assert before["evicted_bytes"] >= 8 * NBYTES
        for _ in range(4):
            assert told_by_child(lambda: all(one.numpy()[0] == one.numpy()[-1] for one in kept)) == "True"
        after = session.report()
        assert after["rematerializations"] - before["rematerializations"] <= 8
        assert after["evictions"] - before["evictions"] <= 8


def test_what_fits_is_brought_back_once_for_all_children():
    with dtrrun.budget(5 * NBYTES) as session:
        base = torch.ones(COUNT)
        kept = [base + i for i in range(6)]
        session.set_budget(20 * NBYTES)
        for _ in range(2):
            told_by_child(lambda: None)
        assert session.report()["evicted_bytes"] == 0
        assert session.report()["rematerializations"] == 2
    del kept


def test_a_child_begins_without_a_search_of_all_modules_or_a_collection(monkeypatch):
    searches, collector = [], []
    rename, stop = threads._rename, Session._stop
    monkeypatch.setattr(threads, "_rename", lambda *given: searches.append(given) or rename(*given))

    def stopping(*given, **named):
        collector.append(gc.isenabled())
        stop(*given, **named)

    monkeypatch.setattr(Session, "_stop", stopping)

    def in_child():
        made, searched = [], len(searches) - before
        thread = threading.Thread(target=lambda: made.append((torch.ones(2) + 1).tolist()))
        thread.start()
        thread.join()
        with dtrrun.budget("1GB"):  # a session in the child finds everything in order
            made.append((torch.ones(2) + 1).tolist())
        return searched, collector, gc.isenabled(), made

    with dtrrun.budget("1GB"):
        before = len(searches)
        told = told_by_child(in_child)
    assert told == "(0, [False, True], True, [[2.0, 2.0], [2.0, 2.0]])"
