"""A PyTorch whose allocator for GPUs is not as dtrrun expects: it stays as it is, and lines say so."""

import subprocess
import sys

import pytest

from dtrrun.runtime.cuda import gpu as module

pytestmark = pytest.mark.usefixtures("gpu")
PROGRAM = """
import sys, torch, dtrrun
from dtrrun.extensions import build
build.load(print).move(sys.argv[1])
with dtrrun.budget("2GB"):
    print((torch.ones(64, device="cuda") * 2).sum().item())
"""


@pytest.mark.parametrize(
    ("function", "lines"), [("allocate", [module.REFUSALS, module.FLUSHES]), ("none", [])]
)
def test_the_allocator_has_another_table(function, lines):
    done = subprocess.run([sys.executable, "-c", PROGRAM, function], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["128.0"], done.stderr
    said = [
        line.partition(" has no ")[2].partition(";")[0]
        for line in done.stderr.splitlines()
        if " has no " in line
    ]
    on_the_gpu = [line for line in said if "CPU" not in line]
    assert on_the_gpu == [f"{what}: {so}".partition(";")[0] for what, so in lines]
