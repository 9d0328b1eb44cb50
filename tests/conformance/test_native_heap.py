"""The native heap: blocks of tensors, free pages that are kept or returned, and what others see of it."""

import os
import random
import subprocess
import sys
import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import dtrrun
from dtrrun.runtime.heap import Heap

pytestmark = pytest.mark.usefixtures("extension")

MB = 1 << 20


def resident_set():
    """Return the size of this process's private pages, in bytes."""
    with open("/proc/self/statm", "rb") as file:
        _, resident, shared, *_ = file.read().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def heap_of(extension, mode="auto"):
    heap = Heap(mode, extension)
    heap.install()
    return heap


@pytest.fixture
def heap(extension):
    made = heap_of(extension)
    yield made
    made.remove()


def block(nbytes, value=1):
    return torch.full((nbytes,), value, dtype=torch.uint8)


def exercise(seed):
    """Allocate and free blocks of all sizes, each with its own content, which must not change."""
    chance = random.Random(seed)
    blocks = []
    for number in range(600):
        if blocks and chance.random() < 0.5:
            tensor, value = blocks.pop(chance.randrange(len(blocks)))
            assert bool((tensor == value).all())
        else:
            value = number % 251
            nbytes = chance.choice([10_000, 32 << 10, chance.randrange(300_000), chance.randrange(2 * MB)])
            blocks.append((block(nbytes, value), value))
            assert blocks[-1][0].data_ptr() % 64 == 0
    assert all(bool((tensor == value).all()) for tensor, value in blocks)


@pytest.mark.parametrize("seed", range(3))
def test_no_block_is_written_to_by_another(extension, heap, seed):
    before, *_, returned = extension.heap_figures()  # other tests may keep some
    extension.cap_heap(before + 5 * MB)
    exercise(seed)
    blocks, free, _, after = extension.heap_figures()
    assert blocks == before
    assert free <= 5 * MB
    assert after > returned


def test_threads_share_it(extension, heap):
    extension.cap_heap(extension.heap_figures()[0] + 5 * MB)
    failed = []

    def run(seed):
        try:
            exercise(seed)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert not failed
    assert not any(one.is_alive() for one in threads)


def test_free_pages_serve_the_next_block(extension, heap):
    """They serve even a block that is larger than each of them."""
    block(40 * MB)  # all blocks below are parts of it
    apart = [block(MB) for _ in range(40)]
    *_, before, _ = extension.heap_figures()
    del apart[10:20]
    again = block(10 * MB)
    assert extension.heap_figures()[2] == before
    del apart[10:], again
    again = [block(7 * MB) for _ in range(4)]
    assert extension.heap_figures()[2] == before
    assert len(again) == 4


@pytest.mark.parametrize(("mode", "kept"), [("auto", 9 / 8), ("always", 1), ("never", 10)])
def test_free_pages_go_back_as_the_mode_says(extension, mode, kept, monkeypatch):
    """kept: a multiple of the limit, tensors included."""
    monkeypatch.setattr("dtrrun.runtime.heap.LEAST_SLACK", 0)
    heap = heap_of(extension, mode)
    blocks = [block(MB) for _ in range(140)]
    resident = resident_set()
    del blocks[::2]  # 70 MB
    taken, *_ = extension.heap_figures()
    limit = taken + 10 * MB
    heap.check(taken, limit)
    gone = resident - resident_set()
    heap.remove()
    assert abs(gone - max(0, taken + 70 * MB - limit * kept)) < 3 * MB
    assert blocks


def test_after_a_session_all_free_pages_have_gone_back(extension):
    heap = heap_of(extension, "never")
    blocks, kept = [block(MB) for _ in range(50)], block(MB)
    before = resident_set()
    del blocks
    heap.remove()
    assert resident_set() < before - 48 * MB
    assert extension.heap_figures()[1] == 0
    taken, *_ = extension.heap_figures()
    assert bool((kept == 1).all())
    del kept  # what outlives the session is freed all the same
    blocks, free, *_ = extension.heap_figures()
    assert (taken - blocks, free) == (MB, 0)
    more = block(5 * MB)  # allocated by the C library
    assert extension.heap_figures()[0] == blocks
    assert more.data_ptr()


