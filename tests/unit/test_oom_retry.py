"""dtrrun.runtime.cuda.oom_retry: operators that run out of memory, on a fake GPU."""

import gc
import threading
from contextlib import nullcontext

import pytest
import torch
from fake_gpu import Allocator, FakeGpu, chain, correct, fake_session, tensor

import dtrrun
from dtrrun.runtime.cuda.budget import LEAST_GUARD, MIB, SEGMENT
from dtrrun.runtime.cuda.oom_retry import missing, requested, retriable, short_of_memory
from dtrrun.runtime.operators import operator_of

aten = torch.ops.aten
CONTEXT = 300 * MIB
BESIDE = CONTEXT + LEAST_GUARD  # of a budget; three quarters of the rest are for tensors
BUDGET = BESIDE + 16 * MIB


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        (aten.mul.Tensor, True),
        (aten.add_.Tensor, True),  # pointwise: allocates nothing after it has begun
        (aten.mul_.Scalar, True),
        (aten.fill_.Scalar, True),  # overwrites: running twice does no harm
        (aten.copy_.default, True),
        (aten.mm.out, True),
        (aten.addmm_.default, True),  # allocates its workspace first
        (aten.native_batch_norm.default, True),
        (aten.cumsum_.default, False),
        (aten._foreach_add_.Scalar, False),  # the first tensor may already be updated
        (aten.resize_.default, False),
        (aten.native_dropout.default, False),  # unless the generator's state is known
        (aten.normal_.default, False),
    ],
)
def test_what_may_run_again(operator, expected):
    assert retriable(operator_of(operator), random_state_known=False) is expected


def test_random_operators_with_a_known_state():
    assert retriable(operator_of(aten.native_dropout.default), random_state_known=True)


@pytest.mark.parametrize(
    ("message", "least", "most"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 20 * MIB, 20.02 * MIB),
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has", 1.5 * (1 << 30), 1.52 * (1 << 30)),
        ("Tried to allocate 512 bytes", 512, 512),
        ("another text", 0, 0),
    ],
)
def test_the_request_in_the_error(message, least, most):
    assert least <= requested(message) <= most


REFUSED = (
    "CUDA out of memory. Tried to allocate 98.00 MiB. GPU 0 has a total capacity of 79.18 GiB of which "
    "{free} is free. Including non-PyTorch memory, this process has 860.00 MiB memory in use. 188.87 MiB "
    "allowed; Of the allocated memory 110.17 MiB is allocated by PyTorch, and 55.83 MiB is reserved by "
    "PyTorch but unallocated."
)


def test_what_the_allocator_lacked():
    lacked = missing(REFUSED.format(free="73.18 GiB"))
    assert lacked == pytest.approx((98 + 110.17 + 55.83 - 188.87) * MIB + SEGMENT, abs=MIB)
    assert missing("CUDA out of memory. Tried to allocate 98.00 MiB. GPU 0 has") == 98 * MIB


@pytest.mark.parametrize(("free", "error"), [("73.18 GiB", dtrrun.BudgetError), ("2.00 MiB", None)])
def test_an_error_of_a_full_device_is_not_the_budgets(monkeypatch, free, error):
    """An operator that may have begun to write fails with a BudgetError only if the device is not full."""
    with fake_session(monkeypatch, BUDGET) as (session, _):
        tensor()
        raised = torch.OutOfMemoryError(REFUSED.format(free=free))
        with pytest.raises(error) if error else nullcontext():
            session.device.retry.refuse(raised, "aten.cumsum_")


def test_another_gpus_error_is_not_ours():
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU {} has a total capacity of 79.11 GiB of which"
    assert short_of_memory(torch.OutOfMemoryError(text.format(1)), 1)
    assert not short_of_memory(torch.OutOfMemoryError(text.format(0)), 1)
    assert short_of_memory(torch.OutOfMemoryError("CUDA out of memory."), 1)  # another allocator's wording


