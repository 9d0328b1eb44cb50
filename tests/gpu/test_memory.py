"""The real allocator: its cap, its statistics, its errors and its snapshot."""

import gc
import re
from pathlib import Path
from random import Random

import pytest
import torch
from gpu_programs import DEVICE, EXPANDABLE, HOLLOW, MIB, beside, chain, correct, tensor

import dtrrun
from dtrrun.runtime.cuda.fractions import fraction_of
from dtrrun.runtime.cuda.gpu import REFUSALS
from dtrrun.runtime.cuda.observers import NAMES
from dtrrun.runtime.cuda.oom_retry import requested
from dtrrun.runtime.observe.expected import POOLS

pytestmark = pytest.mark.usefixtures("gpu")
needs_expandable_segments = pytest.mark.skipif(not EXPANDABLE, reason="needs expandable segments: NVML")

SPACE = (64 + 22) * MIB  # guard and slack


def test_the_cap_is_the_allocators_own():
    budget = beside() + SPACE + 200 * MIB
    with dtrrun.budget(budget, device=DEVICE) as session:
        kept = chain(40)
        assert correct(kept)
        report = session.report()
        assert report["evictions"] > 0
        assert report["reserved_peak_bytes"] <= report["cap_bytes"] + 20 * MIB
        assert torch.cuda.memory_reserved() <= report["cap_bytes"] + 20 * MIB
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def test_an_error_that_leaves_a_block_brings_back_no_more_than_fits():
    budget = beside() + SPACE + 200 * MIB

    def fail():
        kept = chain(40)
        raise KeyError(len(kept))

    with pytest.raises(KeyError) as caught, dtrrun.budget(budget, device=DEVICE) as session:
        fail()
    assert session.left
    assert torch.cuda.memory_reserved() <= session.report()["cap_bytes"] + 20 * MIB
    (kept,) = [values["kept"] for values in variables(caught.value) if "kept" in values]
    assert correct(kept)  # each comes back as it is read
    assert torch.cuda.memory_reserved() > session.report()["cap_bytes"]  # no budget holds any more
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def variables(error):
    """Yield those of the functions in an error's traceback."""
    entry = error.__traceback__
    while entry is not None:
        yield entry.tb_frame.f_locals
        entry = entry.tb_next


@needs_expandable_segments
def test_pytorchs_error_is_quoted_as_it_is_on_the_page_for_those_who_have_seen_it():
    page = Path(__file__).parents[2] / "docs" / "howto" / "out-of-memory.md"
    (quoted,) = re.findall(r"^torch.OutOfMemoryError: (.*)$", page.read_text(), re.MULTILINE)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**44, device=DEVICE)
    said, shown = (re.sub(r"[\d.]+ (bytes|[KMG]iB)", "1 GiB", text) for text in (str(caught.value), quoted))
    assert said.startswith(shown)


