"""tests/bench/gpu/driver.py against a fake NVML."""

import os
from types import SimpleNamespace

import pytest

from tests.bench.gpu.driver import Device, Sampler, family, first_device, of_processes

GB = 10**9


class NVMLError(Exception):
    pass


class NVMLError_FunctionNotFound(NVMLError):
    pass


def fake(**changes):
    """A module with two GPUs; `processes` and `used` are lists that a test may change."""
    world = SimpleNamespace(
        NVMLError=NVMLError,
        NVMLError_FunctionNotFound=NVMLError_FunctionNotFound,
        processes=[],
        graphics=[],
        used=[GB],
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}f00",
        nvmlDeviceGetName=lambda handle: f"Card {handle}".encode(),
        nvmlSystemGetDriverVersion=lambda: "580.1",
    )
    world.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=12 * GB, used=world.used[0])
    world.nvmlDeviceGetComputeRunningProcesses_v3 = lambda handle: world.processes
    world.nvmlDeviceGetGraphicsRunningProcesses_v3 = lambda handle: world.graphics
    world.nvmlDeviceGetMPSComputeRunningProcesses_v3 = lambda handle: []
    for name, value in changes.items():
        setattr(world, name, value)
    return world


def process(pid, nbytes):
    return SimpleNamespace(pid=pid, usedGpuMemory=nbytes)


def raising(*_):
    raise NVMLError


@pytest.mark.parametrize(
    ("visible", "name"),
    [("", None), ("0", "Card 0"), ("1,0", "Card 1"), ("GPU-1f", "Card 1"), ("7", None), ("GPU-9", None)],
)
def test_the_first_visible_device(visible, name):
    found = first_device(fake(), visible)
    assert (found and found.name) == name


def test_without_the_variable_it_is_the_first(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = first_device(fake())
    assert found is not None
    assert (found.name, found.total, found.driver) == ("Card 0", 12 * GB, "580.1")


def test_no_driver_is_no_device():
    assert first_device(fake(nvmlInit=raising), "0") is None


def device(world):
    return Device(world, 0, "Card", 12 * GB, "580.1")


def test_a_process_in_both_lists_counts_once():
    world = fake(
        processes=[process(1, 2 * GB), process(2, GB), process(9, GB)], graphics=[process(1, 2 * GB)]
    )
    assert of_processes(device(world), {1, 2}) == 3 * GB


def test_a_figure_that_is_not_available_is_none():
    assert of_processes(device(fake(processes=[process(1, None)])), {1}) is None
    assert of_processes(device(fake(nvmlDeviceGetComputeRunningProcesses_v3=raising)), {1}) is None


def test_an_old_driver_is_asked_by_the_older_call():
    def missing(_):
        raise NVMLError_FunctionNotFound

    world = fake(nvmlDeviceGetComputeRunningProcesses_v3=missing)
    world.nvmlDeviceGetComputeRunningProcesses_v2 = lambda handle: [process(1, GB)]
    assert of_processes(device(world), {1}) == GB


def test_the_sampler_keeps_the_most_of_the_process():
    world = fake(processes=[process(os.getpid(), GB)])
    sampler = Sampler(device(world))
    with sampler:
        sampler.pid = os.getpid()
        sampler.look()
        world.processes[:] = [process(os.getpid(), 3 * GB)]
        sampler.look()
        world.processes[:] = [process(os.getpid(), GB)]
    assert (sampler.peak, sampler.source) == (3 * GB, "process")


def test_where_the_process_is_not_known_the_device_is_asked():
    world = fake(processes=[process(10**9, GB)])  # as in a container: of another namespace
    sampler = Sampler(device(world))
    with sampler:
        sampler.pid = os.getpid()
        world.used[0] = 5 * GB
        sampler.look()
        world.used[0] = GB
    assert (sampler.peak, sampler.source) == (4 * GB, "device")


def test_a_driver_that_goes_away_ends_nothing():
    world = fake()
    sampler = Sampler(device(world))
    with sampler:
        sampler.pid = os.getpid()
        world.nvmlDeviceGetMemoryInfo = world.nvmlDeviceGetComputeRunningProcesses_v3 = raising
        sampler.look()
    assert (sampler.peak, sampler.source) == (None, None)


def test_no_device_no_thread():
    with Sampler(None) as sampler:
        pass
    assert (sampler.peak, sampler.source) == (None, None)


def test_a_family_is_at_least_the_process():
    assert os.getpid() in family(os.getpid())
    assert family(2**22 + 1) == {2**22 + 1}
