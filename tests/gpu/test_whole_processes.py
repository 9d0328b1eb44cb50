"""Whole processes, each on its own GPU (tests/hollow only): without NVML, next to another, at exit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_programs import HOLLOW

pytestmark = pytest.mark.skipif(not HOLLOW, reason="needs python -m tests.hollow")
ROOT = Path(__file__).parents[2]

TRAINS = """
import os, torch
print(os.environ.get("PYTORCH_ALLOC_CONF"))
weights = [torch.full((256, 256), 0.01, device="cuda", requires_grad=True) for _ in range(12)]
optimizer = torch.optim.SGD(weights, 0.1)
for step in range(3):
    x = torch.ones(8192, 256, device="cuda")
    for one in weights:
        x = (x @ one).tanh()
    optimizer.zero_grad()
    x.square().mean().backward()
    optimizer.step()
print(float(sum(one.double().sum() for one in weights)).hex())
"""

NEIGHBOUR = """
import sys, torch
held = torch.empty(400 << 20, dtype=torch.uint8, device="cuda")
print("has 400 MiB", flush=True)
sys.stdin.read()
"""

BESIDE = """
import subprocess, sys, torch
import dtrrun

def step(weights):
    x = torch.randn(8192, 128, device="cuda")
    for one in weights:
        x = torch.tanh(x @ one)
    x.square().mean().backward()

torch.cuda.init()
weights = [torch.randn(128, 128, device="cuda", requires_grad=True) for _ in range(16)]
with dtrrun.budget(None, device="cuda") as session:
    step(weights)
    overhead = session.report()["overhead_bytes"]
with dtrrun.budget(overhead + (150 << 20), device="cuda") as session:
    step(weights)
    before = session.report()["overhead_bytes"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen([sys.executable, "-c", sys.argv[1]], **pipes)
    print(other.stdout.readline().strip())
    for _ in range(6):
        step(weights)
    report = session.report()
    other.communicate("")
print(report["overhead_bytes"] - before, report["evictions"] > 0)
"""


ENDS = """
import sys, torch, dtrrun
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
weights = [torch.randn(32, 96, device="cuda", requires_grad=True) for _ in range(4)]
with dtrrun.budget(None, device="cuda"):
    for _ in range(4):
        x = torch.randn(2, 4, 64, 32, device="cuda")
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # a context variable, which backward keeps
            for one in weights:
                q, k, v = (x @ one).tanh().chunk(3, -1)
                x = F.scaled_dot_product_attention(q, k, v) + x
        x.square().mean().backward()
"""


def hollow(*command, nvml=True, **environ):
    """Run a command on its own GPU. Return its lines of output, and stderr."""
    options = [] if nvml else ["--no-nvml"]
    hidden = {"LD_PRELOAD", "LD_LIBRARY_PATH", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hollow", *options, *command],
        env={name: text for name, text in os.environ.items() if name not in hidden} | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines(), done.stderr


NO_CACHING = """
import torch, dtrrun
with dtrrun.budget("200MB", device="cuda") as session:
    kept = [torch.nn.Parameter(torch.ones(5 << 20, device="cuda")) for _ in range(7)]  # 147 MB
    (kept[0] * 2).sum().item()
    report = session.report()
print(report["overhead_bytes"], report["evictions"], *(one["text"] for one in report["warnings"]))
"""


def test_without_pytorchs_cache_tensors_alone_count():
    """As with any allocator that has no statistics. They would count twice, as tensors and as overhead."""
    (said,), told = hollow(sys.executable, "-c", NO_CACHING, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    assert said.startswith("0 0 the program's CUDA allocator has no statistics")
    assert told.count("no statistics") == 1


def test_a_gpu_is_used_though_nvml_does_not_answer(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(TRAINS)
    (_, plain), _ = hollow(sys.executable, str(program))
    budget = [sys.executable, "-m", "dtrrun", "--budget", "760MB"]
    for nvml in (True, False):
        (settings, found), told = hollow(*budget, str(program), nvml=nvml)
        assert found == plain
        assert "on cuda:0" in told
        # Without NVML, PyTorch crashes with expandable segments.
        assert ("expandable_segments:True" in settings) == nvml


REFUSED = """
import torch, dtrrun
try:
    with dtrrun.budget("400MB", device="cuda") as session:  # less than the context takes
        torch.nn.Linear(1000, 1000).cuda()
except dtrrun.BudgetError:
    print(all(time >= 0 for name, time in session.report().items() if name.endswith("_ns")))
"""


def test_the_time_of_an_operator_that_was_refused_is_counted():
    """What its first call imports is taken off: it was taken off time that had not been added."""
    assert hollow(sys.executable, "-c", REFUSED)[0] == ["True"]


@pytest.mark.parametrize("nvml", [True, False])
def test_memory_of_another_process_is_not_ours(nvml):
    (said, found), _ = hollow(sys.executable, "-c", BESIDE, NEIGHBOUR, nvml=nvml)
    assert said == "has 400 MiB"
    assert found == "0 True"


@pytest.mark.parametrize("time", range(5))
def test_a_program_that_ends_after_its_backward_pass_ends_well(time):
    """The autograd engine's thread may still need the GIL; without a pause, every second run crashes."""
    hollow(sys.executable, "-c", ENDS)