def test_a_limit_of_the_programs_own():
    """The lower one of its limit and ours holds, and it reads what it has set."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        with dtrrun.budget(beside() + SPACE + 200 * MIB, device=DEVICE) as session:
            kept = chain(20)
            cap, reserved = session.report()["cap_bytes"], torch.cuda.memory_reserved()
            for share in (0.5, 0.9, 120 * MIB / total):
                if share != 0.5:
                    torch.cuda.set_per_process_memory_fraction(share)
                assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(share, rel=1e-6)
                assert fraction_of(0) == pytest.approx(min(share, cap / total), rel=1e-3)
            kept += chain(20)
            # What the allocator had before stays cached, as without dtrrun.
            assert session.ledger.resident_bytes <= 120 * MIB
            assert torch.cuda.memory_reserved() <= reserved
            assert correct(kept[:21])
            with pytest.raises(dtrrun.BudgetError, match="set_per_process_memory_fraction"):
                tensor(150)
            del kept
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(120 * MIB / total, rel=1e-6)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_sessions_peaks_begin_with_it():
    held = tensor(500)
    del held
    torch.cuda.empty_cache()
    budget = beside() + SPACE + 100 * MIB
    with dtrrun.budget(budget, device=DEVICE) as session:
        chain(20)
        report = session.report()
    assert 40 * MIB < report["reserved_peak_bytes"] < 140 * MIB
    assert report["footprint_peak_bytes"] <= budget


def test_figures_of_a_session_that_has_ended_are_about_its_budget():
    budget = beside() + SPACE + 200 * MIB
    with dtrrun.budget(budget, device=DEVICE) as session:
        kept = chain(40)
        inside = session.report()
    report = session.report()
    assert torch.cuda.memory_reserved() > budget - beside()  # all is back, without a budget
    for name in (
        "budget_bytes",
        "cap_bytes",
        "reserved_peak_bytes",
        "footprint_peak_bytes",
        "sufficient_bytes",
    ):
        assert report[name] == inside[name]
    assert report["footprint_peak_bytes"] <= budget == report["budget_bytes"]
    assert correct(kept)


def test_the_sufficient_budget_evicts_nothing():
    def run():
        x = torch.ones(4096, 256, device=DEVICE)
        kept = [x := (x @ torch.ones(256, 256, device=DEVICE)).tanh() for _ in range(20)]
        kept[-1].sum().item()

    with dtrrun.budget(None, device=DEVICE) as session:
        run()
        sufficient = session.report()["sufficient_bytes"]
    for budget in (sufficient, sufficient - 70 * MIB):
        torch.cuda.empty_cache()
        with dtrrun.budget(budget, device=DEVICE) as session:
            run()
            assert (session.report()["evictions"] == 0) == (budget == sufficient)


def test_a_history_of_allocations_is_not_read(monkeypatch):
    """Converting it takes seconds."""
    taken = []
    snapshot = torch.cuda.memory_snapshot

    def seen(**options):
        taken.append(options)
        return snapshot(**options)

    monkeypatch.setattr(torch.cuda, "memory_snapshot", seen)
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        with dtrrun.budget(beside() + SPACE + 100 * MIB, device=DEVICE) as session:
            kept = chain(5)
            session.device.gpu.segments(MIB)
            assert correct(kept)
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert all(options == {"include_traces": False} for options in taken)


@needs_expandable_segments
def test_sizes_are_the_allocators():
    with dtrrun.budget(None, device=DEVICE) as session:
        tensor()  # memory that the first operator takes once
        before = torch.cuda.memory_allocated(), session.report()["resident_bytes"]
        kept = [torch.ones(n, device=DEVICE) for n in (1, 127, 128, 129, 1000, 300_000, 5_000_000)]
        allocated = torch.cuda.memory_allocated() - before[0]
        counted = session.report()["resident_bytes"] - before[1]
        assert counted == allocated
        del kept


def test_the_error_names_its_request():
    with dtrrun.budget(beside() + SPACE + 100 * MIB, device=DEVICE) as session:
        tensor()
        cap = session.report()["cap_bytes"]
    torch.cuda.set_per_process_memory_fraction(cap / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            tensor(1024)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert requested(str(caught.value)) == 1024 * MIB


def test_a_workspace_that_does_not_fit_is_made_room_for():
    with dtrrun.budget(beside() + SPACE + 300 * MIB, device=DEVICE) as session:
        kept = chain(60)
        large = torch.rand(4 * MIB, device=DEVICE)  # 16 MiB: sorting takes about 128 MiB besides the result
        expected = torch.sort(large.cpu()).values
        assert torch.equal(torch.sort(large).values.cpu(), expected)
        retries = session.report()["oom_retries"]
        for _ in range(3):
            torch.sort(large)
        assert session.report()["oom_retries"] <= retries + 1
        assert correct(kept)


def test_fragments_are_joined_by_evictions():
    with dtrrun.budget(beside() + SPACE + 300 * MIB, device=DEVICE) as session:
        kept = chain(30)
        del kept[1::2]
        large = [tensor(96).add_(i) for i in range(3)]
        assert all(bool((one == 1.0 + i).all()) for i, one in enumerate(large))
        assert all(bool((one == 2.0 ** (2 * i)).all()) for i, one in enumerate(kept))
        assert session.device.gpu.segments(96 * MIB)


def test_a_budget_that_is_too_small_says_what_would_do():
    with (
        dtrrun.budget(beside() + SPACE + 50 * MIB, device=DEVICE),
        pytest.raises(dtrrun.BudgetError) as caught,
    ):
        tensor(400)
    assert caught.value.pinned["CUDA context and libraries"] > 0
    with dtrrun.budget(caught.value.least_budget_bytes + 64 * MIB, device=DEVICE):
        tensor(400)


def test_the_advice_is_more_than_what_the_allocator_refused_memory_in():
    """The memory of the program's own pool cannot be used outside it, but the ledger counts it as free."""
    budget = beside() + SPACE + 200 * MIB
    pool = torch.cuda.MemPool()
    with dtrrun.budget(budget, device=DEVICE) as session:
        with torch.cuda.use_mem_pool(pool):
            chain(40)
        left = session.report()["cap_bytes"] - torch.cuda.memory_reserved()  # by what a pool grows at once
        with pytest.raises(dtrrun.BudgetError) as caught:
            tensor(100)
    assert caught.value.least_budget_bytes >= budget + 100 * MIB - left
    del caught  # its traceback holds the pool


