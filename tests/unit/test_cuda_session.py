"""dtrrun.runtime.cuda.session and its parts, on a fake GPU."""

import os

import pytest
import torch
from fake_gpu import FakeGpu, chain, correct, fake_session, stepped, tensor, unprofiled

import dtrrun
from dtrrun.runtime import storage
from dtrrun.runtime.cuda import session as cuda
from dtrrun.runtime.cuda.budget import LEAST_GUARD, MIB, SEGMENT
from dtrrun.telemetry import driver

CONTEXT = 300 * MIB
BUDGET = CONTEXT + LEAST_GUARD + 16 * MIB


def test_the_cap_is_set_before_the_first_allocation(monkeypatch):
    caps = []

    class Watched(FakeGpu):
        def set_cap(self, nbytes):
            caps.append((nbytes, self.allocator.total))
            super().set_cap(nbytes)

    with fake_session(monkeypatch, BUDGET, gpu=Watched()) as (session, _):
        assert not caps
        assert session.report()["device_index"] == -1
        tensor()
        assert caps == [(16 * MIB, 0)]
        report = session.report()
        assert report["cap_bytes"] == 16 * MIB
        assert report["overhead_bytes"] == CONTEXT
        assert report["guard_bytes"] == LEAST_GUARD
        assert report["device_index"] == 0
    assert caps[-1][0] is None  # lifted at the session's end


