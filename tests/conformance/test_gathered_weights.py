"""Weights that FSDP2 gathers and frees: what is computed from them is evicted and recomputed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sharded
import torch
import torch.distributed as dist
from programs import check_stress, in_memory
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dtrrun
from dtrrun.runtime.observe.training_memory import find_training


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A process group of this process alone: FSDP frees and fills its weights all the same."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("program", [*sharded.CHEAP, *sharded.DEAR], ids=lambda one: one.__name__)
def test_with_everything_evicted(program):
    check_stress(program)


@pytest.mark.parametrize("size", [2, 4])
def test_in_several_processes(size, tmp_path):
    """No collective is replayed: the processes would wait for one another."""
    folder = Path(__file__).parent
    paths = os.pathsep.join([str(folder), str(folder.parent.parent)])
    words = [sys.executable, str(folder / "sharded.py"), str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(size)],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        told = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, told, strict=True):
        assert rank.returncode == 0, text


@pytest.mark.usefixtures("alone")
def test_weights_that_change_while_they_are_away():
    """What was computed from the old ones is lost, in place of a mixture of both."""
    with dtrrun.budget(1, over_budget="evict"):
        model = sharded.sharded(*sharded.blocks())
        loss = model(sharded.batch()).sum()
        for weight in model.parameters():
            weight.data.add_(1)
        with pytest.raises(dtrrun.LostError, match="FSDP has freed the weights"):
            loss.backward()


@pytest.mark.usefixtures("alone")
def test_a_model_that_was_sharded_before_the_session():
    torch.manual_seed(0)
    model = sharded.sharded(*sharded.blocks())
    expected = [model(sharded.batch()).sum().item() for _ in range(2)]
    with dtrrun.budget(1, over_budget="evict") as session:
        loss = model(sharded.batch()).sum()
        loss.backward()
        assert [loss.item()] * 2 == expected
        reasons = [row["reason"] for row in session.report()["pinned"]]
        assert "input exposed" not in reasons


@pytest.mark.usefixtures("alone")
def test_freed_weights_are_not_counted_among_the_parameters():
    with dtrrun.budget(None) as session:
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(64, 64, bias=False))))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(8, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        nbytes = 64 * 64 * 4
        rows = {row["reason"]: row["bytes"] for row in session.report()["pinned"]}
        assert rows["parameter"] == nbytes
        assert 2 * nbytes <= rows["optimizer state"] < 3 * nbytes
        assert rows.get("gathered weight", 0) == 0
        own = [one for one in find_training("cpu").parameters if one.shape == (64, 64)]
        assert len(own) == 1


@pytest.mark.usefixtures("alone")
def test_only_what_is_read_meanwhile_stays():
    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inward, self.outward = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            self.kept = torch.sin(self.inward(x))
            return self.outward(torch.tanh(self.kept))

    with dtrrun.budget(1, over_budget="evict"):
        model = fully_shard(nn.Sequential(fully_shard(Looks())))
        y = model(sharded.batch())
        torch.ones(8) * 2  # makes room
        assert in_memory(y)
        assert in_memory(model[0].kept)
        assert not in_memory(y.grad_fn._saved_mat1)  # what `tanh` has made, which only autograd holds


@pytest.mark.usefixtures("alone")
def test_what_only_a_distributed_tensor_refers_to_is_evicted():
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    with dtrrun.budget(1, over_budget="evict") as session:
        block = sharded.Block()
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model = fully_shard(nn.Sequential(fully_shard(block, mesh=mesh["data"])), mesh=mesh["data"])
        y = model(sharded.batch())
        torch.ones(8) * 2  # makes room
        assert in_memory(y)
        assert session.ledger.evicted_bytes >= 64 * 4 * sharded.D * 4  # the activation between the two