@needs_expandable_segments
def test_what_is_free_in_the_programs_own_pools_is_named_and_advised():
    """It serves nothing else, and the pools grow with the budget."""

    def run():
        torch.manual_seed(0)
        weights = [torch.randn(256, 256, device=DEVICE).mul(0.05).requires_grad_() for _ in range(8)]
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            x = torch.randn(8192, 256, device=DEVICE)
            for one in weights[:5]:
                x = (x @ one).tanh()
        for one in weights[5:]:
            x = (x @ one).tanh()
        x.square().mean().backward()
        return [one.grad.cpu() for one in weights]

    expected, budget, named, basis = run(), beside() + SPACE + 70 * MIB, {}, ""
    torch.cuda.empty_cache()
    with dtrrun.budget(budget, device=DEVICE):
        try:
            run()
        except dtrrun.BudgetError as error:
            named, budget, basis = error.pinned, error.expected_bytes, error.basis
    assert basis.endswith(POOLS)
    assert named["free in the program's own memory pools"] > 10 * MIB
    gc.collect()
    torch.cuda.empty_cache()
    with dtrrun.budget(budget, device=DEVICE):
        assert all(map(torch.equal, expected, run()))


def test_observers_are_told_of_errors_that_the_program_gets():
    calls = []
    attach = next(name for name in NAMES if hasattr(torch._C, name))
    with dtrrun.budget(beside() + SPACE + 200 * MIB, device=DEVICE) as session:
        getattr(torch._C, attach)(lambda *args: calls.append(args))
        session.device._native.avoid_flushes([])  # so that requests are refused
        kept = chain(30)
        del kept[1::2]
        large = [tensor(96) for _ in range(3)]
        assert session.report()["oom_retries"] > 0
        assert calls == []
        with pytest.raises(dtrrun.BudgetError):
            tensor(1 << 20)
        assert len(calls) == 1
        del large
    with pytest.raises(torch.OutOfMemoryError):
        tensor(1 << 20)
    assert len(calls) == 2


def test_numbers_on_the_cpu_are_kept_by_value():
    """What was computed with one may be evicted, even if the program writes to it afterwards."""
    scale, low = torch.tensor(0.5), torch.tensor(0.1)
    first = torch.randn(8 * MIB // 4, device=DEVICE)

    def run():
        kept = [first]
        for step in range(30):
            scale.fill_(0.5 + step / 100)
            kept.append(torch.where(kept[-1] > 0, kept[-1] * scale, low))
            if step % 3 == 0:
                kept[-1].mul_(scale)
        return [one.sum() for one in kept]

    plain = run()
    budget = beside() + SPACE + 150 * MIB
    with dtrrun.budget(budget, device=DEVICE, verify=True) as session:
        found = run()
        report = session.report()
    assert all(map(torch.equal, plain, found))
    assert report["evictions"] > 0
    assert report["mismatches"] == []


@pytest.mark.skipif(HOLLOW, reason="compiles a kernel with NVRTC, for which there is no stand-in")
def test_jiterator_kernels_find_their_tensors_in_memory():
    """They are launched below all operators, on addresses."""
    kernel = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T a) { return a + 1; }")
    with dtrrun.budget(beside() + SPACE + 100 * MIB, device=DEVICE) as session:
        kept = chain(40)
        evicted = next(one for one in kept if not session.callbacks.version_of(one).resident)
        kernel(evicted)
        assert session.callbacks.version_of(evicted).resident


def test_the_programs_statistics_are_its_own():
    torch.cuda.reset_peak_memory_stats()
    with dtrrun.budget(None, device=DEVICE):
        kept = tensor(64)
        peak = torch.cuda.max_memory_allocated()
        del kept
        for _ in range(10):
            tensor(4).mul(2.0)
        assert torch.cuda.max_memory_allocated() == peak


