"""dtrrun.launch.devices"""

import psutil
import pynvml
import pytest

from dtrrun.launch import devices
from dtrrun.launch.devices import resolve, total_bytes


class Driver:
    """NVML of a machine with two devices, of 10 and 20 bytes."""

    def __init__(self, monkeypatch):
        self.open = 0
        monkeypatch.setattr(pynvml, "nvmlInit", self.start)
        monkeypatch.setattr(pynvml, "nvmlShutdown", self.stop)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", self.by_index)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", self.by_uuid)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: Memory(10 * (handle + 1)))

    def start(self):
        self.open += 1

    def stop(self):
        self.open -= 1

    def by_index(self, index):
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def by_uuid(self, name):
        if name != "GPU-1":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 1


class Memory:
    def __init__(self, total):
        self.total = total


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = Driver(monkeypatch)
    yield driver
    assert driver.open == 0


@pytest.fixture
def no_driver(monkeypatch):
    def start():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", start)


@pytest.mark.parametrize(
    ("device", "definite"), [("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_definite_devices(device, definite):
    assert resolve(device) == definite


def test_a_machine_without_a_gpu(no_driver):
    with pytest.raises(ValueError, match="no CUDA device 0"):
        total_bytes("cuda:0")


def test_a_machine_with_gpus(driver):
    assert (total_bytes("cuda:0"), total_bytes("cuda:1")) == (10, 20)
    with pytest.raises(ValueError, match="no CUDA device 2"):
        total_bytes("cuda:2")


@pytest.mark.parametrize(("visible", "total"), [("1,0", 20), ("GPU-1", 20), (" 0 ", 10)])
def test_visible_devices_are_counted_as_the_program_counts_them(driver, monkeypatch, visible, total):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert total_bytes("cuda:0") == total


def test_no_visible_device(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match="no CUDA device 0"):
        total_bytes("cuda:0")


def test_the_machines_memory_or_the_containers(monkeypatch):
    monkeypatch.setattr(devices, "_cgroup_limits", list)
    assert total_bytes("cpu") == psutil.virtual_memory().total
    monkeypatch.setattr(devices, "_cgroup_limits", lambda: [10**6, 10**18])
    assert total_bytes("cpu") == 10**6
