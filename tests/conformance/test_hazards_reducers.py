"""Collectives talk to other processes: they run when the program calls them, and never again."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from programs import chain, check_stress
from torch import nn

import dtrrun


@pytest.fixture
def alone(tmp_path):
    """A process group of one, whose collectives return their inputs."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def program():
    kept = []
    for step in range(4):
        x = torch.sin(torch.randn(64, 32) + step)
        dist.all_reduce(x)
        y = functional.wait_tensor(functional.all_reduce(x * 2, "sum", [0]))
        parts = [torch.empty(64, 32)]
        dist.all_gather(parts, y)
        kept += [x, y, *parts, *chain(y, 2)[1:]]
    random.seed(7)  # PyTorch's distributed code uses this generator
    return kept


@pytest.mark.filterwarnings("ignore")
def test_collectives_run_once(alone):
    check_stress(program)
    with dtrrun.budget(1, over_budget="evict") as session:
        program()
        recomputed = {operator["name"] for operator in session.report()["operators"]}
    assert recomputed, "nothing was recomputed: the test does not bite"
    assert not [name for name in recomputed if "c10d" in name]


@pytest.mark.filterwarnings("ignore")
def test_waiting_takes_no_memory(alone):
    with dtrrun.budget("2.5MB") as session:
        x = torch.ones(1 << 18)
        assert functional.wait_tensor(functional.all_reduce(x, "sum", [0])).sum() == 1 << 18
        assert session.report()["peak_bytes"] < 2_200_000


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("view", [False, True])
def test_a_reducers_buckets_stay(alone, view):
    def training():
        torch.manual_seed(2)
        plain_model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
        model = nn.parallel.DistributedDataParallel(plain_model, gradient_as_bucket_view=view)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(model(torch.randn(64, 32)).square().mean())
            losses[-1].backward()
            optimizer.step()
        random.seed(7)
        return losses, plain_model, optimizer

    check_stress(training)
