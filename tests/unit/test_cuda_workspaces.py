"""dtrrun.runtime.cuda.operators: the workspaces of libraries, on a fake GPU."""

import threading

import pytest
import torch
from fake_gpu import REAL, Allocator, FakeGpu, chain, correct, fake_session, stepped, tensor, unprofiled

import dtrrun
from dtrrun.runtime.cuda import oom_retry
from dtrrun.runtime.cuda.budget import LEAST_GUARD, MIB, SEGMENT
from dtrrun.runtime.cuda.oom_retry import ATTEMPTS, NO_ENGINE

CONTEXT = 300 * MIB
BESIDE = CONTEXT + LEAST_GUARD
CONVOLUTION = "aten::convolution"


def image():
    return torch.ones(1, 1, 512, 512)  # 1 MiB


WEIGHT = torch.ones(1, 1, 3, 3)


def convolved(x):
    return torch.nn.functional.conv2d(x, WEIGHT, padding=1)


def test_a_cap_that_a_page_exceeds_costs_no_flush_at_every_look(monkeypatch):
    gpu = FakeGpu(allocator=Allocator(**REAL))
    with fake_session(monkeypatch, BESIDE + 110 * MIB, gpu=gpu) as (session, _):
        kept = [tensor(10) for _ in range(8)]
        del kept[::2]
        kept.append(tensor(30))  # fits into no free block: 40 MiB more are mapped
        stepped(session)
        cap = session.report()["cap_bytes"]
        assert cap < gpu.allocator.reserved_peak <= cap + SEGMENT
        assert gpu.allocator.emptied == 0
        assert gpu.context + gpu.allocator.reserved_peak <= BESIDE + 110 * MIB


def test_a_library_gets_its_workspace_from_the_first_call_on(monkeypatch, capsys):
    with fake_session(monkeypatch, BESIDE + 16 * MIB) as (session, gpu):
        gpu.library[CONVOLUTION] = 2 * MIB
        x = image()
        kept = chain(12)
        assert session.report()["evictions"] > 0
        for _ in range(2):
            convolved(x)
        assert gpu.did_without == []
        signature = unprofiled(session, "aten.convolution")
        assert (signature.output_bytes, signature.workspace) == (3 * MIB, 2 * MIB)
        assert correct(kept)
    assert "too little memory for its workspace" not in capsys.readouterr().err


def test_a_replay_without_room_for_the_workspace_is_an_error(monkeypatch, capsys):
    """Without its workspace, the library would compute other bits than those that were evicted."""
    with fake_session(monkeypatch, BESIDE + 16 * MIB) as (session, gpu):
        gpu.library[CONVOLUTION] = 8 * MIB
        x = image()
        made = [convolved(x), convolved(x)]
        expected = made[0].sum().item()
        record = session.callbacks.version_of(made[0])
        session.dtr.eviction.make_room(session.ledger.limit, "everything")
        assert not record.resident
        pinned = [tensor() for _ in range(9)]
        for one in pinned:
            session.pin(one)
        with pytest.raises(dtrrun.BudgetError):
            made[0].sum()
        pinned.clear()
        assert made[0].sum().item() == expected
        assert gpu.did_without == []
        stepped(session)
        made.clear()
    assert "too little memory for its workspace" not in capsys.readouterr().err


def test_a_refusal_in_another_thread_is_an_error_on_its_way(monkeypatch, capsys):
    monkeypatch.setattr(oom_retry, "_done_without", False)
    with fake_session(monkeypatch, BESIDE + 16 * MIB) as (session, gpu):
        tensor()
        other = threading.Thread(target=session.ledger.reserve, args=(1, MIB))  # its operator runs
        other.start()
        other.join()
        gpu.allocator.ooms += 1
        session.device.look()
        session.device.retry.met(torch.OutOfMemoryError())
        session.ledger.give_back(1)
        session.device.look()
        assert "too little memory for its workspace" not in capsys.readouterr().err
        gpu.allocator.ooms += 1  # without an error
        session.device.look()
        assert "too little memory for its workspace" in capsys.readouterr().err


