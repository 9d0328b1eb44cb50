"""dtrrun.monitor.own: what the driver shows for this process."""

import os

import pytest
from fake_nvml import GIB, FakeNvml, Gpu, NVMLError_NotSupported, only_nvml

from dtrrun.monitor.own import OwnMemory

ME = os.getpid()
NOBODY = 2**22 + 1  # more than any process's id


@pytest.fixture(autouse=True)
def no_other_driver(monkeypatch):
    only_nvml(monkeypatch)


def own(*gpus, uuid="", index=0, **more):
    return OwnMemory(uuid, index, FakeNvml(*gpus, **more))


@pytest.mark.parametrize(
    ("listed", "nbytes"),
    [
        ({ME: 5}, 5),
        ({ME: 5, os.getppid(): 7, 1: 9}, 5),
        ({ME: None}, None),
        ({os.getppid(): 7}, None),
        ({ME: 5, NOBODY: 7}, None),  # the host's ids, one of which happens to equal ours
        (NVMLError_NotSupported("Not Supported"), None),
    ],
)
def test_what_the_driver_lists(listed, nbytes):
    assert own(Gpu("GPU-a", compute=listed)).nbytes() == nbytes


def test_on_which_device(monkeypatch):
    gpus = [Gpu("GPU-a", compute={ME: 5}), Gpu("GPU-b", compute={ME: 7})]
    assert own(*gpus, uuid="b").nbytes() == 7
    assert own(*gpus, index=1).nbytes() == 7
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert own(*gpus).nbytes() == 7
    assert own(*gpus, index=2).nbytes() is None


def test_in_a_part_of_a_gpu(monkeypatch):
    parts = [Gpu("MIG-1", part=(1, 0), compute={ME: 5}), Gpu("MIG-2", part=(2, 0), compute={ME: 7})]
    whole = Gpu("GPU-a", parts=parts, total=80 * GIB)
    assert own(whole, uuid="2").nbytes() == 7
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2")
    assert own(whole, uuid="a").nbytes() == 7  # CUDA may report the whole GPU's UUID


def test_without_nvml():
    assert own(library=False).nbytes() is None
    assert own().nbytes() is None
