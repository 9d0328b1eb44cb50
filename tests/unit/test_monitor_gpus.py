"""dtrrun.monitor.gpus, libnvml, kfd: which GPUs exist, according to whichever driver answers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import GIB, FakeNvml, Gpu, NVMLError_NotSupported, only_nvml

from dtrrun.monitor import cuda_probe, kfd
from dtrrun.monitor.gpus import CUDA, HIP, NEITHER, Gpus, choose, gpus
from dtrrun.monitor.libnvml import Library, NVMLError, NVMLError_FunctionNotFound

BLIND = FakeNvml(library=False)


@pytest.fixture(autouse=True)
def no_driver(monkeypatch):
    only_nvml(monkeypatch)


def library(folder, name, text):
    """Build a shared library from a few lines of C."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    (folder / "source.c").write_text(text)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / name, folder / "source.c"], check=True)
    return str(folder / name)


LIBCUDA = r"""
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int cuInit(unsigned flags) {
    FILE *asked = fopen("%s", "a");
    fprintf(asked, "%%d\n", (int)getpid());
    fclose(asked);
    return atoi(getenv("CU_INIT"));
}
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceTotalMem_v2(size_t *nbytes, int device) { *nbytes = (device + 8ul) << 30; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
"""


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """A fake CUDA with devices of 8 and 9 GiB; the file in which `cuInit` records its processes."""
    asked = tmp_path / "asked"
    monkeypatch.setattr(cuda_probe, "LIBRARY", library(tmp_path, "libcuda.so.1", LIBCUDA % asked))
    monkeypatch.setenv("CU_INIT", "0")
    return asked


def test_nvml_is_enough(cuda):
    found = gpus(CUDA, FakeNvml(Gpu("GPU-a", total=80 * GIB)))
    assert (found.sizes, found.nvml) == ((80 * GIB,), True)
    assert not cuda.exists()


def unknown(_):
    raise NVMLError_NotSupported("Not Supported")


def test_without_nvml_cuda_is_asked_elsewhere(cuda):
    """CUDA is not initialized in this process, which may fork or change CUDA_VISIBLE_DEVICES."""
    assert gpus(CUDA, BLIND).sizes == (8 * GIB, 9 * GIB)
    (asked,) = cuda.read_text().split()
    assert int(asked) != os.getpid()
    gpus(CUDA, BLIND)
    assert cuda.read_text().split() == [asked]  # only once: it is slow


@pytest.mark.parametrize("nvml", [FakeNvml(), FakeNvml(Gpu("GPU-a", lost=True)), FakeNvml(Gpu("GPU-a"))])
def test_an_nvml_that_knows_no_sizes(cuda, monkeypatch, nvml):
    """CUDA is asked where NVML knows no sizes, as on boards whose GPU shares the CPU's memory."""
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lambda *_, **__: unknown(0))
    assert gpus(CUDA, nvml).sizes == (8 * GIB, 9 * GIB)


@pytest.mark.parametrize(
    ("init", "why"),
    [
        ("100", "NVML Shared Library Not Found; cuInit: no CUDA-capable device is detected"),
        (None, "NVML Shared Library Not Found; CUDA ended the process that asked it (-11)"),
    ],
)
def test_a_driver_that_fails(cuda, monkeypatch, init, why):
    if init is None:
        monkeypatch.delenv("CU_INIT")  # atoi(NULL)
    else:
        monkeypatch.setenv("CU_INIT", init)
    assert gpus(CUDA, BLIND) == Gpus((), why)


@pytest.mark.parametrize(
    ("device", "build", "sizes", "chosen"),
    [
        ("auto", CUDA, (1, 2), "cuda"),
        ("auto", None, (1, 2), "cuda"),
        ("auto", NEITHER, (1, 2), "cpu"),
        ("auto", CUDA, (), "cpu"),
        ("cpu", CUDA, (1, 2), "cpu"),
        ("cuda", HIP, (1, 2), "cuda"),
        ("cuda:1", CUDA, (1, 2), "cuda:1"),
        ("cuda:2", CUDA, (1, 2), "no CUDA device 2: 2 are visible (dtrrun doctor says more)"),
        ("cuda:1", CUDA, (1,), "no CUDA device 1: 1 is visible (dtrrun doctor says more)"),
        ("cuda", CUDA, (), "no CUDA device 0: nobody answers (dtrrun doctor says more)"),
        ("cuda", NEITHER, (1, 2), "cuda: this PyTorch is built for the CPU"),
    ],
)
def test_what_a_device_means(device, build, sizes, chosen):
    def see(asked):
        assert asked == build
        return Gpus(sizes, "nobody answers")

    def choice():
        try:
            return choose(device, build, see)
        except ValueError as error:
            return str(error)

    assert choice() == chosen


# -- AMD -------------------------------------------------------------------------------------------