def test_what_is_needed_later_goes_for_the_workspace_of_a_replay(monkeypatch):
    """It is locked in the plan, so the allocator finds nothing to evict in the middle of the replay."""
    with fake_session(monkeypatch, BESIDE + 16 * MIB) as (session, gpu):
        gpu.library[CONVOLUTION] = 8 * MIB
        session.dtr.rematerializer.frugal_runs = 1  # it does not try other ways first
        x = image()
        made = [convolved(x * n) for n in range(8)]  # 1 MiB each; with any three of them, there is no room
        pooled = [torch.nn.functional.avg_pool2d(one, 4) for one in made]
        target = torch.cat(pooled)
        expected = target.sum().item()
        del made, pooled
        session.dtr.eviction.make_room(session.ledger.limit, "everything")
        ran = len(gpu.ran)
        assert target.sum().item() == expected
        assert gpu.ran[ran:].count(CONVOLUTION) > 8
        assert session.dtr.rematerializer.frugal_runs == 2
        assert gpu.did_without == []


def test_a_workspace_for_which_others_are_evicted_is_learned_whole(monkeypatch):
    """The allocator's peak does not show it, since memory is returned in the middle of the call."""
    with fake_session(monkeypatch, BESIDE + 16 * MIB) as (session, gpu):
        x = image()
        kept = chain(12)
        gpu.workspace["aten::mm"] = 8 * MIB
        torch.mm(x[0, 0], x[0, 0])
        retry = session.device.retry
        assert retry.retries + retry.flushes.avoided > 0
        assert unprofiled(session, "aten.mm").output_bytes >= 9 * MIB
        assert correct(kept)


def test_what_a_first_call_tried_is_not_kept_as_workspace(monkeypatch):
    with fake_session(monkeypatch, BESIDE + 32 * MIB) as (session, gpu):
        gpu.library[CONVOLUTION] = 6 * MIB  # with `cudnn.benchmark`: the largest of all workspaces tried
        x = image()
        chain(30)
        assert session.ledger.pressure
        convolved(x)
        gpu.library[CONVOLUTION] = 2 * MIB
        convolved(x)
        signature = unprofiled(session, "aten.convolution")
        assert (signature.output_bytes, signature.workspace) == (3 * MIB, 2 * MIB)


def test_a_library_gets_its_workspace_although_memory_is_fragmented(monkeypatch):
    """Enough bytes are free, but in fragments: a refusal of the library's request would go unnoticed."""
    gpu = FakeGpu(allocator=Allocator(page=30 << 10))  # 30 MiB: no page is ever entirely free
    gpu.library[CONVOLUTION] = 3 * MIB
    with fake_session(monkeypatch, BESIDE + 40 * MIB, gpu=gpu) as (session, _):
        x = image()
        results = [convolved(x), convolved(x)]
        chain(40)
        kept = chain(26)
        gpu.allocator.cap = gpu.allocator.reserved
        del kept[1::2]  # fragments of 1 MiB
        gpu.library[CONVOLUTION] = 8 * MIB  # more than was measured
        for _ in range(12):
            results.append(convolved(x))
        gpu.allocator.cap = None
        assert gpu.did_without == []
        assert session.report()["oom_retries"] > 0
        assert all(torch.equal(one, results[0]) for one in results)


