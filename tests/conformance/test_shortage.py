"""If the system refuses memory within the budget (`ulimit -d`), other tensors are evicted to make room."""

import os
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.usefixtures("extension"),
    pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux"),
    pytest.mark.skipif(
        "asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer takes address space of its own"
    ),
]

PROGRAM = """
import resource, sys, threading
import torch, torch._dynamo, dtrrun  # the session imports it, which takes more than what is left
from torch import nn

torch.manual_seed(0)
MB = 1 << 20

def training():
    layers = [part for _ in range(16) for part in (nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Tanh())]
    net = nn.Sequential(*layers, nn.Dropout(0.1))
    optimizer = torch.optim.Adam(net.parameters(), foreach=sys.argv[1] == "foreach")
    running = torch.zeros(2048, 256)
    for _ in range(4):
        optimizer.zero_grad()
        out = net(torch.randn(2048, 256))
        running.mul_(0.9).add_(out.detach(), alpha=0.1)
        torch.addcmul(out, out, out).square().mean().backward()
        optimizer.step()
        yield out.detach().double().sum().item().hex()
    yield running.double().sum().item().hex()
    yield sum(p.detach().double().sum().item() for p in net.parameters()).hex()

def program():
    if sys.argv[1] != "threads":
        return list(training())
    found = []
    thread = threading.Thread(target=lambda: found.extend(training()))
    thread.start()
    thread.join()
    return found

def limit(room):
    with open("/proc/self/statm") as file:
        pages = file.read().split()[5]
    resource.setrlimit(resource.RLIMIT_DATA, (int(pages) * 4096 + room, -1))

expected = program()
torch.manual_seed(0)
with dtrrun.budget(1000 * MB, over_budget=sys.argv[3]) as session:
    limit(int(sys.argv[2]) * MB)
    found = program()
    report = session.report()
    print(found == expected, report["evictions"] > 0, report["peak_bytes"] >> 20)
    print(*[(one["reason"], one["to_bytes"] >> 20) for one in report["budget_changes"]])
    resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))
"""


def run(*args, over_budget="error"):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *args, over_budget],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize(
    ("way", "over_budget"), [("tensor by tensor", "error"), ("foreach", "raise"), ("threads", "error")]
)
def test_a_program_goes_on_and_computes_the_same(way, over_budget):
    ran = run(way, "60", over_budget=over_budget)
    first, changes = ran.stdout.splitlines()
    assert first.startswith("True True "), ran.stdout + ran.stderr
    assert int(first.split()[2]) < 100
    assert ran.stderr.count("the system refuses memory that the budget has room for") == 1
    assert (over_budget == "raise") == (0 < changes.count("refused") < 4)
    assert ran.stderr.count("dtrrun: the budget is lowered from ") == changes.count("refused")


def test_with_nothing_to_evict_the_program_gets_pytorch_s_error():
    ran = run("foreach", "4")
    assert "DefaultCPUAllocator: can't allocate memory" in ran.stderr
    assert "dtrrun" not in ran.stderr.splitlines()[-1]
