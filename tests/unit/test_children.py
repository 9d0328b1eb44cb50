"""dtrrun.boot.children"""

import multiprocessing
import os
from multiprocessing import util

import pytest

from dtrrun.boot import children, helpers

CONTEXT = multiprocessing.get_context("fork")


def work():
    os.write(children_test_pipe, b"work ")


def helper():
    os.write(children_test_pipe, b"help ")


children_test_pipe = -1


@pytest.fixture
def seen(monkeypatch):
    """Run a target in a forked child with `watch` on, and return what happened there, in order."""
    read, write = os.pipe()
    monkeypatch.setitem(globals(), "children_test_pipe", write)
    monkeypatch.setattr(helpers, "_wrapped", [helper])
    monkeypatch.setattr(util, "_afterfork_registry", util._afterfork_registry.copy())
    parent = os.getpid()

    def tell(word):
        os.write(write, word if os.getpid() != parent else b"in the parent! ")

    children.watch(lambda: tell(b"start "), lambda: tell(b"finish "))

    def run(target):
        child = CONTEXT.Process(target=target)
        child.start()
        child.join()
        os.write(write, b"%d" % child.exitcode)
        return os.read(read, 1000).decode()

    yield run
    os.close(read)
    os.close(write)


def test_a_forked_child_starts_before_its_work_and_finishes_after_it(seen):
    assert seen(work) == "start work finish 0"


def test_a_helper_does_neither(seen):
    assert seen(helper) == "help 0"


def test_a_child_that_cannot_start_ends(seen, monkeypatch, capfd):
    def fail():
        raise ValueError("cannot")

    children.watch(fail, lambda: None)
    assert seen(work) == "start 125"
    assert "cannot run under a budget: ValueError: cannot" in capfd.readouterr().err