@pytest.fixture
def amd(monkeypatch, tmp_path):
    """A machine with a CPU and two GPUs of 64 GiB, and one that a container must not use."""
    for node, (simd, unique, gpu_id) in enumerate([(0, 0, 0), (304, 10, 111), (304, 11, 222)]):
        folder = tmp_path / "topology" / "nodes" / str(node)
        (folder / "mem_banks" / "0").mkdir(parents=True)
        (folder / "mem_banks" / "0" / "properties").write_text(
            f"heap_type {1 if simd else 0}\nsize_in_bytes {64 * GIB}\nflags 0\n"
        )
        (folder / "gpu_id").write_text(f"{gpu_id}\n")
        (folder / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd}\nunique_id {unique}\n")
    hidden = tmp_path / "topology" / "nodes" / "3"
    hidden.mkdir()
    (hidden / "properties").mkdir()  # unreadable
    for function in (kfd.gpus, kfd.process_bytes):
        monkeypatch.setattr(function, "__defaults__", (tmp_path,))
    return tmp_path


def vram(root, pid, **sizes):
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    for name, nbytes in sizes.items():
        (folder / name).write_text(f"{nbytes}\n")


@pytest.mark.parametrize(
    ("environ", "ids"),
    [
        ({}, [111, 222]),
        ({"HIP_VISIBLE_DEVICES": "1"}, [222]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, [222, 111]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, [111]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [222]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000000b"}, [222]),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_amds_gpus_in_hips_order(amd, environ, ids):
    assert [gpu.handle.gpu_id for gpu in kfd.gpus(environ)] == ids


def test_a_pytorch_for_rocm_uses_amds_gpus(amd, monkeypatch):
    assert gpus(HIP, FakeNvml(Gpu("GPU-a"))).sizes == (64 * GIB, 64 * GIB)
    assert gpus(None, BLIND).sizes == (64 * GIB, 64 * GIB)
    assert gpus(CUDA, BLIND).sizes == ()
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "7")
    found = gpus(HIP, BLIND)
    assert not found.sizes
    assert found.why.endswith("(HIP_VISIBLE_DEVICES=7)")


def test_a_processs_memory_on_an_amd_gpu(amd):
    first, second = kfd.gpus({})
    vram(amd, os.getpid(), vram_111=5, vram_222=7)
    assert [kfd.process_bytes(os.getpid(), gpu) for gpu in (first, second)] == [5, 7]
    assert kfd.process_bytes(os.getppid(), first) is None
    vram(amd, 2**22 + 1, vram_111=9)  # no process here has that id: the ids are the host's, not ours
    assert kfd.process_bytes(os.getpid(), first) is None


# -- NVML by ctypes --------------------------------------------------------------------------------

LIBNVML = r"""
#include <stdio.h>
#include <string.h>
struct process { unsigned pid; unsigned long long bytes; unsigned gpu, compute; };
struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
static int open;
int nvmlInit_v2(void) { open++; return 0; }
int nvmlShutdown(void) { return open-- ? 0 : 1; }
const char *nvmlErrorString(int code) { return code == 3 ? "Not Supported" : "Other"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    *handle = (void *)(0x7f0000000000 + index);
    return index < 2 ? 0 : 2;
}
int nvmlDeviceGetUUID(void *handle, char *text, unsigned room) {
    snprintf(text, room, "GPU-%lx", (long)handle & 0xf);
    return 0;
}
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *later) { return 3; }
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *found) {
    if (found->version != 0x02000028) return 25;
    *found = (struct memory_v2){found->version, 80, 1, 60, 19};
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *found) {
    *found = (struct memory){80, 60, 20};
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *found) {
    int room = *count;
    *count = 21;
    if (room < 21) return 7;
    for (int i = 0; i < 21; i++) found[i] = (struct process){1000 + i, (unsigned long long)i << 32, ~0u, ~0u};
    return 0;
}
"""


@pytest.fixture
def nvml(monkeypatch, tmp_path):
    monkeypatch.setattr("dtrrun.monitor.libnvml.NAME", library(tmp_path, "libnvidia-ml.so.1", LIBNVML))
    found = Library()
    found.nvmlInit()
    yield found
    found.nvmlShutdown()


def test_the_library_by_ctypes(nvml):
    assert nvml.nvmlDeviceGetCount() == 2
    handle = nvml.nvmlDeviceGetHandleByIndex(1)
    assert nvml.nvmlDeviceGetUUID(handle) == "GPU-1"
    newer = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    assert (newer.total, newer.used) == (80, 19)
    assert nvml.nvmlDeviceGetMemoryInfo(handle).used == 20
    listed = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    assert [(one.pid, one.usedGpuMemory) for one in listed] == [(1000 + i, i << 32) for i in range(21)]


def test_the_librarys_errors(nvml):
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    with pytest.raises(NVMLError, match="Not Supported"):
        nvml.nvmlDeviceGetMigMode(handle)
    with pytest.raises(NVMLError_FunctionNotFound, match="nvmlDeviceGetGraphicsRunningProcesses_v3"):
        nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(handle)
    with pytest.raises(NVMLError, match="Other"):
        nvml.nvmlDeviceGetHandleByIndex(2)


def test_without_the_library(monkeypatch):
    monkeypatch.setattr("dtrrun.monitor.libnvml.NAME", "libnvidia-ml.so.none")
    with pytest.raises(NVMLError, match=r"libnvidia-ml.so.none cannot be loaded"):
        Library().nvmlInit()


def test_the_probe_needs_only_the_standard_library():
    """It runs without site-packages, in whatever interpreter runs dtrrun."""
    command = [sys.executable, "-I", "-S", Path(cuda_probe.__file__), "libcuda.so.none"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "libcuda.so.none: cannot open shared object file" in done.stdout
