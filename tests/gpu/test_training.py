"""The same bits as a plain run, within what the driver shows."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_programs import (
    DEVICE,
    HOLLOW,
    MIB,
    MODELS,
    beside,
    budget_for,
    convnet,
    forget,
    mlp,
    recurrent_dropout,
    same,
    train,
    transformer,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

import dtrrun

pytestmark = pytest.mark.usefixtures("gpu")


def used():
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("make", MODELS)
def test_bit_for_bit(make):
    plain = train(make)
    assert same(plain, train(make)), "the program itself does not repeat"
    budget, counted = budget_for(make, 0.6)
    assert same(plain, counted)
    forget()
    with dtrrun.budget(budget, device=DEVICE, verify=True) as session:
        found = train(make)
        report = session.report()
    assert report["evictions"] > 0
    assert session.report()["mismatches"] == []
    assert same(plain, found)
    assert report["reserved_bytes"] + report["overhead_bytes"] <= report["footprint_peak_bytes"] <= budget


@pytest.fixture
def alone():
    """A process group of this process alone: FSDP gathers, frees and reduces all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded():
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)) for _ in range(6)]
    model = nn.Sequential(*blocks).to(DEVICE)
    for block in model:
        fully_shard(block)
    return fully_shard(model), lambda: torch.randn(1 << 14, 128, device=DEVICE)


@pytest.mark.usefixtures("alone")
def test_sharded_with_streams_of_its_own_for_collectives():
    plain = train(sharded)
    budget, counted = budget_for(sharded, 0.6)
    assert same(plain, counted)
    forget()
    with dtrrun.budget(budget, device=DEVICE, verify=True) as session:
        found = train(sharded)
        report = session.report()
    assert report["evictions"] > 0
    assert report["rematerializations"] > 0
    assert session.report()["mismatches"] == []
    assert same(plain, found)


class Scaled(nn.Module):
    def forward(self, x):
        return x * torch.tensor([0.9], device=x.device)


def compiled():
    layers = [part for _ in range(12) for part in (nn.Linear(128, 128), nn.GELU(), Scaled())]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    model.compile(backend="aot_eager")
    return model, lambda: torch.randn(1 << 14, 128, device=DEVICE)


def test_what_is_compiled_makes_tensors_on_the_gpu():
    plain = train(compiled)
    budget, counted = budget_for(compiled, 0.7)
    assert same(plain, counted)
    forget()
    with dtrrun.budget(budget, device=DEVICE) as session:
        torch._dynamo.reset()  # it is compiled inside the budget
        assert same(plain, train(compiled))
    assert session.report()["evictions"] > 0


@pytest.mark.skipif(not HOLLOW, reason="only there, the host can write to a GPU's memory")
def test_other_bits_are_named():
    with dtrrun.budget("1GB", device=DEVICE, verify=True) as session:
        x = torch.ones(1000, device=DEVICE)
        results = [x * 2 for _ in range(3)]
        versions = [session.callbacks.version_of(one) for one in results]
        ctypes.memset(versions[1].memory().data_ptr() + 400, 1, 1)
        for one in versions:
            assert session.dtr.eviction.evict_if_possible(one)
        del one, versions
        sum(results)
        report = session.report()
    assert report["verified"] == 3
    assert report["mismatches"] == [{"operator": "aten.mul", "bytes": 4096, "count": 1}]


def test_fingerprints_take_no_memory_when_it_is_short():
    budget = beside() + 250 * MIB
    with dtrrun.budget(budget, device=DEVICE, verify=True) as session:
        before = torch.cuda.memory_allocated()
        x = torch.randn(24 * MIB // 4, device=DEVICE)
        own = torch.cuda.memory_allocated() - before - x.nbytes  # from the beginning
        assert 16 * MIB < own < 20 * MIB
        refused = torch.cuda.memory_stats()["num_ooms"]
        torch.cuda.reset_peak_memory_stats()
        kept = [x * n for n in range(12)]
        sum(one.sum() for one in kept)
        assert torch.cuda.memory_stats()["num_ooms"] == refused
        report = session.report()
        assert torch.cuda.max_memory_allocated() - before <= own + report["peak_bytes"] + 4096
    assert report["verified"] >= 6
    assert report["verified"] == report["rematerializations"]


def test_fingerprints_are_not_waited_for_in_a_capture():
    with dtrrun.budget("1GB", device=DEVICE, verify=True) as session:
        x = torch.ones(1000, device=DEVICE)
        y = x * 2
        assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(y))
        y + 0
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            x * 3
            assert session.report()["verified"] == 0
        assert session.report()["verified"] == 1


@pytest.mark.parametrize("make", [transformer, mlp])
def test_bf16_and_a_fused_optimizer(make):
    options = {"autocast": True, "fused": True}
    budget, plain = budget_for(make, 0.6, **options)
    with dtrrun.budget(budget, device=DEVICE) as session:
        found = train(make, **options)
        assert session.report()["evictions"] > 0
    assert same(plain, found)