def test_a_library_that_does_without_is_told_of(monkeypatch, capsys):
    """Beyond the budget, it may: the device itself is full. Later sessions warn, too."""
    monkeypatch.setattr(oom_retry, "_done_without", False)
    a = torch.ones(512, 512)
    with fake_session(monkeypatch, BESIDE + 16 * MIB, over_budget="warn") as (session, gpu):
        tensor()  # sets the cap
        session.device.retry.lifted = True
        gpu.library["aten::mm"] = 100 * MIB  # an operator not known to use a workspace
        torch.mm(a, a)
        stepped(session)
        assert gpu.did_without == ["aten::mm"]
    assert capsys.readouterr().err.count("too little memory for its workspace") == 1
    with fake_session(monkeypatch, BESIDE + 16 * MIB):
        torch.mm(a, a)
    assert capsys.readouterr().err.count("earlier in this process, a GPU library got too little") == 1


def test_an_operator_that_went_on_without_memory_is_not_run_again(monkeypatch):
    """If it has caught even the error that is made not to be caught, it may keep to what it did."""
    monkeypatch.setattr(oom_retry, "_done_without", False)
    with fake_session(monkeypatch, BESIDE + 16 * MIB) as (session, _):
        calls = []

        def goes_on():
            calls.append(1)
            raise torch.OutOfMemoryError(f"Tried to allocate 1.00 MiB. {oom_retry.WENT_ON}")

        tensor()
        with pytest.raises(dtrrun.BudgetError):
            session.device.retry.attempt(goes_on, "a library", MIB)
        assert len(calls) == 1
        assert any("another algorithm" in one["text"] for one in session.report()["warnings"])


def test_errors_that_were_seen_are_not_told_of_as_that(monkeypatch, capsys):
    with fake_session(monkeypatch, BESIDE + 16 * MIB) as (session, gpu):
        gpu.workspace["aten::mm"] = 9 * MIB
        kept = chain(30)
        gpu.allocator.before_flush = lambda nbytes: None  # so that requests are refused
        torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        assert session.report()["oom_retries"] > 0
        gpu.workspace["aten::cumsum_"] = 1000 * MIB
        with pytest.raises(torch.OutOfMemoryError):  # not retriable: the program gets the error
            kept[-1].cumsum_(0)
        stepped(session)
        assert correct(kept[:-1])
    assert "too little memory for its workspace" not in capsys.readouterr().err


def test_a_convolution_without_an_engine_has_run_out_of_memory(monkeypatch):
    gpu = FakeGpu()
    real, failing = gpu.kernel, [2]

    def kernel(func, name, *call):
        if name == CONVOLUTION and failing[0]:
            failing[0] -= 1
            raise RuntimeError(f"GET was {NO_ENGINE}")
        return real(func, name, *call)

    monkeypatch.setattr(gpu, "kernel", kernel)
    with fake_session(monkeypatch, BESIDE + 16 * MIB, gpu=gpu) as (session, _):
        x, kept = image(), chain(12)
        found = convolved(x)
        assert session.report()["oom_retries"] == 2
        for _ in range(8):  # now known
            assert torch.equal(convolved(x), found)
        failing[0] = 1
        assert torch.equal(convolved(x), found)
        assert session.report()["oom_retries"] >= 2
        failing[0] = 100
        with pytest.raises(dtrrun.BudgetError):  # it ran before, so memory is what is missing
            convolved(x)
        failing[0] = 100
        with pytest.raises(RuntimeError, match="unable to find an engine"):
            convolved(x[..., 1:])
        assert 100 - failing[0] == 1 + ATTEMPTS
        failing[0] = 0
        assert correct(kept)


def test_a_small_request_looks_among_the_small_blocks(monkeypatch):
    gpu = FakeGpu(allocator=Allocator(**REAL))
    with fake_session(monkeypatch, BESIDE + 60 * MIB, gpu=gpu) as (session, _):
        asked = []
        real = gpu.segments
        monkeypatch.setattr(gpu, "segments", lambda nbytes: asked.append(nbytes) or real(nbytes))
        kept = [torch.ones(1000) for _ in range(4)]
        gpu.allocator.cap = gpu.allocator.reserved
        kept += [torch.ones(MIB // 8) for _ in range(8)]
        assert session.report()["oom_retries"] > 0
        assert asked
        assert max(asked) <= MIB