def test_what_was_allocated_before_is_freed_as_before(extension):
    before = block(5 * MB)
    heap = heap_of(extension)
    taken, *_ = extension.heap_figures()
    before.untyped_storage().resize_(8 * MB)
    assert bool((before == 1).all())
    assert extension.heap_figures()[0] == taken + 8 * MB  # a storage keeps its allocator, which delegates
    del before
    assert extension.heap_figures()[0] == taken
    heap.remove()


def test_errors_are_those_of_pytorchs_allocator(heap):
    def error_of(nbytes):
        with pytest.raises(RuntimeError) as caught:
            torch.empty(nbytes, dtype=torch.uint8)
        return str(caught.value)

    found = [error_of(nbytes) for nbytes in (1 << 60, (1 << 63) - 1)]
    heap.remove()
    assert found == [error_of(nbytes) for nbytes in (1 << 60, (1 << 63) - 1)]


def test_the_profiler_sees_the_same_memory(heap):
    def allocated():
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            tensors = [block(nbytes) for nbytes in (1000, 50_000, 3 * MB)]
            del tensors
        return sorted((one.key, one.count, one.self_cpu_memory_usage) for one in seen.key_averages())

    found = allocated()
    heap.remove()
    assert found == allocated()


def test_a_lazy_clone_becomes_a_real_one(heap):
    first = block(MB)
    second = torch._lazy_clone(first)
    second.add_(1)
    assert bool((first == 1).all())
    assert bool((second == 2).all())


FORKS = """
import os, threading
import torch, dtrrun

def exercise():
    for i in range(2000):
        torch.empty(50_000 + i)

with dtrrun.budget("1GB"):
    kept = torch.ones(1 << 20)
    others = [threading.Thread(target=exercise, daemon=True) for _ in range(2)]
    for one in others:
        one.start()
    for _ in range(20):
        child = os.fork()
        if child == 0:
            total = torch.ones(1 << 20) + kept
            os._exit(0 if total.sum() == 2 << 20 and kept.sum() == 1 << 20 else 1)
        assert os.waitpid(child, 0)[1] == 0
    for one in others:
        one.join()
print("done")
"""


def test_a_forked_child_can_use_it():
    """It can, even if another thread of the parent was in the middle of using it."""
    run = subprocess.run(
        [sys.executable, "-c", FORKS],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert run.stdout == "done\n", run.stderr


LIMITED = """
import resource
import torch, torch._dynamo, dtrrun  # the session imports it, which takes more than what is left

used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), -1))
with dtrrun.budget("1GB"):
    kept = [torch.ones(1 << 18) for _ in range(64)]
print(sum(one.sum().item() for one in kept))
"""


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer takes address space of its own"
)
def test_address_space_that_is_limited_is_enough():
    """If there is none for a segment, the C library's allocator serves."""
    run = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=100)
    assert run.stdout == f"{64 * (1 << 18)}.0\n", run.stderr


def test_a_session_keeps_its_resident_set_near_the_budget(extension):
    """Blocks of different sizes are evicted and leave holes."""
    layers = [(torch.full((600, 600), 0.01), torch.full((600 + 37 * i, 600), 1e-3)) for i in range(12)]

    def forward(x):
        saved = []
        for square, other in layers:
            x = torch.tanh(x @ square)
            saved += [x, (x @ other.t()).sin()]
        return saved

    x = torch.ones(1000, 600)
    with dtrrun.budget(None) as counted:
        forward(x)
    peak = counted.report()["peak_bytes"]
    del counted
    before, *_ = extension.heap_figures()
    with dtrrun.budget(peak // 2) as session:
        for _ in range(4):
            forward(x)
        taken, free, *_ = extension.heap_figures()
        assert session.report()["evictions"] > 20
    assert taken - before + free <= peak // 2 * 9 // 8 + (peak >> 4)
