"""Memory that libraries do without, and the real allocator's pages, on a fake GPU that is as strict."""

import pytest
import torch
from fake_gpu import FakeGpu, fake_session, stepped
from fake_growing import PAGE, Growing

import dtrrun
from dtrrun.runtime.relief import NO_ENGINE
from dtrrun.runtime.shares import LEAST_GUARD, MIB

CONTEXT = 300 * MIB
BESIDE = CONTEXT + LEAST_GUARD
CONVOLUTION = "aten::convolution"


def tensor(mib=4):
    return torch.ones(mib * MIB // 4)


def chain(length, mib=4):
    kept = [tensor(mib)]
    for _ in range(length):
        kept.append(kept[-1].mul(2.0))
    return kept


def correct(kept):
    return all(bool((one == 2.0**step).all()) for step, one in enumerate(kept))


def growing():
    gpu = FakeGpu()
    gpu.allocator = Growing()
    return gpu


def image():
    return torch.ones(1, 1, 512, 512)  # 1 MiB


WEIGHT = torch.ones(1, 1, 3, 3)


def convolved(x):
    return torch.nn.functional.conv2d(x, WEIGHT, padding=1)


def test_a_cap_that_a_page_exceeds_costs_no_flush_at_every_look(monkeypatch):
    gpu = growing()
    with fake_session(monkeypatch, BESIDE + 110 * MIB, gpu=gpu) as (session, _):
        kept = [tensor(10) for _ in range(8)]
        del kept[::2]
        kept.append(tensor(30))  # into none of the holes: 40 MiB more are mapped
        stepped(session)
        cap = session.report()["cap_bytes"]
        assert cap < gpu.allocator.reserved_peak <= cap + PAGE
        assert gpu.allocator.emptied == 0
        assert gpu.context + gpu.allocator.reserved_peak <= BESIDE + 110 * MIB


def test_a_library_gets_its_workspace_from_the_first_call_on(monkeypatch, capsys):
    gpu = FakeGpu()
    gpu.library[CONVOLUTION] = 2 * MIB  # as much as it copies of its input and output
    with fake_session(monkeypatch, BESIDE + 16 * MIB, gpu=gpu) as (session, _):
        x = image()
        kept = chain(12, 1)
        assert session.report()["evictions"] > 0
        for _ in range(4):
            convolved(x)
        assert gpu.did_without == []
        signature = next(s for s in session.device._young.values() if s.operator.name == "aten.convolution")
        assert (signature.output_bytes, signature.workspace) == (3 * MIB, 2 * MIB)
        assert correct(kept)
    assert "did without" not in capsys.readouterr().err


def test_a_replay_without_room_for_the_workspace_does_without(monkeypatch, capsys):
    """Rather that than an end: the library can, and it is told of."""
    gpu = FakeGpu()
    gpu.library[CONVOLUTION] = 8 * MIB
    with fake_session(monkeypatch, BESIDE + 16 * MIB, gpu=gpu) as (session, _):
        x = image()
        made = [convolved(x), convolved(x)]
        expected = made[0].sum().item()
        record = session.careful.record_of(made[0])
        session.ledger.make_room(session.ledger.limit, "everything")
        assert not record.resident
        pinned = [tensor(1) for _ in range(9)]
        for one in pinned:
            session.pin(one)
        assert gpu.did_without == []
        assert made[0].sum().item() == expected
        assert gpu.did_without == [CONVOLUTION]
        stepped(session)
        made.clear()
    assert "did without" in capsys.readouterr().err


def test_what_a_first_call_tried_is_not_kept_as_workspace(monkeypatch):
    gpu = FakeGpu()
    gpu.library[CONVOLUTION] = 6 * MIB  # with `cudnn.benchmark`: the largest of all that are tried
    with fake_session(monkeypatch, BESIDE + 32 * MIB, gpu=gpu) as (session, _):
        x = image()
        chain(30, 1)
        assert session.ledger.pressure
        convolved(x)
        gpu.library[CONVOLUTION] = 2 * MIB
        convolved(x)
        signature = next(s for s in session.device._young.values() if s.operator.name == "aten.convolution")
        assert (signature.output_bytes, signature.workspace) == (3 * MIB, 2 * MIB)


def test_a_library_gets_its_workspace_although_there_are_holes(monkeypatch):
    """Bytes enough are free, but in holes: nobody would be told, if the library were left to find out."""
    gpu = FakeGpu()
    gpu.library[CONVOLUTION] = 3 * MIB
    with fake_session(monkeypatch, BESIDE + 40 * MIB, gpu=gpu) as (session, _):
        x = image()
        results = [convolved(x), convolved(x)]
        chain(40, 1)
        filler = torch.ones(30 * MIB // 4)
        del filler
        kept = chain(26, 1)
        gpu.allocator.cap = gpu.allocator.reserved
        del kept[1::2]  # holes of 1 MiB
        for _ in range(12):
            results.append(convolved(x))
        gpu.allocator.cap = None
        assert gpu.did_without == []
        assert session.report()["oom_retries"] > 0
        assert all(torch.equal(one, results[0]) for one in results)


def test_a_first_workspace_is_provided_as_one_block(monkeypatch):
    """That as many bytes are free does not make them one."""
    gpu = FakeGpu()
    with fake_session(monkeypatch, BESIDE + 16 * MIB, gpu=gpu) as (session, _):
        x, kept = image(), chain(30, 1)
        provided = []
        monkeypatch.setattr(session.device.relief, "provide", provided.append)
        convolved(x)
        assert [(made, beside // MIB) for made, beside in provided] == [(MIB, 2)]
        assert correct(kept)


def test_a_library_that_does_without_is_told_of(monkeypatch, capsys):
    gpu = FakeGpu()
    gpu.library["aten::mm"] = 100 * MIB  # of an operator of which we do not know it
    with fake_session(monkeypatch, BESIDE + 16 * MIB, gpu=gpu) as (session, _):
        a = torch.ones(512, 512)
        torch.mm(a, a)
        stepped(session)
        assert gpu.did_without == ["aten::mm"]
    assert capsys.readouterr().err.count("did without") == 1


def test_errors_that_were_seen_are_not_told_of_as_that(monkeypatch, capsys):
    gpu = FakeGpu()
    gpu.workspace["aten::mm"] = 9 * MIB
    with fake_session(monkeypatch, BESIDE + 16 * MIB, gpu=gpu) as (session, _):
        kept = chain(30, 1)
        torch.mm(torch.ones(512, 512), torch.ones(512, 512))
        assert session.report()["oom_retries"] > 0
        gpu.workspace["aten::cumsum_"] = 1000 * MIB
        with pytest.raises(torch.OutOfMemoryError):  # not one that is tried again: the program's affair
            kept[-1].cumsum_(0)
        stepped(session)
        assert correct(kept[:-1])
    assert "did without" not in capsys.readouterr().err


def test_a_convolution_without_an_engine_has_run_out_of_memory(monkeypatch):
    gpu = FakeGpu()
    real, failing = gpu.kernel, [2]

    def kernel(func, name, args, kwargs):
        if name == CONVOLUTION and failing[0]:
            failing[0] -= 1
            raise RuntimeError(f"GET was {NO_ENGINE}")
        return real(func, name, args, kwargs)

    monkeypatch.setattr(gpu, "kernel", kernel)
    with fake_session(monkeypatch, BESIDE + 16 * MIB, gpu=gpu) as (session, _):
        x, kept = image(), chain(12, 1)
        found = convolved(x)
        assert session.report()["oom_retries"] == 2
        for _ in range(8):  # now by the short cut
            assert torch.equal(convolved(x), found)
        failing[0] = 1
        assert torch.equal(convolved(x), found)
        assert session.report()["oom_retries"] >= 2
        failing[0] = 100
        with pytest.raises(dtrrun.BudgetError):  # it ran before: what is lacking is memory
            convolved(x)
        with pytest.raises(RuntimeError, match="unable to find an engine"):
            convolved(x[..., 1:])
        failing[0] = 0
        assert correct(kept)


def test_a_workspace_that_was_guessed_is_asked_for_no_longer(monkeypatch):
    gpu = FakeGpu()
    with fake_session(monkeypatch, BESIDE + 16 * MIB, gpu=gpu) as (session, _):
        x = image()
        convolved(x)
        signature = next(s for s in session.device._young.values() if s.operator.name == "aten.convolution")
        assert (signature.output_bytes, signature.workspace) == (MIB, 0)
        for _ in range(10):
            convolved(x)
        assert signature in session.careful.signatures.values()


def test_a_small_request_asks_for_a_hole_among_the_small(monkeypatch):
    gpu = growing()
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
