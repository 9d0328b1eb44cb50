"""dtrrun.monitor.namespaces"""

import os
import signal
import subprocess
import sys

import pytest

from dtrrun.monitor.namespaces import is_ours, is_running, outer_id
from tests.waiting import until


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def status(folder, pid, line):
    (folder / str(pid)).mkdir()
    (folder / str(pid) / "status").write_text(f"Name:\tx\nPid:\t{pid}\n{line}\nThreads:\t1\n")


def test_a_process_is_found_by_its_inner_id(tmp_path, child):
    status(tmp_path, child.pid, f"NSpid:\t{child.pid}\t7")
    assert outer_id(7, [1, child.pid], proc=tmp_path) == child.pid
    assert outer_id(8, [child.pid], proc=tmp_path) is None


@pytest.mark.parametrize("line", ["NSpid:\t7", "", "NSpid:"])
def test_a_process_of_the_same_namespace_or_of_an_old_kernel_is_not(tmp_path, child, line):
    status(tmp_path, child.pid, line)
    assert outer_id(7, [child.pid], proc=tmp_path) is None


def test_a_stranger_of_the_same_inner_id_is_not(tmp_path, child):
    status(tmp_path, child.pid, f"NSpid:\t{child.pid}\t7")
    assert outer_id(7, [child.pid], ancestor=child.pid, proc=tmp_path) is None
    status(tmp_path, os.getppid(), f"NSpid:\t{os.getppid()}\t7")
    assert outer_id(7, [os.getppid(), 2**22 + 1], proc=tmp_path) is None


def test_the_real_one():
    assert outer_id(os.getpid(), [os.getpid(), os.getppid()]) is None


def test_what_is_ours(child):
    assert is_ours(child.pid)
    assert not is_ours(os.getpid())
    assert not is_ours(os.getppid())


def test_a_zombie_does_not_run():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_running(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: not is_running(child.pid))  # not yet waited for: a zombie
    assert child.wait() == -signal.SIGKILL
    assert not is_running(child.pid)
    child.stdin.close()
