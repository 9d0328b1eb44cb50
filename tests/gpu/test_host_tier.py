"""Weights, gradients and optimizer state leave a GPU for pinned memory: same bits in less than they take."""

import pytest
import torch
from gpu_programs import DEVICE, MIB, forget
from torch import nn

import dtrrun

pytestmark = pytest.mark.usefixtures("gpu")

DEPTH, WIDTH = 8, 1024
STATE = 4 * DEPTH * (WIDTH * WIDTH + WIDTH) * 4
KINDS = {"each": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def program(**kind):
    torch.manual_seed(3)
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **kind)
    losses = []
    for _ in range(3):
        inputs = torch.randn(64, WIDTH, device=DEVICE)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    state = [value for p in model.parameters() for value in (p.detach(), *optimizer.state[p].values())]
    return [one.cpu() for one in (*losses, *state)]


def budget_for(tensors, **kind):
    """Return a budget with room for so many bytes of tensors, and the program's result without one."""
    with dtrrun.budget(None, device=DEVICE) as session:
        expected = program(**kind)
        overhead = session.report()["overhead_bytes"]
    kept = torch.cuda.memory_allocated()  # by cuBLAS
    forget()
    return overhead + kept + 64 * MIB + tensors + 32 * MIB, expected


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_does_not_fit(kind):
    budget_bytes, expected = budget_for(STATE // 3, **KINDS[kind])
    torch.cuda.reset_peak_host_memory_stats()
    with dtrrun.budget(budget_bytes, DEVICE, verify=True, host_budget="500MB") as session:
        found = program(**KINDS[kind])
        report = session.report()
    assert all(map(torch.equal, found, expected))
    assert report["mismatches"] == []
    assert report["verified"] > 0
    assert report["footprint_peak_bytes"] <= budget_bytes
    assert report["peak_bytes"] < STATE
    assert min(report["copies_out"], report["copies_in"]) > 0
    assert report["host_peak_bytes"] <= report["host_budget_bytes"] == 500_000_000
    assert 0 < torch.cuda.host_memory_stats()["allocated_bytes.peak"] <= 500_000_000  # pinned


def test_a_script_trains_where_it_would_end_and_says_so(capfd):
    """Half of the host's memory is there for it, unless the user forbids it."""
    budget_bytes, _ = budget_for(STATE // 2, fused=True)
    with (
        pytest.raises(dtrrun.BudgetError, match="--host-budget"),
        dtrrun.budget(budget_bytes, DEVICE, host_budget="none"),
    ):
        program(fused=True)
    forget()
    with dtrrun.budget(budget_bytes, DEVICE) as session:
        program(fused=True)
        assert session.report()["left_peak_bytes"] > 0
    said = [line for line in capfd.readouterr().err.splitlines() if "pinned memory" in line]
    assert len(said) == 1
