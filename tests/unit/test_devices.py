"""dtrrun.launch.devices"""

import sys

import psutil
import pytest
from fake_nvml import FakeNvml, Gpu

from dtrrun.cli.options import collect
from dtrrun.launch import devices
from dtrrun.launch.devices import resolve, total_bytes
from dtrrun.launch.environment import child_environment


@pytest.fixture
def driver(monkeypatch):
    """A machine with two devices, of 10 and 20 bytes."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = FakeNvml(Gpu("GPU-0a", total=10), Gpu("GPU-1b", total=20))
    yield driver
    assert driver.open == 0


@pytest.mark.parametrize(
    ("device", "definite"), [("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_definite_devices(device, definite):
    assert resolve(device, FakeNvml(library=False)) == definite


def test_auto_is_a_gpu_that_the_driver_shows(driver, monkeypatch):
    assert resolve("auto", driver) == "cuda:0"
    assert resolve("cpu", driver) == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve("auto", driver) == "cpu"


@pytest.mark.parametrize(("library", "device"), [(True, "cuda:0"), (False, "cpu")])
def test_a_command_starts_nvml_once(tmp_path, monkeypatch, library, device):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = FakeNvml(Gpu("GPU-0a"), library=library)
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    options = collect({"device": "auto", "budget": "50%"}, {}, tmp_path)
    assert options.device == device
    assert child_environment(options.settings, {})
    assert (driver.starts, driver.open) == (1, 0)


def test_a_machine_without_a_gpu():
    with pytest.raises(ValueError, match="no CUDA device 0"):
        total_bytes("cuda:0", FakeNvml(library=False))


def test_a_machine_with_gpus(driver):
    assert (total_bytes("cuda:0", driver), total_bytes("cuda:1", driver)) == (10, 20)
    with pytest.raises(ValueError, match="no CUDA device 2"):
        total_bytes("cuda:2", driver)


@pytest.mark.parametrize(
    ("visible", "total"), [("1,0", 20), ("GPU-1b", 20), ("GPU-1", 20), (" 0 ", 10), ("1", 20)]
)
def test_visible_devices_are_counted_as_the_program_counts_them(driver, monkeypatch, visible, total):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert total_bytes("cuda:0", driver) == total


def test_a_part_of_a_gpu_has_memory_of_its_own(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = FakeNvml(Gpu("GPU-0a", total=80, parts=[Gpu("MIG-0b", total=10)]))
    assert total_bytes("cuda:0", driver) == 10


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_no_visible_device(driver, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match="no CUDA device 0"):
        total_bytes("cuda:0", driver)


def test_a_device_that_is_lost(driver):
    driver.gpus[0].lost = driver.gpus[1].lost = True
    with pytest.raises(ValueError, match="no CUDA device 0"):
        total_bytes("cuda:0", driver)


def test_the_machines_memory_or_the_containers(monkeypatch):
    monkeypatch.setattr(devices, "_cgroup_limits", list)
    assert total_bytes("cpu") == psutil.virtual_memory().total
    monkeypatch.setattr(devices, "_cgroup_limits", lambda: [10**6, 10**18])
    assert total_bytes("cpu") == 10**6