@pytest.mark.parametrize(
    "text",
    [
        # As PyTorch 2.13 words them (c10/cuda/CUDAException.cpp and driver_api.h, ATen/cuda/Exceptions.h,
        # ATen/native/cuda/CuFFTUtils.h, ATen/miopen/Exceptions.h), with each library's text for the status.
        "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com/cuda",
        "CUDA driver error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: out of memory when calling `cusparseCreate(handle)`",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`. If you keep",
        "cuFFT error: CUFFT_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cudss error: CUDSS_STATUS_ALLOC_FAILED, when calling `cudssCreate(handle)`. ",
        "unable to find an engine to execute this computation",
        "GET was unable to find an engine to execute this computation after executing 12 plans!",
        "Triton Error [CUDA]: out of memory",
        "HIP error: out of memory\nHIP kernel errors might be asynchronously reported",
        "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`",
        "HIP error: HIPSPARSE_STATUS_ALLOC_FAILED when calling `hipsparseCreate(handle)`",
        "hipsolver error: HIPSOLVER_STATUS_ALLOC_FAILED, when calling `hipsolverDnCreate(handle)`",
        "cuFFT error: HIPFFT_ALLOC_FAILED",
        "miopenStatusAllocFailed",
        "Triton Error [HIP]: out of memory",
    ],
)
def test_who_lacks_memory_of_the_gpu(text):
    assert short_of_memory(RuntimeError(text), 0)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: misaligned address",
        "CUDA error: too many resources requested for launch",
        "CUDA driver error: invalid argument",
        "CUDA error: insufficient resources when calling `cusparseSpGEMM_compute(handle)`",  # for any cause
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
        "cuFFT error: CUFFT_INTERNAL_ERROR",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT",
        "out of resource: shared memory, Required: 200000, Hardware limit: 101376.",
        "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory",
        "the replay buffer is out of memory",
    ],
)
def test_who_lacks_something_else(text):
    assert not short_of_memory(RuntimeError(text), 0)
    assert not short_of_memory(ValueError("CUDA error: out of memory"), 0)


def test_memory_that_the_driver_lacks_is_given_back_to_it(monkeypatch):
    gpu = FakeGpu()
    real = gpu.kernel

    def kernel(func, name, *call):
        if name == "aten::mm" and gpu.allocator.reserved > 20 * MIB:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return real(func, name, *call)

    monkeypatch.setattr(gpu, "kernel", kernel)
    with fake_session(monkeypatch, BESIDE + 64 * MIB, gpu=gpu) as (session, _):
        kept = chain(30)
        product = torch.mm(kept[0], kept[0])
        assert torch.equal(product, torch.full((512, 512), 512.0))
        assert session.report()["oom_retries"] > 1
        assert correct(kept)