def test_memory_goes_back_at_once_and_in_order():
    """The next operator may get an evicted storage's block, since it runs after the block's last reader."""
    with dtrrun.budget(None, device=DEVICE) as session:
        x = torch.randn(4096, 4096, device=DEVICE)
        y = x @ x
        expected = y.clone()
        record = session.callbacks.version_of(y)
        assert session.dtr.recipes.secure(record)
        before = torch.cuda.memory_allocated()
        assert session.dtr.eviction.evict_if_possible(record)
        assert before - torch.cuda.memory_allocated() == 64 * MIB
        torch.zeros(4096, 4096, device=DEVICE)  # may take that block
        assert torch.equal(y, expected)


def test_the_allocator_does_not_flush_where_neighbours_are_cheap():
    """Blocks of several sizes inside two thirds of what they take, so that free memory is in pieces."""

    def step():
        kept = []
        for n in range(12):
            kept.append(torch.ones((16 + 8 * (n % 3)) * MIB // 4, device=DEVICE).mul(2.0))
        return [float(one.sum()) for one in kept + kept[::-1]]

    expected = step()
    torch.cuda.empty_cache()
    with dtrrun.budget(beside() + SPACE + 220 * MIB, device=DEVICE) as session:
        for _ in range(2):
            assert step() == expected
        before, evictions = torch.cuda.memory_stats()["num_alloc_retries"], session.report()["evictions"]
        for _ in range(4):
            assert step() == expected
        assert session.report()["evictions"] > evictions
        assert session.device.retry.flushes.avoided > 0
        assert torch.cuda.memory_stats()["num_alloc_retries"] == before


@pytest.mark.parametrize("expandable", [pytest.param(True, marks=needs_expandable_segments), False])
def test_the_blocks_that_are_followed_are_those_of_a_snapshot(expandable):
    """While memory is allocated, freed, mapped and returned, on another stream, too."""
    random, sizes, side = Random(7), (1000, 300_000, 3 << 20, 11 << 20, 45 << 20), torch.cuda.Stream()
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
    change(f"expandable_segments:{expandable}")
    try:
        with dtrrun.budget(beside() + SPACE + 1200 * MIB, device=DEVICE) as session:
            kept, elsewhere, native, gpu = [tensor()], [], session._native, session.device.gpu
            assert gpu.follows_blocks(native)
            for n in range(300):
                kept.append(torch.empty(random.choice(sizes), dtype=torch.uint8, device=DEVICE))
                while len(kept) > 20:
                    del kept[random.randrange(len(kept))]
                if n % 100 == 50:
                    with torch.cuda.stream(side):
                        elsewhere.append(torch.empty(sizes[2], dtype=torch.uint8, device=DEVICE))
                    torch.cuda.empty_cache()
                if n % 20 == 0:
                    for nbytes in (MIB, 4 * MIB):
                        assert native.blocks_serving(nbytes) == gpu.segments(nbytes)
                    assert native.segment_bytes() == torch.cuda.memory_reserved()
            rest = torch.cuda.memory_reserved() - native.returnable_bytes()
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() == rest
            kept.clear()
    finally:
        change(f"expandable_segments:{EXPANDABLE}")


def test_a_refusal_that_is_certain_is_not_provoked():
    with dtrrun.budget(beside() + SPACE + 300 * MIB, device=DEVICE) as session:
        kept, before = chain(30), torch.cuda.memory_stats()["num_ooms"]
        del kept[1::2]
        large = [tensor(96).add_(i) for i in range(3)]
        assert session.device.retry.flushes.avoided > 0
        assert torch.cuda.memory_stats()["num_ooms"] == before
        assert all(bool((one == 1.0 + i).all()) for i, one in enumerate(large))


def test_an_allocator_that_does_not_ask_dtrrun_is_told_of(monkeypatch, capfd):
    with dtrrun.budget(None, device=DEVICE) as session:
        kept = torch.ones(1000, device=DEVICE)
        session.device.look()
        assert session.interposer.native.hears_device_allocator() == (True, True)
        assert "warning" not in capfd.readouterr().err
        monkeypatch.setattr(session.device, "_is_heard", False)
        monkeypatch.setattr(session.device.gpu, "unheard", lambda native: [REFUSALS])
        session.device.look()
        assert "no allocator for GPUs that asks dtrrun" in capfd.readouterr().err
        del kept
