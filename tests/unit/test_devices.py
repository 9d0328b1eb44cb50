"""dtrrun.launch.devices"""

import sys

import psutil
import pytest
from fake_nvml import FakeNvml, Gpu, only_nvml

from dtrrun.cli.options import collect
from dtrrun.launch import devices
from dtrrun.launch.devices import resolve, total_bytes
from dtrrun.launch.environment import child_environment
from dtrrun.launch.errors import LaunchError
from dtrrun.monitor.gpus import CUDA


@pytest.fixture(autouse=True)
def no_other_driver(monkeypatch):
    only_nvml(monkeypatch)


@pytest.fixture
def driver():
    """A machine with two devices, of 10 and 20 bytes."""
    driver = FakeNvml(Gpu("GPU-0a", total=10), Gpu("GPU-1b", total=20))
    yield driver
    assert driver.open == 0


@pytest.mark.parametrize(
    ("device", "definite"), [("auto", "cpu"), ("cpu", "cpu"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")]
)
def test_definite_devices(device, definite):
    assert resolve(device, nvml=FakeNvml(library=False)) == definite


def test_auto_is_a_gpu_that_the_driver_shows(driver, monkeypatch):
    assert resolve("auto", nvml=driver) == "cuda:0"
    assert resolve("cpu", nvml=driver) == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve("auto", nvml=driver) == "cpu"


@pytest.mark.parametrize(("library", "device"), [(True, "cuda:0"), (False, "cpu")])
def test_a_command_starts_nvml_once(tmp_path, monkeypatch, library, device):
    driver = FakeNvml(Gpu("GPU-0a"), library=library)
    monkeypatch.setattr("dtrrun.monitor.nvml.LIBRARY", driver)
    monkeypatch.setattr("dtrrun.launch.devices.build_of", lambda python: CUDA)
    options = collect({"device": "auto", "budget": "50%"}, {}, tmp_path)
    assert options.device == device
    assert child_environment(options.settings, {})
    assert (driver.starts, driver.open) == (1, 0)


def test_a_machine_without_a_gpu():
    with pytest.raises(ValueError, match="no CUDA device 0"):
        total_bytes("cuda:0", nvml=FakeNvml(library=False))


def test_a_machine_with_gpus(driver):
    assert (total_bytes("cuda:0", nvml=driver), total_bytes("cuda:1", nvml=driver)) == (10, 20)
    with pytest.raises(ValueError, match="no CUDA device 2"):
        total_bytes("cuda:2", nvml=driver)


@pytest.mark.parametrize(
    ("visible", "total"), [("1,0", 20), ("GPU-1b", 20), ("GPU-1", 20), (" 0 ", 10), ("1", 20)]
)
def test_visible_devices_are_counted_as_the_program_counts_them(driver, monkeypatch, visible, total):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert total_bytes("cuda:0", nvml=driver) == total


def test_a_part_of_a_gpu_has_memory_of_its_own():
    driver = FakeNvml(Gpu("GPU-0a", total=80, parts=[Gpu("MIG-0b", total=10)]))
    assert total_bytes("cuda:0", nvml=driver) == 10


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_no_visible_device(driver, monkeypatch, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match="no CUDA device 0"):
        total_bytes("cuda:0", nvml=driver)


def test_a_device_that_is_lost(driver):
    driver.gpus[0].lost = driver.gpus[1].lost = True
    with pytest.raises(ValueError, match="no CUDA device 0"):
        total_bytes("cuda:0", nvml=driver)


def test_the_machines_memory_or_the_containers(monkeypatch):
    monkeypatch.setattr(devices, "_cgroup_limits", list)
    assert total_bytes("cpu") == psutil.virtual_memory().total
    monkeypatch.setattr(devices, "_cgroup_limits", lambda: [10**6, 10**18])
    assert total_bytes("cpu") == 10**6


@pytest.mark.parametrize(
    ("lines", "device", "chosen"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "auto", "cuda:0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "auto", "cpu"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "cuda", None),
        ("cuda = None\nhip = '6.4'\n", "auto", "cpu"),  # built for AMD GPUs, and there are none
        (None, "auto", "cuda:0"),  # a torch that does not say
    ],
)
def test_the_targets_pytorch_decides_with_the_driver(driver, monkeypatch, tmp_path, lines, device, chosen):
    """The choice must be the one that the session will make, which asks its own PyTorch."""
    monkeypatch.setattr("dtrrun.monitor.nvml.LIBRARY", driver)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    if lines is not None:
        (tmp_path / "torch" / "version.py").write_text(lines)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    given = {"device": device, "python": str(python), "budget": "50%"}
    if chosen is None:
        with pytest.raises(LaunchError, match="cuda:0: this PyTorch is built for the CPU"):
            collect(given, {}, tmp_path)
    else:
        options = collect(given, {}, tmp_path)
        assert options.device == chosen
        assert options.settings.device == device
        assert (options.settings.budget_bytes == 5) == (chosen == "cuda:0")
