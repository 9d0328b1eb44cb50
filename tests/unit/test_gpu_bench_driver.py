"""tests/bench/gpu/driver.py: the driver's figure for a run, and its source."""

import os

import pytest
from fake_nvml import GIB, FakeNvml, Gpu, NVMLError_NotSupported

from tests.bench.gpu.driver import Device, Sampler, family, first_device, of_processes

ME = os.getpid()


def device(gpu):
    return Device(FakeNvml(gpu), gpu, "580.1")


def test_the_device_is_the_first_one_that_children_see(monkeypatch):
    gpus = Gpu("GPU-0a"), Gpu("GPU-1b")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    found = first_device(FakeNvml(*gpus))
    assert (found.handle, found.driver) == (gpus[1], "580.65.06")
    assert first_device(FakeNvml(*gpus, library=False)) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert first_device(FakeNvml(*gpus)) is None


@pytest.mark.parametrize(
    ("shown", "nbytes"),
    [
        ({1: 2 * GIB, 2: GIB, 9: GIB}, 3 * GIB),
        ({1: None}, None),
        ({}, None),
        (NVMLError_NotSupported(), None),
    ],
)
def test_processes_count_together_if_the_driver_tells(shown, nbytes):
    assert of_processes(device(Gpu("GPU-a", compute=shown)), {1, 2}) == nbytes


@pytest.mark.parametrize(
    ("pid", "found"),
    [
        (ME, (3 * GIB, "process")),
        (10**9, (4 * GIB, "device")),  # as in a container, whose process ids are of another namespace
    ],
)
def test_the_sampler_keeps_the_most_of_the_process_or_else_of_the_device(pid, found):
    gpu = Gpu("GPU-a", used=GIB)
    with Sampler(device(gpu)) as sampler:
        sampler.pid = ME
        for nbytes in (GIB, 3 * GIB, GIB):
            gpu.compute, gpu.used = {pid: nbytes}, GIB + nbytes // 3 * 4
            sampler.look()
    assert (sampler.peak, sampler.source) == found


def test_a_driver_that_goes_away_ends_nothing():
    gpu = Gpu("GPU-a")
    with Sampler(device(gpu)) as sampler:
        sampler.pid = ME
        gpu.lost = True
        sampler.look()
    assert (sampler.peak, sampler.source) == (None, None)


def test_no_device_no_thread():
    with Sampler(None) as sampler:
        pass
    assert (sampler.peak, sampler.source) == (None, None)


def test_a_family_is_at_least_the_process():
    assert ME in family(ME)
    assert family(2**22 + 1) == {2**22 + 1}
