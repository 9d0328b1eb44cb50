"""dtrrun.monitor.nvml"""

import pytest
from fake_nvml import MIB, FakeNvml, Gpu, NVMLError, NVMLError_NotSupported

from dtrrun.monitor.libnvml import Library
from dtrrun.monitor.nvml import NvmlUnavailable, memory, processes, started


def test_a_machine_without_a_driver():
    with (
        pytest.raises(NvmlUnavailable, match="NVML Shared Library Not Found"),
        started(FakeNvml(library=False)),
    ):
        pass


def test_the_library_has_all_that_is_asked_of_it():
    asked = {name for name in dir(FakeNvml) if name.startswith(("nvml", "NVML"))}
    assert asked >= {"nvmlInit", "nvmlDeviceGetComputeRunningProcesses_v3", "NVMLError_FunctionNotFound"}
    assert [name for name in asked if not hasattr(Library(), name)] == []
    assert issubclass(Library.NVMLError_FunctionNotFound, Library.NVMLError)


def test_it_is_let_go_of():
    nvml = FakeNvml()
    with pytest.raises(ZeroDivisionError):
        _divide(nvml)
    assert nvml.open == 0


def _divide(nvml):
    with started(nvml):
        assert nvml.open == 1
        raise ZeroDivisionError


def test_a_process_in_two_lists_counts_once():
    gpu = Gpu(
        "GPU-a", compute={1: 100 * MIB, 2: 7 * MIB}, graphics={1: 100 * MIB, 3: 5 * MIB}, mps={2: 9 * MIB}
    )
    assert processes(FakeNvml(gpu), gpu) == {1: 100 * MIB, 2: 9 * MIB, 3: 5 * MIB}


@pytest.mark.parametrize("size", [None, 0, 2**64 - 1])
def test_a_size_that_the_driver_does_not_tell(size):
    gpu = Gpu("GPU-a", compute={1: size, 2: 5})
    assert processes(FakeNvml(gpu), gpu) == {1: None, 2: 5}


def test_a_size_that_one_list_has_and_the_other_not():
    gpu = Gpu("GPU-a", compute={1: None}, graphics={1: 5})
    assert processes(FakeNvml(gpu), gpu) == {1: 5}


def test_a_device_without_graphics():
    gpu = Gpu("GPU-a", compute={1: 5}, graphics=NVMLError_NotSupported())
    assert processes(FakeNvml(gpu), gpu) == {1: 5}


def test_no_list_of_what_computes():
    gpu = Gpu("GPU-a", compute=NVMLError_NotSupported(), graphics={1: 5})
    with pytest.raises(NVMLError):
        processes(FakeNvml(gpu), gpu)


def test_an_old_driver():
    gpu = Gpu("GPU-a", compute={1: 5}, graphics={2: 6}, used=7, reserved=100, old=True)
    assert processes(FakeNvml(gpu), gpu) == {1: 5, 2: 6}
    found = memory(FakeNvml(gpu), gpu)
    assert (found.used, found.exact) == (107, False)


def test_what_the_driver_keeps_for_itself_is_not_counted():
    gpu = Gpu("GPU-a", used=7, reserved=100, total=1000)
    found = memory(FakeNvml(gpu), gpu)
    assert (found.total, found.used, found.exact) == (1000, 7, True)
