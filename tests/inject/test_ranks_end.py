"""One rank of several ends before the others: of an error about its budget, or of a signal."""

import random
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

SHELL = """
export MASTER_ADDR=localhost MASTER_PORT=$(python -c "
import socket
with socket.socket() as free:
    free.bind(('localhost', 0))
    print(free.getsockname()[1])")
export WORLD_SIZE=2
for rank in 0 1; do RANK=$rank python train.py & done
wait
"""
WAITS = """
import torch, torch.distributed as dist
from datetime import timedelta
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    torch.ones(4 << 20)
dist.distributed_c10d._get_default_store().wait(["never"], timedelta(minutes=4))  # as NCCL does
"""
KILLED = """
import os, signal, sys, threading, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def kill():
    time.sleep(float(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGKILL)
step = 0
while True:
    model(torch.ones(512, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step == 3 and dist.get_rank() == 1:
        threading.Thread(target=kill).start()
"""


@pytest.mark.parametrize("launcher", ["a shell", "torchrun"])
def test_a_budget_that_is_too_small_for_one(launcher, program, dtrrun):
    program("train.py", WAITS)
    words = {
        "a shell": ["bash", program("start.sh", SHELL)],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node=2", "train.py"],
    }[launcher]
    ended = dtrrun("--budget", "1MB", *words)
    assert ended.status == (1 if launcher == "torchrun" else 0)
    found = {process["rank"]: process["status"] for process in ended.processes}
    assert found == {0: "killed", 1: "budget too small"}
    assert ended.report["error"]["rank"] == 1
    assert "budget too small  rank 1: It takes at least 16.8 MB" in ended.err
    told = "error: the budget of rank 1 was too small; rank 0 waited for it, and is ended now"
    assert (told in ended.ours) == (launcher == "a shell")


def test_a_budget_that_is_too_small_for_one_on_another_node(program, plain):
    """The node of rank 0 would wait for it: torchrun ends only the ranks of its own node."""
    program("train.py", WAITS)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    where = f"--nnodes=2 --nproc-per-node=1 --master-addr=localhost --master-port={port}".split()
    start = [sys.executable, "-m", "dtrrun", "--budget", "1MB", "torchrun", *where]
    with ThreadPoolExecutor(2) as pool:
        nodes = [pool.submit(plain, *start, f"--node-rank={node}", "train.py") for node in range(2)]
    first, second = (node.result() for node in nodes)
    assert (first.status, second.status) == (1, 1)
    told = (
        "error: the budget of rank 1 (on another node) was too small; rank 0 waited for it, and is ended now"
    )
    assert told in first.ours
    assert "budget too small" in second.err


def test_one_is_killed_at_any_moment(program, dtrrun):
    """torchrun ends the others. All figures are those of a fraction of a second before."""
    program("train.py", KILLED)
    for moment in random.Random(0).sample(range(1000), 2):
        words = ["torchrun", "--standalone", "--nproc-per-node=2", "train.py", f"{moment / 1000}"]
        ended = dtrrun("--budget", "1MB", *words)
        assert ended.status == 1, ended.err
        found = {process["rank"]: process for process in ended.processes}
        assert found[1]["status"] == "killed"
        assert found[0]["status"] in ("killed", "ended")  # it may notice before it is ended
        for process in found.values():
            assert process["evictions"] > 0
            assert 0 < process["peak_bytes"] <= 1_000_000
            assert process["seconds"]["wall"] > 0


SPAWNED = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp
def train(rank, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        model(torch.ones(512, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
if __name__ == "__main__":
    mp.spawn(train, (os.path.abspath("store"),), 2)
"""


def test_spawned_processes_have_the_ranks_of_their_group(program, dtrrun):
    program("train.py", SPAWNED)
    ended = dtrrun("--budget", "1MB", "train.py")
    assert ended.status == 0, ended.err
    trained = [process for process in ended.processes if process["steps"]]
    assert sorted(process["rank"] for process in trained) == [0, 1]
    assert min(process["waited_share"] for process in trained) >= 0