def test_what_the_driver_shows_stays_inside_the_budget(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        kept = chain(40)
        assert correct(kept)
        stepped(session)
        report = session.report()
        assert report["evictions"] > 0
        assert 8 * MIB < report["reserved_peak_bytes"] <= report["cap_bytes"]
        assert gpu.context + gpu.allocator.reserved_peak <= BUDGET


def test_loaded_kernels_take_from_the_tensors(monkeypatch):
    budget = BUDGET + 200 * MIB
    with fake_session(monkeypatch, budget) as (session, gpu):
        kept = chain(100)
        assert session.report()["evictions"] == 0
        session.callbacks.next_tick = session.dtr.rematerializer.next_tick = (
            1 << 62
        )  # so that only a new operator causes a look
        gpu.context += 100 * MIB
        torch.mm(tensor(), tensor())  # an operator that is new, and causes a look
        report = session.report()
        assert report["overhead_bytes"] == CONTEXT + 100 * MIB
        assert report["guard_bytes"] == 100 * MIB + SEGMENT
        assert gpu.context + gpu.allocator.reserved + report["guard_bytes"] <= budget
        assert report["evictions"] > 0
        assert gpu.allocator.emptied
        for _ in range(40):
            stepped(session)
        assert session.report()["guard_bytes"] < LEAST_GUARD + MIB
        gpu.allocator.cap = None
        assert correct(kept)


def test_the_drivers_own_figure_is_asked_for(monkeypatch, tmp_path):
    now = [0.0]
    monkeypatch.setattr(cuda, "monotonic", lambda: now[0])

    def shown(nbytes, source):
        figure = driver.Figure(nbytes + gpu.allocator.reserved, int(15e9), source)
        driver.write(str(tmp_path), os.getpid(), figure)

    gpu = FakeGpu()
    with fake_session(monkeypatch, BUDGET, gpu=gpu, record_dir=str(tmp_path)) as (session, _):
        tensor()
        now[0] = 10.0
        stepped(session)
        now[0] = 20.0
        shown(250 * MIB, "device_delta")  # no better than our own estimate
        stepped(session)
        assert session.report()["overhead_bytes"] == CONTEXT
        shown(250 * MIB, "nvml_pid")
        shown(250 * MIB, "nvml_pid")
        stepped(session)
        assert session.report()["overhead_bytes"] == 250 * MIB


def test_the_context_among_other_processes(monkeypatch):
    """Other processes' memory is not taken for our context, as the first reading alone would suggest."""
    gpu = FakeGpu()
    gpu.others = 600 * MIB
    gpu.own = lambda: CONTEXT + gpu.allocator.reserved
    with fake_session(monkeypatch, BUDGET, gpu=gpu) as (session, _):
        tensor()
        assert session.report()["overhead_bytes"] == CONTEXT


def other_process(monkeypatch, gpu, tmp_path):
    """Let another process exceed the budget mid-program. Return the report, and whether values match."""
    now = [0.0]
    monkeypatch.setattr(cuda, "monotonic", lambda: now[0])
    monkeypatch.setattr(cuda, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    with fake_session(monkeypatch, BUDGET, gpu=gpu, record_dir=str(tmp_path)) as (session, _):
        kept = chain(20)
        now[0] = 10.0
        gpu.others = 2 * BUDGET
        session.device.look()
        kept += [kept[-1].mul(2.0)]
        done = correct(kept)
        return session.report(), done


def test_another_process_is_no_reason_to_refuse_memory(monkeypatch, tmp_path, capsys):
    gpu = FakeGpu()
    gpu.own = lambda: CONTEXT + gpu.allocator.reserved
    report, done = other_process(monkeypatch, gpu, tmp_path)
    assert done
    assert (report["overhead_bytes"], report["guard_bytes"]) == (CONTEXT, LEAST_GUARD)
    assert "warning" not in capsys.readouterr().err


def test_nor_is_it_where_only_the_launcher_knows(monkeypatch, tmp_path, capsys):
    """As in a container: the session waits for the launcher's next figure."""
    gpu = FakeGpu()
    asked = []

    def told(folder):
        asked.append(cuda.monotonic())
        late = gpu.others and cuda.monotonic() > 10.5
        return (CONTEXT + gpu.allocator.reserved, cuda.monotonic() if late else 0.0)

    monkeypatch.setattr(cuda, "driver_bytes", told)
    report, done = other_process(monkeypatch, gpu, tmp_path)
    assert done
    assert report["overhead_bytes"] == CONTEXT
    assert 10.5 < asked[-1] < 12.5
    assert "warning" not in capsys.readouterr().err


def test_nor_is_it_where_nobody_knows(monkeypatch, tmp_path, capsys):
    report, done = other_process(monkeypatch, FakeGpu(), tmp_path)
    assert done
    assert report["overhead_bytes"] == CONTEXT
    assert "for another process's" in capsys.readouterr().err


def test_a_figure_without_a_context_is_not_ours(monkeypatch):
    gpu = FakeGpu()
    gpu.own = lambda: gpu.allocator.reserved
    with fake_session(monkeypatch, BUDGET, gpu=gpu) as (session, _):
        tensor()
        stepped(session)
        assert session.report()["overhead_bytes"] == CONTEXT


def test_the_driver_is_asked_once_a_second(monkeypatch):
    gpu, asked, now = FakeGpu(), [], [0.0]
    monkeypatch.setattr(cuda, "monotonic", lambda: now[0])
    gpu.own = lambda: asked.append(now[0]) or CONTEXT + gpu.allocator.reserved
    with fake_session(monkeypatch, BUDGET, gpu=gpu) as (session, _):
        tensor()
        for _ in range(30):
            now[0] += 0.125
            stepped(session)
        assert asked == [0.0, 1.0, 2.0, 3.0]
        gpu.context += 100 * MIB
        now[0] += 0.125
        stepped(session)
        assert len(asked) == 5  # asked again at once, to find out whose the growth is


def test_new_kernels_are_looked_for_with_each_dtype(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, _):
        single = tensor()
        double = single.double()
        looks = []
        monkeypatch.setattr(session.device.operators, "loaded", lambda: looks.append(1))
        for one in (single, single, double, double):
            one.mul(2.0)
            looks.append(0)
        assert looks == [1, 0, 0, 1, 0, 0]


def test_memory_that_no_tensor_shows_is_counted(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        kept = chain(2)
        stepped(session)
        before = session.ledger.limit
        gpu.allocator.allocated += 3 * MIB  # a library's workspace, never returned
        stepped(session)
        assert before - session.ledger.limit == 3 * MIB
        assert correct(kept)


def test_the_limit_only_rises_between_steps(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        kept = chain(2)
        gpu.allocator.allocated += 3 * MIB  # a library's workspace
        stepped(session)
        before, cap = session.ledger.limit, gpu.allocator.cap
        gpu.allocator.allocated -= 3 * MIB
        gpu.context -= MIB
        session._tick_now()
        assert (session.ledger.limit, gpu.allocator.cap) == (before, cap)
        stepped(session)
        assert session.ledger.limit >= before + 3 * MIB
        gpu.context += 8 * MIB  # what libraries take counts at once
        session._tick_now()
        assert gpu.allocator.cap <= cap - 7 * MIB
        assert correct(kept)


def test_sizes_are_counted_as_the_allocator_does(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, _):
        for _ in range(12):  # first they ask Python, then they do not
            kept = torch.ones(3).mul(2.0)
            assert session.callbacks.version_of(kept).nbytes == 512
    assert storage.rounded(1) == 64


def test_the_footprint_is_what_was_there_at_one_time(monkeypatch):
    with fake_session(monkeypatch, None) as (session, gpu):
        kept = chain(20)
        session.device.look()
        most = session.report()["footprint_peak_bytes"]
        assert most == gpu.context + gpu.allocator.reserved
        del kept
        gpu.empty_cache()
        session.device.look()
        gpu.context += 8 * MIB
        session.device.look()
        report = session.report()
        assert (
            report["footprint_peak_bytes"] == most < report["overhead_bytes"] + report["reserved_peak_bytes"]
        )
        kept = chain(30)  # exceeds the earlier peak, on top of the larger context
        session.device.look()
        assert session.report()["footprint_peak_bytes"] == gpu.context + gpu.allocator.reserved > most
        assert correct(kept)


def test_flushes_of_the_allocator_are_a_part_of_the_time(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        tensor()
        assert session.times()["allocator_ns"] == 0
        gpu.allocator.flushes += 2
        gpu.allocator.unmapped += 3 * SEGMENT
        assert session.times()["allocator_ns"] == 2 * 2_500_000 + 3 * (60_000 + 65_000)


def test_avoiding_flushes_inside_operators_is_dtrruns_own_work(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, _):
        tensor().add(1)
        before = session.times()
        session.device.retry.flushes.avoiding_ns += 3600 * 10**9  # more than operators have taken
        after = session.times()
        assert after["operators_ns"] == 0
        parts = ("operators_ns", "bookkeeping_ns")
        assert sum(after[one] for one in parts) == pytest.approx(sum(before[one] for one in parts), abs=10**8)


def test_a_workspace_is_learned_without_an_error(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        gpu.workspace["aten::mm"] = 3 * MIB
        a = tensor()
        torch.mm(a, a)
        torch.mm(a, a)
        signature = unprofiled(session, "aten.mm")
        assert signature.output_bytes == 4 * MIB
        kept = chain(40)
        torch.mm(a, a)
        assert session.report()["oom_retries"] == 0
        assert correct(kept)


def test_what_a_first_call_set_up_is_not_kept_as_workspace(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        gpu.workspace["aten::mm"] = 8 * MIB
        a = tensor()
        torch.mm(a, a)
        gpu.workspace.clear()
        torch.mm(a, a)
        signature = unprofiled(session, "aten.mm")
        assert signature.output_bytes == MIB


def test_what_a_side_stream_uses_stays(monkeypatch, capsys):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        kept = chain(4)
        gpu.side = True
        made = kept[2].mul(3.0)
        gpu.side = False
        more = chain(40)
        records = [session.callbacks.version_of(one) for one in (kept[2], made)]
        assert [record.pin for record in records] == ["side stream", "side stream"]
        assert all(record.resident for record in records)
        assert session.callbacks.version_of(kept[3]).pin is None
        assert session.device.operators.side_storages == 2
        assert correct(kept)
        assert correct(more)
        made = kept[2].add(1.0)
    assert capsys.readouterr().err.count("side stream") == 1


def test_replays_run_on_the_main_stream(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        kept = chain(30)
        evicted = next(one for one in kept if not session.callbacks.version_of(one).resident)
        streams = []
        run = gpu.run
        monkeypatch.setattr(gpu, "run", lambda *a, **k: streams.append(gpu.side) or run(*a, **k))
        gpu.side = True
        evicted.add(1.0)
        assert gpu.moves[:2] == ["to the main stream", "back to side"]
        assert streams[0] is False  # the replay
        assert streams[-1] is True  # the program's operator
        gpu.side = False
        assert correct(kept)


def test_another_budget_while_it_runs(monkeypatch):
    with fake_session(monkeypatch, BUDGET + 64 * MIB) as (session, gpu):
        kept = chain(45)
        assert session.report()["evictions"] == 0
        session.set_budget(BUDGET)
        assert gpu.allocator.cap == 16 * MIB
        assert gpu.allocator.reserved <= 16 * MIB
        session.set_budget(None)
        assert gpu.allocator.cap is None
        assert correct(kept)


def test_counting_only(monkeypatch):
    with fake_session(monkeypatch, None) as (session, gpu):
        kept = chain(30)
        stepped(session)
        report = session.report()
        assert gpu.allocator.cap is None
        assert (report["evictions"], report["cap_bytes"]) == (0, 0)
        assert report["reserved_bytes"] >= 31 * MIB
        assert report["overhead_bytes"] == CONTEXT
        assert correct(kept)


def test_a_context_that_takes_the_whole_budget(monkeypatch):
    with fake_session(monkeypatch, 200 * MIB), pytest.raises(dtrrun.BudgetError) as caught:
        tensor()
    assert caught.value.least_budget_bytes > CONTEXT
    assert "CUDA context and libraries" in str(caught.value)


def test_it_sleeps_until_an_operator_touches_a_gpu(monkeypatch, capsys):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        gpu.initialized = lambda: False
        kept = chain(30)
        assert (session.ledger.age, len(session.ledger.versions)) == (0, 0)
        assert session.report()["device_index"] == -1
        gpu.initialized = lambda: True
        gpu.touched_by = lambda args, kwargs: None
        kept[0].mul(1.0)
        assert session.ledger.age == 0
        session.device.ended(steps=3)
        assert correct(kept)
    assert "did not use a GPU" in capsys.readouterr().err


def test_a_forked_child_leaves_cuda_alone(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        kept = chain(30)
        gpu.usable = lambda: False
        gpu.statistics = gpu.used_and_total = gpu.set_cap = None
        ran = len(gpu.ran)
        session.stop()
        assert len(gpu.ran) == ran
        del kept


def test_fragmentation_is_looked_at_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(cuda, "monotonic", lambda: now[0])
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        kept = chain(8)
        del kept[1::2]
        looks = []
        segments = gpu.segments
        gpu.segments = lambda nbytes: looks.append(1) or segments(nbytes)
        for _ in range(3):
            stepped(session)
        assert len(looks) == 1
        free = [block.nbytes for segment in segments(MIB) for block in segment if block.free]
        assert session.report()["fragmented_bytes"] == sum(free) - max(free) > 0
        now[0] = 200.0
        stepped(session)
        assert len(looks) == 2


def test_an_allocator_without_statistics(monkeypatch, capsys):
    def none():
        raise RuntimeError("does not support getDeviceStats")

    with fake_session(monkeypatch, 16 * MIB) as (session, gpu):
        gpu.statistics = none
        kept = chain(30)
        stepped(session)
        assert session.report()["evictions"] > 0  # tensors are still kept within the budget
        assert session.ledger.resident_bytes <= 16 * MIB
        assert correct(kept)
    assert "has no statistics" in capsys.readouterr().err
    assert gpu.allocator.cap is None


def test_a_budget_error_names_its_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert str(dtrrun.BudgetError("aten.mm", 1, 2, 3, {})).startswith(
        "rank 1: CPU out of memory. dtrrun's budget of 2 B"
    )
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert str(dtrrun.BudgetError("aten.mm", 1, 2, 3, {})).startswith(
        "CPU out of memory. dtrrun's budget of 2 B"
    )
