"""dtrrun.monitor.sampler: its thread, with real records and a fake driver."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from fake_nvml import GIB, FakeNvml, Gpu

from dtrrun.monitor import sampler as module
from dtrrun.monitor.sampler import Sampler
from dtrrun.telemetry import driver
from dtrrun.telemetry.fields import COUNTERS
from dtrrun.telemetry.record import Writer, read_all
from tests.waiting import is_running, until

PLACE = {name: place for place, name in enumerate(COUNTERS)}
ME = os.getpid()


@pytest.fixture(autouse=True)
def _all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def record(tmp_path):
    """The record of this process, as one on the GPU."""
    writer = Writer(str(tmp_path), {"device": "cuda"})
    writer.counters[PLACE["reserved_bytes"]] = GIB
    writer.publish({})
    yield writer
    writer.close()


@pytest.fixture
def gpu():
    return Gpu("GPU-a")


class Watched:
    """A sampler, the lines that it printed and the signals that it sent."""

    def __init__(self, folder, *gpus, budget=2 * GIB, on_violation="warn", **more):
        self.lines, self.signals = [], []
        self.nvml = FakeNvml(*gpus, **more)
        tell = self.lines.append
        self.sampler = Sampler(str(folder), budget, on_violation, tell, tell, self.nvml)

    def __enter__(self):
        self.sampler.__enter__()
        return self

    def __exit__(self, *error):
        self.sampler.__exit__(*error)

    def start(self):
        self.sampler.started(self.signals.append)

    def use(self, folder):
        (snapshot,) = self.sampler.shown(read_all(str(folder)))
        return snapshot.driver


def test_what_it_sees_is_shown_and_told_to_the_process(tmp_path, record, gpu):
    with Watched(tmp_path, gpu) as watched:
        gpu.compute = {ME: GIB + 5}
        assert watched.use(tmp_path) is None
        watched.start()
        until(lambda: watched.use(tmp_path))
        assert watched.use(tmp_path) == driver.DriverUse("GPU-a", GIB + 5, GIB + 5, "nvml_pid")
        assert driver.read_figure(str(tmp_path), ME).nbytes == GIB + 5
    assert watched.lines == []
    assert watched.nvml.open == 0


def test_the_thread_ends_with_the_run(tmp_path, record, gpu):
    before = threading.active_count()
    with Watched(tmp_path, gpu) as watched:
        watched.start()
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    with pytest.raises(ZeroDivisionError):
        _fail(tmp_path, gpu)
    assert threading.active_count() == before


def _fail(folder, gpu):
    with Watched(folder, gpu) as watched:
        watched.start()
        raise ZeroDivisionError


def test_a_target_that_never_starts_needs_no_thread(tmp_path, gpu):
    with Watched(tmp_path, gpu) as watched:
        pass
    assert watched.nvml.open == 0


def test_it_is_asked_at_step_ends_and_else_once_in_a_while(tmp_path, record, gpu, monkeypatch):
    monkeypatch.setattr(module, "EVERY_SECONDS", 3600.0)
    with Watched(tmp_path, gpu) as watched:
        gpu.compute = {ME: GIB}
        watched.start()
        until(lambda: watched.use(tmp_path))
        gpu.compute = {ME: GIB + 1}
        asked = watched.nvml.asked
        time.sleep(5 * module.TICK_SECONDS)
        assert watched.nvml.asked == asked
        record.counters[PLACE["steps"]] += 1
        until(lambda: watched.use(tmp_path).nbytes == GIB + 1)
        monkeypatch.setattr(module, "EVERY_SECONDS", 0.2)
        record.counters[PLACE["steps"]] += 1  # ends the long wait
        asked = watched.nvml.asked
        until(lambda: watched.nvml.asked >= asked + 12)  # three lists per look


def test_nothing_is_asked_where_the_process_is_on_the_cpu(tmp_path, gpu):
    writer = Writer(str(tmp_path), {"device": "cpu"})
    with Watched(tmp_path, gpu) as watched:
        asked = watched.nvml.asked
        watched.start()
        writer.counters[PLACE["steps"]] += 1
        time.sleep(5 * module.TICK_SECONDS)
        assert watched.nvml.asked == asked
        assert watched.use(tmp_path) is None
    writer.close()


def test_a_driver_that_goes_is_said_once(tmp_path, record, gpu):
    record.counters[PLACE["overhead_bytes"]] = 7
    with Watched(tmp_path, gpu) as watched:
        gpu.compute = {ME: GIB + 5}
        watched.sampler.sample()
        for _ in range(2):
            gpu.lost = True
            watched.sampler.sample()
            assert watched.use(tmp_path).source == "reserved_overhead"
            assert watched.use(tmp_path).nbytes == GIB + 7
            assert driver.read_figure(str(tmp_path), ME).source == "reserved_overhead"
            gpu.lost = False
            watched.sampler.sample()
    (line,) = watched.lines
    assert line == (
        "warning: the driver's memory figure is no longer available from NVML (GPU is lost); "
        "using reserved and overhead, estimated instead"
    )


def test_no_more_threads(tmp_path, record, gpu, monkeypatch):
    def none_left(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    with Watched(tmp_path, gpu) as watched:
        watched.start()
    assert watched.lines == ["warning: cannot monitor the driver's memory figures: can't start new thread"]
    assert watched.nvml.open == 0


def test_without_nvml_the_process_is_believed(tmp_path, record, gpu):
    with Watched(tmp_path, gpu, library=False) as watched:
        watched.sampler.sample()
        assert watched.use(tmp_path) == driver.DriverUse("cuda:0", GIB, GIB, "reserved_overhead")
    assert watched.lines == []


def test_an_error_of_our_own_is_said_and_is_the_end_of_it(tmp_path, record, gpu, monkeypatch):
    with Watched(tmp_path, gpu) as watched:
        monkeypatch.setattr(watched.sampler._ladder, "read", lambda snapshots: 1 / 0)
        watched.start()
        until(lambda: watched.lines)
        until(lambda: not watched.sampler._thread.is_alive())
    assert watched.lines == [
        "warning: no longer monitoring the driver's memory figures: ZeroDivisionError: division by zero"
    ]


def test_a_driver_that_never_answers_does_not_hold_up_the_end(tmp_path, record, gpu, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 0.1)
    release = threading.Event()
    with Watched(tmp_path, gpu) as watched:
        monkeypatch.setattr(watched.sampler._ladder, "read", lambda snapshots: release.wait(30) and {})
        watched.start()
        time.sleep(3 * module.TICK_SECONDS)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert watched.nvml.open == 1  # not shut down while in use
    release.set()
    watched.sampler._thread.join()


def test_more_than_the_budget_is_warned_of_once_and_counted(tmp_path, record, gpu):
    with Watched(tmp_path, gpu) as watched:
        for size in (3 * GIB, GIB, 4 * GIB):
            gpu.compute = {ME: size}
            watched.sampler.sample()
        use = watched.use(tmp_path)
    assert (use.violations, use.most_over_bytes) == (2, 2 * GIB)
    (line,) = watched.lines
    assert line.startswith(f"warning: pid {ME} holds 3.22 GB on its GPU (NVML), 1.07 GB over the budget")
    assert (watched.signals, watched.sampler.stopped) == ([], None)


def test_without_a_budget_nothing_is_too_much(tmp_path, record, gpu):
    record.counters[PLACE["budget_bytes"]] = -1
    with Watched(tmp_path, gpu, budget=None, on_violation="stop") as watched:
        gpu.compute = {ME: 70 * GIB}
        watched.sampler.sample()
    assert (watched.lines, watched.signals) == ([], [])


def test_the_run_is_stopped_once(tmp_path, record, gpu):
    with Watched(tmp_path, gpu, on_violation="stop") as watched:
        watched.start()
        for size in (3 * GIB, GIB, 4 * GIB):
            gpu.compute = {ME: size}
            watched.sampler.sample()
        assert watched.signals == [signal.SIGTERM]  # to the target: the run did not start this process
        assert watched.sampler.stopped.startswith(f"pid {ME} holds 3.22 GB")
    assert watched.lines == []


@pytest.mark.parametrize("own_group", [False, True])
def test_the_offender_is_ended_and_its_group_where_that_is_its_own(tmp_path, own_group):
    """A process with its own group, as torchrun starts its ranks, is ended together with that group."""
    code = (
        "import subprocess, sys, time\n"
        "from dtrrun.telemetry.record import Writer\n"
        "helper = subprocess.Popen(['sleep', '60'])\n"
        "print(helper.pid, flush=True)\n"
        "Writer(sys.argv[1], {'device': 'cuda'}).publish({})\n"
        "time.sleep(60)\n"
    )
    gpu = Gpu("GPU-a")
    with Watched(tmp_path, gpu, on_violation="stop") as watched:
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=own_group
        )
        helper = int(child.stdout.readline())
        until(lambda: read_all(str(tmp_path)))
        gpu.compute = {child.pid: 3 * GIB}
        watched.sampler.sample()
        assert child.wait(10) == -signal.SIGTERM
        child.stdout.close()
    if own_group:
        until(lambda: not is_running(helper))
    else:
        assert is_running(helper)  # in our group: left to the command that gets the signal
        os.kill(helper, signal.SIGKILL)
