"""The interposer on a GPU: the same decisions with care, in whichever thread an operator arrives."""

import gc
import random
import sys
import threading

import pytest
import torch
from gpu_programs import DEVICE, HOLLOW, MIB, beside, convnet, forget, mlp, same, train, transformer
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import dtrrun
from dtrrun.runtime.cuda.interposer import CudaInterposer

pytestmark = pytest.mark.usefixtures("gpu")


def inside(make, budget, *, careful=False):
    gc.collect()
    forget()
    with dtrrun.budget(budget, device=DEVICE, cost="model") as session:
        if careful:
            session.callbacks.reasons.add("a test")
        trained = train(make)
        report = session.report()
        assert careful or not session.callbacks.shared  # autograd's thread does not count as the program's
    return trained, [report[name] for name in ("evictions", "rematerializations", "peak_bytes")]


@pytest.mark.parametrize("make", [convnet, mlp, transformer])
def test_decisions_do_not_depend_on_care(make):
    overhead = beside()
    plain, (*_, peak) = inside(make, None)
    budget = overhead + 96 * MIB + int(0.7 * peak)
    decided = inside(make, budget, careful=True)[1]
    trained, found = inside(make, budget)
    assert same(plain, trained)
    assert found[0] > 0
    if HOLLOW:  # on a real one, the limit in the budget depends on what its libraries take
        assert found == decided


def test_steps_stay_out_of_python():
    model, batch = convnet()
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    with dtrrun.budget(None, device=DEVICE) as session:
        for step in range(14):
            if step == 10:  # expensive operators are measured eight times
                before = session._native.python_calls()
            optimizer.zero_grad()
            model(batch()).square().mean().backward()
            optimizer.step()
        after = session._native.python_calls()
    assert {name: after[name] - before[name] for name in after if after[name] != before[name]} == {}


def test_what_has_found_no_memory_runs_again():
    """A random operator does so too, and then draws the same numbers."""
    x = torch.ones(16 * MIB // 4, device=DEVICE)
    torch.manual_seed(3)
    expected = [F.dropout(x).cpu() for _ in range(12)]
    with dtrrun.budget(None, device=DEVICE, cost="model") as session:
        F.dropout(x)
        session.set_budget(session.report()["overhead_bytes"] + 196 * MIB)
        session.device._native.avoid_flushes([])  # so that requests are refused
        session.device.look = lambda **_: None  # as if dtrrun did not know what the allocator will refuse
        session.ledger.set_limit(1 << 40)
        torch.manual_seed(3)
        found = []
        for _ in range(12):
            found.append(F.dropout(x))
            session.ledger.set_limit(1 << 40)
        assert session.report()["oom_retries"] > 0
        equal = [torch.equal(one, other.cpu()) for one, other in zip(expected, found, strict=True)]
        assert all(equal)


def test_another_thread_of_the_programs_takes_turns():
    with dtrrun.budget(None, device=DEVICE) as session:
        x = torch.ones(64, 64, device=DEVICE)
        host = threading.Thread(target=lambda: torch.ones(8) + 1)
        host.start()
        host.join()
        assert not session.callbacks.shared
        other = threading.Thread(target=lambda: x + 1)
        other.start()
        other.join()
        assert session.callbacks.shared
        assert not session.callbacks.reasons.any


def test_what_a_side_stream_makes_stays():
    with dtrrun.budget(None, device=DEVICE, cost="model") as session:
        x = torch.ones(64, 64, device=DEVICE)
        x + 1
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        torch.cuda.current_stream().wait_stream(side)
        assert session.callbacks.version_of(y).pin == "side stream"


def test_attention_with_dropout_keeps_what_it_has_drawn():
    """Two of its results are the state of its generator, on the host."""
    generator = torch.cuda.default_generators[0]
    with dtrrun.budget(None, device=DEVICE, cost="model") as session:
        x = torch.ones(4, 4, 256, 64, device=DEVICE, requires_grad=True) * 1
        for _ in range(3):
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)
        seen = int(attended.grad_fn._saved_philox_offset), generator.get_offset()
        assert "scaled_dot_product" in str(session._native.native_calls())
        version = session.callbacks.version_of(attended)
        session.ledger.begin_pressure()
        assert session.dtr.eviction.evict_if_possible(version)
        attended + 1
        assert session.report()["rematerializations"] == 1
        assert (int(attended.grad_fn._saved_philox_offset), generator.get_offset()) == seen


@pytest.fixture
def hasty():
    """Make threads switch all the time."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def chain(x, length, draw):
    """Compute with shapes that are new nearly every time."""
    for _ in range(length):
        kind = draw.randrange(5)
        if kind < 2:
            x = torch.cat([x, x])[: len(x) + 1] if kind else x.t().contiguous()
        else:
            x = (x.sin, x.exp, x.cos)[kind - 2]()
    return x


def test_operators_of_two_threads_at_once(hasty):
    """Autograd's thread and another that does not wait for it each get the recipes of their own operators."""
    draw, made = random.Random(0), []
    with dtrrun.budget(None, device=DEVICE, cost="model") as session:
        weight = torch.ones(8, 8, device=DEVICE, requires_grad=True)
        (weight * 1).sum().backward()
        assert not session.callbacks.shared
        for _ in range(60):
            y = chain(weight * 1, 60, draw)
            other = threading.Thread(target=y.backward, args=(torch.ones_like(y),))
            other.start()
            kept = [chain(weight.detach(), 60, draw) for _ in range(4)]
            other.join()
            weight.grad = None
            made += [one.operation for one in session.ledger.versions.values() if one.operation is not None]
            del kept  # their recipes are among these
        for operation in made:
            assert operation.signature.operator.described == repr(operation.recorded)


def test_first_calls_are_measured_by_statistics_where_the_allocator_does_not_tell_of_blocks(monkeypatch):
    monkeypatch.setattr(CudaInterposer, "metering", lambda self: 2)
    with dtrrun.budget(None, device=DEVICE) as session:
        x = torch.ones(256, 256, device=DEVICE)
        for n in range(3):
            x[n:] * 2
        found = [one for one in session.callbacks.signatures.all() if one.operator.name == "aten.mul"]
        assert [one.output_bytes for one in found] == [256 << 10, 255 << 10, 254 << 10]
        assert session.interposer.native_calls["aten.mul"] >= 2


def test_steps_in_ample_memory_are_only_counted():
    def run(size, full=False):
        forget()
        peaks = []
        with dtrrun.budget(size, device=DEVICE) as session:
            if full:
                session.interposer.count_only = lambda **_: None
            session.on_step(lambda figures: peaks.append(figures["peak_bytes"]))
            result = train(mlp, steps=6)
            assert session.ledger.counting != full
        return result, peaks

    forget()
    plain = train(mlp, steps=6)
    for size in (None, "4GB"):
        counted, in_full = run(size), run(size, full=True)
        assert same(plain, counted[0])
        assert counted[1] == in_full[1]