def test_the_device_shows_no_more_than_the_budget():
    """Holds if the program is alone on the device: sampled at every operator."""
    budget, _ = budget_for(convnet, 0.5)
    torch.cuda.empty_cache()
    others = used()
    with dtrrun.budget(budget, device=DEVICE) as session:
        train(convnet, steps=2)
        torch.cuda.synchronize()
        others -= session.report()["overhead_bytes"]
        seen = []
        look = session.device.look
        session.device.look = lambda **how: (look(**how), seen.append(used()))
        session.callbacks.reasons.add("test")
        train(convnet, steps=4)
    assert seen
    assert max(seen) - max(others, 0) <= budget


def test_dropout_draws_what_it_drew():
    torch.manual_seed(5)
    x = torch.ones(4096, 1024, device=DEVICE)
    expected = [torch.nn.functional.dropout(x).cpu() for _ in range(12)]
    torch.manual_seed(5)
    with dtrrun.budget(None, device=DEVICE) as session:
        overhead = (x[0].sum(), session.report()["overhead_bytes"])[1]
    with dtrrun.budget(overhead + (64 + 64 + 22 + 96) * 2**20, device=DEVICE) as session:
        found = [torch.nn.functional.dropout(x) for _ in range(12)]
        assert session.report()["evictions"] > 0
        assert all(torch.equal(one, other.cpu()) for one, other in zip(expected, found, strict=True))
        assert torch.cuda.default_generators[0].get_offset() > 0


def test_a_recurrent_layers_own_dropout_goes_on_where_it_was():
    """A replay that set the generator would make cuDNN start again, with a new random seed."""
    budget, plain = budget_for(recurrent_dropout, 0.5)
    with dtrrun.budget(budget, device=DEVICE) as session:
        found = train(recurrent_dropout)
        rows = session.report()["operators"]
    assert any(row["name"] == "aten.native_dropout" and row["rematerializations"] for row in rows)
    assert same(plain, found)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_that_pins_is_no_reason_for_care(workers):
    """The workers are forked from a process that has used CUDA; the loader's thread pins on the host."""
    data = torch.utils.data.TensorDataset(torch.ones(64, 64))
    loader = torch.utils.data.DataLoader(data, 8, num_workers=workers, pin_memory=True)
    with dtrrun.budget(None, device=DEVICE) as session:
        weight = torch.ones(64, 64, device=DEVICE)
        found = [(x.to(DEVICE, non_blocking=True) @ weight).sum().item() for (x,) in loader]
        assert not session.callbacks.reasons.any
        assert session.running
    assert found == [8 * 64 * 64] * 8


@pytest.mark.parametrize("mib", [32, 128])
def test_a_convolution_gets_its_workspace_inside_a_tight_budget(mib, monkeypatch, capsys):
    """Without it, cuDNN would use another algorithm, with other bits. On a GPU, cuDNN decides its size."""
    monkeypatch.setenv("HOLLOW_WORKSPACE", str(mib << 20))
    budget, plain = budget_for(convnet, 0.4)
    forget()
    with dtrrun.budget(budget, device=DEVICE):
        found = train(convnet)
    assert same(plain, found)
    assert "may have used another algorithm" not in capsys.readouterr().err  # in an earlier test, it may


def test_costs_are_read_without_waiting(monkeypatch):
    def waited(*_):
        raise AssertionError("the program was synchronised")

    with dtrrun.budget(None, device=DEVICE) as session:
        a = torch.randn(2048, 2048, device=DEVICE)
        monkeypatch.setattr(torch.cuda, "synchronize", waited)
        monkeypatch.setattr(torch.cuda.Event, "synchronize", waited)
        for _ in range(20):
            a @ a
        monkeypatch.undo()
        torch.cuda.synchronize()
        for _ in range(2):
            session.interposer.native.read_times()
        timed = [one for one in session.callbacks.signatures.all() if one.operator.name == "aten.mm"]
        assert HOLLOW or timed[0].timed  # a GPU without work waits for the host, whose time that is then
        assert timed[0].cost
        assert HOLLOW or timed[0].cost > 20_000  # ns: 17 GFLOP take longer than a launch


@pytest.mark.skipif(HOLLOW, reason="needs NCCL")
def test_ddp_with_nccl(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(DDP)
    ranks = str(min(torch.cuda.device_count(), 2))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    plain = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=240)
    assert plain.returncode == 0, plain.stderr[-2000:]
    dtrrun_ = [sys.executable, "-m", "dtrrun", "--device", "cuda", "--budget", "1800MB", "--quiet"]
    found = subprocess.run(
        [*dtrrun_, *torchrun, str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert found.returncode == 0, found.stderr[-8000:]
    assert sorted(found.stdout.splitlines()) == sorted(plain.stdout.splitlines())


DDP = """
import os, torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.use_deterministic_algorithms(True)
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
torch.manual_seed(1)
model = nn.Sequential(*[part for _ in range(16) for part in (nn.Linear(1024, 1024), nn.GELU())]).cuda()
model = DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(5):
    optimizer.zero_grad()
    loss = model(torch.randn(8192, 1024, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    print(rank, step, loss.item().hex(), flush=True)
dist.destroy_process_group()
"""