@pytest.mark.parametrize("enabled", [True, False])
def test_finalizers_run_without_the_lock_and_only_where_the_program_wants_them(monkeypatch, enabled):
    """They may wait for another thread, which may wait for its turn."""
    found = []

    class Resource:
        def __init__(self, lock):
            self.cycle, self.lock = self, lock

        def __del__(self):
            other = threading.Thread(target=self.look)
            other.start()
            other.join()

        def look(self):
            found.append(self.lock.acquire(False))
            if found[-1]:
                self.lock.release()

    gc.disable()  # so that all collections are dtrrun's own
    monkeypatch.setattr(gc, "isenabled", lambda: enabled)
    try:
        with fake_session(monkeypatch, BESIDE + 64 * MIB) as (session, gpu):
            kept = chain(8)
            gpu.allocator.cap = gpu.allocator.reserved
            Resource(session.callbacks.lock)
            with pytest.raises(dtrrun.BudgetError):
                torch.ones(20 * MIB // 4)
            gpu.allocator.cap = None
            assert correct(kept)
            assert found == [True] * enabled
    finally:
        gc.enable()
        gc.collect()


def test_an_unknown_workspace_is_made_room_for(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        gpu.workspace["aten::mm"] = 9 * MIB
        kept = chain(30)
        retry, evictions = session.device.retry, session.report()["evictions"]
        product = torch.mm(tensor(), tensor())
        avoided = retry.flushes.avoided
        assert avoided > 0  # a refusal that was certain
        assert gpu.allocator.ooms == 0
        assert session.report()["evictions"] > evictions
        assert torch.equal(product, torch.full((512, 512), 512.0))
        # The second time, room is made first.
        again = torch.mm(tensor(), tensor())
        assert retry.flushes.avoided == avoided
        assert torch.equal(again, product)
        assert correct(kept)


@pytest.mark.parametrize("asked", [True, False])
def test_neighbours_are_evicted_for_a_request_that_fragments_do_not_serve(monkeypatch, asked):
    """asked: the allocator asks before it flushes, as PyTorch's does. Otherwise, it refuses the request."""
    gpu = FakeGpu(allocator=Allocator(page=12 << 10))  # one page of 12 MiB, which holds the chain
    with fake_session(monkeypatch, BESIDE + 64 * MIB, gpu=gpu) as (session, gpu):
        if not asked:
            gpu.allocator.before_flush = lambda nbytes: None
        kept = chain(11)
        session.set_budget(BESIDE + 30 * MIB)
        assert gpu.allocator.reserved == 12 * MIB
        gpu.allocator.cap = gpu.allocator.reserved  # nothing more can be reserved
        if asked:
            session.device.accounts.cap = gpu.allocator.cap
        evictions = session.report()["evictions"]
        large = torch.ones(4 * MIB // 4)
        assert (session.report()["oom_retries"], gpu.allocator.flushes) == ((0, 0) if asked else (1, 1))
        assert 3 <= session.report()["evictions"] - evictions <= 4  # not all of them
        gpu.allocator.cap = None
        assert large.sum().item() == MIB
        del large
        assert correct(kept)


def unused(gpu, nbytes):
    """Return the allocator's statistics as if so much of its memory were unused, as a function."""
    given = gpu.statistics

    def statistics():
        return (found := given())._replace(allocated=found.reserved - nbytes())

    return statistics


def costs(session, ns):
    """Set what each operation has taken."""
    for version in session.ledger.versions.values():
        if version.operation is not None:
            version.cost = ns


@pytest.mark.parametrize("dear", [False, True])
def test_neighbours_that_are_dearer_than_a_flush_stay(monkeypatch, dear):
    """What it was computed from has been released, so two operations would have to run again."""
    gpu = FakeGpu(allocator=Allocator(page=12 << 10))
    with fake_session(monkeypatch, BESIDE + 64 * MIB, gpu=gpu) as (session, gpu):
        kept = chain(11)
        last = kept[-1]
        flushes = session.device.retry.flushes
        costs(session, session.device._native.most_ns(SEGMENT, SEGMENT) // 2 + dear)
        del kept[1:8:2], kept[-1]  # four free pieces of 1 MiB, between others
        gpu.allocator.cap = session.device.accounts.cap = gpu.allocator.reserved
        gpu.statistics = unused(gpu, lambda: SEGMENT)  # so a flush would do
        flushes.avoid(3 * MIB)
        assert (flushes.searches, flushes.avoided) == (1, not dear)
        assert session.report()["evictions"] == (0 if dear else 1)
        gpu.allocator.cap = None
        assert torch.equal(last, torch.full_like(last, 2.0**11))
        assert torch.equal(kept[1], torch.full_like(last, 4.0))


def test_what_tensors_could_still_take_is_noted_if_a_request_finds_no_block(monkeypatch):
    gpu = FakeGpu(allocator=Allocator(page=12 << 10))
    with fake_session(monkeypatch, BESIDE + 64 * MIB, gpu=gpu) as (session, gpu):
        kept = chain(11)
        session.device.accounts.cap = gpu.allocator.reserved
        flushes, ledger = session.device.retry.flushes, session.ledger
        for unused in (0, 700_000, MIB):  # not if it is much: another of the allocator's pools has it
            ledger.set_limit(ledger.resident_bytes + unused)
            flushes.avoid(MIB)
        assert flushes.take_unused() == [0, 700_000]
        assert flushes.take_unused() == []
        assert flushes.searches == 3
        assert correct(kept)


def test_others_go_where_a_flush_then_does_and_neighbours_are_dear(monkeypatch):
    gpu = FakeGpu(allocator=Allocator(page=12 << 10))
    with fake_session(monkeypatch, BESIDE + 64 * MIB, gpu=gpu) as (session, gpu):
        kept = chain(11)
        session.device.accounts.cap = gpu.allocator.reserved + SEGMENT - MIB  # 1 MiB is lacking
        gpu.statistics = unused(gpu, lambda: session.dtr.eviction.evictions * MIB)
        costs(session, 10**9)
        session.device.retry.flushes.avoid(3 * MIB)
        assert session.report()["evictions"] == 1  # not three, side by side
        assert session.device.retry.flushes.avoided == 1
        gpu.allocator.cap = None
        assert correct(kept)


def test_an_in_place_operator_that_has_begun_is_not_repeated(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        x = tensor()
        gpu.refuse["aten::cumsum_"] = 1
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            x.cumsum_(0)
        assert session.report()["oom_retries"] == 0
        assert gpu.ran.count("aten::cumsum_") == 1
        assert x[1, 0] == 2  # unchanged


def test_one_that_overwrites_is_repeated(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        x = tensor()
        gpu.refuse["aten::fill_"] = 1
        x.fill_(3.0)
        assert session.report()["oom_retries"] == 1
        assert torch.equal(x, torch.full((512, 512), 3.0))


def test_random_numbers_are_drawn_as_if_nothing_had_failed(monkeypatch):
    torch.manual_seed(3)
    expected = [torch.nn.functional.dropout(tensor()) for _ in range(2)]
    torch.manual_seed(3)
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        gpu.refuse["aten::native_dropout"] = gpu.refuse["aten::bernoulli_"] = 1
        found = [torch.nn.functional.dropout(tensor()) for _ in range(2)]
        assert session.report()["oom_retries"] >= 1
        assert all(map(torch.equal, expected, found))


def test_a_replay_that_runs_out_of_memory(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        kept = chain(30)
        before = session.report()["oom_retries"]
        gpu.refuse["aten::mul"] = 2
        assert correct(kept)
        assert session.report()["oom_retries"] == before + 1  # the second time, once less is locked
        assert session.report()["rematerializations"] > 0


def test_what_never_fits_is_a_budget_error_that_says_why(monkeypatch):
    gpu = FakeGpu()
    gpu.workspace["aten::mm"] = 60 * MIB
    with (
        fake_session(monkeypatch, BUDGET, gpu=gpu) as (session, gpu),
        pytest.raises(dtrrun.BudgetError) as caught,
    ):
        torch.mm(tensor(), tensor())
    error = caught.value
    assert error.operator == "aten.mm"
    assert error.budget_bytes == BUDGET
    assert error.least_budget_bytes >= BESIDE + 60 * MIB
    assert error.pinned["CUDA context and libraries"] == CONTEXT
    assert gpu.ran.count("aten::mm") <= 4
    assert session.error["operator"] == "aten.mm"


def test_over_the_budget_if_only_warned(monkeypatch, capsys):
    with fake_session(monkeypatch, BUDGET, over_budget="warn") as (session, gpu):
        gpu.workspace["aten::mm"] = 60 * MIB
        torch.mm(tensor(), tensor())
        assert session.report()["over_budget"] >= 1
        assert gpu.allocator.cap is None
    assert "is exceeded" in capsys.readouterr().err


def test_without_a_budget_the_error_is_the_programs(monkeypatch):
    with fake_session(monkeypatch, None) as (session, gpu):
        gpu.refuse["aten::mul"] = 1
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
            tensor().mul(2.0)
        assert session.report()["oom_retries"] == 0
