"""The heap keeps or returns the pages of what was freed, as it was asked to."""

import ctypes

import pytest
import torch

import dtrrun
from dtrrun.runtime import heap as module
from dtrrun.runtime.heap import Heap, resident_peak, resident_set

MB = 1 << 20
glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc"
)


@pytest.fixture
def heap(request):
    ctypes.CDLL(None).malloc_trim(0)  # what other tests have freed is not taken for the process's own
    made = Heap(request.param)
    made.install()
    yield made
    made.remove()


def free_half() -> list[torch.Tensor]:
    """Leave 100 free blocks of a MB, none at the heap's end; returns what keeps them apart."""
    blocks = [torch.ones(MB, dtype=torch.uint8) for _ in range(200)]
    return blocks[1::2]


def returned(heap: Heap) -> int:
    blocks = free_half()
    before = resident_set()
    heap.check(len(blocks) * MB, 10 * MB)
    return before - resident_set()


@glibc
@pytest.mark.parametrize("heap", ["always"], indirect=True)
def test_pages_go_back(heap):
    assert returned(heap) > 80 * MB
    assert heap.trims == 1


@glibc
@pytest.mark.parametrize("heap", ["never"], indirect=True)
def test_pages_stay(heap):
    assert returned(heap) < 10 * MB
    assert heap.trims == 0


@glibc
@pytest.mark.parametrize("heap", ["auto"], indirect=True)
def test_pages_go_back_by_default(heap, monkeypatch):
    """Else evictions fragment the heap, until the process holds more than without a budget."""
    monkeypatch.setattr(module, "memory_is_short", lambda: False)
    assert returned(heap) > 80 * MB
    assert heap.trims == 1


@glibc
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("heap", ["auto"], indirect=True)
def test_fewer_pages_are_kept_when_memory_is_short(heap, short, monkeypatch):
    monkeypatch.setattr(module, "memory_is_short", lambda: short)
    blocks = free_half()
    heap.check(len(blocks) * MB, 160 * MB)  # of which an eighth is 20 MB, and half 80
    assert (heap.trims == 1) == short


@glibc
@pytest.mark.parametrize("heap", ["always"], indirect=True)
def test_nothing_is_returned_within_the_limit(heap):
    blocks = free_half()
    heap.check(len(blocks) * MB, 1000 * MB)
    assert heap.trims == 0


def test_the_peak_of_the_resident_set_is_that_of_the_process():
    block = torch.ones(100 * MB, dtype=torch.uint8)
    reached = resident_set()
    del block
    assert reached <= resident_peak() < reached + 1000 * MB
    with dtrrun.budget(None) as session:
        assert session.report()["process_peak_bytes"] >= reached


def test_shortage_is_read_from_the_system(tmp_path, monkeypatch):
    real = module.Path
    monkeypatch.setattr(module, "Path", lambda *parts: real(tmp_path, *(part.lstrip("/") for part in parts)))
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)

    def short(available: int, limit: object, used: int) -> bool:
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1000 kB\nMemAvailable: {available} kB\n")
        (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{limit}\n")
        (tmp_path / "sys/fs/cgroup/memory.current").write_text(f"{used}\n")
        return module.memory_is_short()

    assert not short(500, "max", 10**6)
    assert short(100, "max", 0)
    assert not short(500, 1000, 800)
    assert short(500, 1000, 900)


def test_limits_of_the_user_are_left_alone():
    assert module._set_by_user({"MALLOC_MMAP_THRESHOLD_": "131072"})
    assert module._set_by_user({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1"})
    assert not module._set_by_user({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=off"})
