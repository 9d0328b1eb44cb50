"""dtrrun.launch.watched"""

import os
import time

import pytest
from fake_nvml import GIB, FakeNvml, Gpu, only_nvml

from dtrrun.launch.watched import watched
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry import driver
from dtrrun.telemetry.record import Writer, read_all
from tests.waiting import until

ME = os.getpid()


@pytest.fixture
def nvml(monkeypatch):
    only_nvml(monkeypatch)
    return FakeNvml(Gpu("GPU-a"))


@pytest.fixture
def folder(tmp_path):
    """A folder with the record of this process."""
    writer = Writer(str(tmp_path), {"device": "cuda"})
    writer.publish({})
    yield str(tmp_path)
    writer.close()


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:0"])
def test_the_processes_on_a_gpu_are_told_what_the_driver_shows(nvml, folder, device):
    with watched(RuntimeSettings(device=device), folder, nvml) as shown:
        nvml.gpus[0].compute = {ME: GIB + 5}
        until(lambda: driver.read_figure(folder, ME))
        assert driver.read_figure(folder, ME).nbytes == GIB + 5
        [snapshot] = shown(read_all(folder))
        assert snapshot.driver == driver.DriverUse("GPU-a", GIB + 5, GIB + 5, "nvml_pid")
    assert nvml.open == 0


def test_on_the_cpu_nobody_asks_it(nvml, folder):
    with watched(RuntimeSettings(device="cpu"), folder, nvml) as shown:
        nvml.gpus[0].compute = {ME: GIB + 5}
        time.sleep(0.3)
        [snapshot] = shown(read_all(folder))
        assert snapshot.driver is None
    assert driver.read_figure(folder, ME) is None
