"""The processes of a target that run under the budget: those that may train, not their helpers."""

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from modes import MODES

LOADER = (
    MODES
    + """
import sys, torch
from torch.multiprocessing import get_context, start_processes
from torch.utils.data import DataLoader, Dataset, get_worker_info
class Modes(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        assert get_worker_info() is not None
        return torch.full((2,), float(len(modes())))
def train(rank, queue):
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], 0.1)
    for _ in range(3):
        weight.square().sum().backward()
        optimizer.step()
    queue.put(modes())
if __name__ == "__main__":
    method = sys.argv[1]
    loader = DataLoader(Modes(), num_workers=1, batch_size=2, multiprocessing_context=method)
    print("loader", torch.cat(list(loader)).sum().item())
    queue = get_context(method).SimpleQueue()
    children = start_processes(train, (queue,), join=False, start_method=method)
    print("child", queue.get())
    while not children.join():
        pass
    print("parent", modes(), children.processes[0].exitcode)
"""
)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader_workers_are_left_alone_and_other_children_are_not(program, dtrrun, method):
    program("train.py", LOADER)
    ended = dtrrun("--budget", "1GB", "train.py", method)
    assert (ended.status, ended.out) == (0, "loader 0.0\nchild ['dtrrun']\nparent ['dtrrun'] 0\n"), ended.err
    assert sorted(process["steps"] for process in ended.processes) == [0, 3]
    assert [process["status"] for process in ended.processes] == ["ended", "ended"]
    assert "os.fork()" not in ended.err  # the warning for a child that trains without a budget


def test_a_subprocess_trains_under_the_budget(program, dtrrun):
    program("child.py", f"import torch{MODES}\nprint('child', modes(), flush=True)")
    program("parent.py", "import subprocess, sys\nsubprocess.run([sys.executable, 'child.py'], check=True)\n")
    ended = dtrrun("--budget", "1GB", "parent.py")
    assert (ended.status, ended.out, len(ended.processes)) == (0, "child ['dtrrun']\n", 1)


DISTRIBUTED = (
    MODES
    + """
import torch, torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 16), torch.randn(32, 1))
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data), num_workers=1):
        optimizer.zero_grad()
        loss = (model(x.repeat(500, 1)) - y.repeat(500, 1)).square().mean()
        loss.backward()
        optimizer.step()
    torch.distributed.barrier()
    with open(f"rank{rank}", "w") as file:
        print(loss.item().hex(), *[p.sum().item().hex() for p in model.parameters()], file=file)
        print(modes(), file=file)
    torch.distributed.destroy_process_group()
"""
)


def test_torchrun_with_ddp_and_data_loader_workers(program, plain, dtrrun, tmp_path):
    program("train.py", DISTRIBUTED)
    words = ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py"]
    assert plain(*words).status == 0
    without = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in range(2)]
    ended = dtrrun("--budget", "2MB", *words)
    assert ended.status == 0, ended.err
    found = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in range(2)]
    assert [lines[0] for lines in found] == [lines[0] for lines in without]
    assert [lines[1] for lines in found] == ["['dtrrun']"] * 2
    assert sorted(process["rank"] for process in ended.processes) == [0, 1]  # no agent and no worker
    assert all(process["steps"] == 2 and process["evictions"] > 0 for process in ended.processes)


SHARDED = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [layer for _ in range(12) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
parts = [torch.nn.Sequential(*layers[place : place + 6]) for place in range(0, 24, 6)]
model = torch.nn.Sequential(*map(fully_shard, parts))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for _ in range(2):
    model(torch.randn(2000, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(*[weight.to_local().sum().item().hex() for weight in model.parameters()])
dist.destroy_process_group()
"""


def test_two_nodes(program, plain, tmp_path):
    """Each has a launcher and a report of its own. Here, both are on this machine."""
    program("train.py", SHARDED)

    def run(*before):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        where = f"--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=localhost:{port}"
        with ThreadPoolExecutor(2) as pool:
            nodes = [
                pool.submit(
                    plain, *(word.format(node) for word in before), "torchrun", *where.split(), "train.py"
                )
                for node in range(2)
            ]
        ended = [node.result() for node in nodes]
        assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
        return sorted(one.out for one in ended)

    expected = run()
    found = run(sys.executable, "-m", "dtrrun", "--budget", "5MB", "--json", str(tmp_path / "node{}.json"))
    assert found == expected
    reports = [json.loads((tmp_path / f"node{node}.json").read_text()) for node in range(2)]
    assert sorted(process["rank"] for report in reports for process in report["processes"]) == [0, 1]
    assert all(report["evictions"] > 0 and report["peak_bytes"] <= 5_000_000 for report in reports)


def test_a_child_of_os_fork_that_trains_is_told_of(program, dtrrun):
    program(
        "fork.py",
        "import os, torch\n"
        "weight = torch.nn.Parameter(torch.ones(8))\n"
        "optimizer = torch.optim.SGD([weight], 0.1)\n"
        "def child(trains):\n"
        "    if (pid := os.fork()) == 0:\n"
        "        for _ in range(3):\n"
        "            weight.sum().backward()\n"
        "            if trains:\n"
        "                optimizer.step()\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    return pid\n"
        "child(trains=False)\n"
        "print(child(trains=True))\n"
        "optimizer.step()\n",
    )
    ended = dtrrun("--budget", "1GB", "fork.py")
    assert [line for line in ended.err.splitlines() if "os.fork()" in line] == [
        f"dtrrun: warning: process {int(ended.out)}, a child made by os.fork(), trains without a budget; "
        "children of multiprocessing, subprocess and torchrun get their own"
    ]
