"""cuDNN's convolutions take another algorithm if they are refused memory: the same bits, or an error."""

import gc
from contextlib import suppress

import pytest
import torch
from gpu_programs import DEVICE, HOLLOW, MIB, beside, tensor
from test_memory import SPACE
from torch import nn

import dtrrun
from dtrrun.runtime.cuda import oom_retry

pytestmark = [
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(not HOLLOW, reason="needs python -m tests.hollow, with its workspaces"),
]

WORKSPACE = 32 * MIB  # tests/hollow/cudnn.c


def convnet(size):
    """Train one step; return the gradients."""
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    model = nn.Sequential(*layers).to(DEVICE)
    model(torch.randn(4, 3, size, size, device=DEVICE)).square().mean().backward()
    return [one.grad.cpu() for one in model.parameters()]


@pytest.mark.parametrize("path", ["fast", "slow"])
def test_without_room_for_the_workspace_nothing_is_computed(path):
    plain = convnet(40)
    short, errors = beside() + SPACE + WORKSPACE, 0
    for budget in range(short, short + 3 * WORKSPACE, WORKSPACE // 2):
        torch.cuda.empty_cache()
        with dtrrun.budget(budget, device=DEVICE) as session:
            if path == "slow":
                session.callbacks.reasons.add("a test")
            try:
                assert all(map(torch.equal, plain, convnet(40)))
            except dtrrun.BudgetError:
                errors += 1
            assert session.report()["warnings"] == []
        gc.collect()
    assert 0 < errors < 6
    assert all(map(torch.equal, plain, convnet(40)))  # no algorithm was kept


def test_a_replay_without_room_for_the_workspace_is_an_error():
    image, weight = torch.randn(4, 3, 41, 41, device=DEVICE), torch.randn(8, 3, 3, 3, device=DEVICE)
    expected = nn.functional.conv2d(image, weight).cpu()
    total = torch.cuda.mem_get_info()[1]
    with dtrrun.budget(beside() + SPACE + 150 * MIB, device=DEVICE) as session:
        made = nn.functional.conv2d(image, weight)
        session.dtr.eviction.release(1 << 40)
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        try:
            with pytest.raises(dtrrun.BudgetError):
                made.sum()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        session.device.look()
        assert torch.equal(made.cpu(), expected)
        assert session.report()["warnings"] == []


def test_over_the_budget_the_bits_are_the_same():
    plain = convnet(42)
    torch.cuda.empty_cache()
    with dtrrun.budget(beside() + SPACE, device=DEVICE, over_budget="warn") as session:
        assert all(map(torch.equal, plain, convnet(42)))
        assert any("is exceeded" in one["text"] for one in session.report()["warnings"])


def test_a_benchmark_takes_what_there_is_room_for(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(oom_retry, "_done_without", False)
    with dtrrun.budget(beside() + SPACE + 3 * WORKSPACE // 2, device=DEVICE) as session:
        convnet(43)
        tensor()
        session.device.look()
        assert any("another algorithm" in one["text"] for one in session.report()["warnings"])
    with dtrrun.budget(None, device=DEVICE) as session:
        tensor()
        assert any("earlier in this process" in one["text"] for one in session.report()["warnings"])


def test_a_library_that_went_on_is_found_out(monkeypatch):
    monkeypatch.setattr(oom_retry, "_done_without", False)
    with dtrrun.budget(beside() + SPACE + 20 * MIB, device=DEVICE) as session:
        tensor()

        def goes_on():
            with suppress(RuntimeError):
                torch.UntypedStorage(1 << 30, device=DEVICE)

        native = session.interposer.native
        with pytest.raises(torch.OutOfMemoryError, match=oom_retry.WENT_ON):
            native.with_state(native.present_state(True, False), goes_on, True)
        native.with_state(native.present_state(True, False), goes_on, False)  # not PyTorch's own
