"""Figures and decisions about time are the GPU's own where a step waits for the GPU."""

import ast
import subprocess
import sys

import pytest
import torch
from gpu_programs import DEVICE, HOLLOW, MIB, beside, chain, correct

import dtrrun
from dtrrun.telemetry.times import bound_by, breakdown

pytestmark = pytest.mark.usefixtures("gpu")

SPACE = (64 + 22) * MIB  # guard and slack
COST_NS = 1_000_000_000  # of each operator, so that the host's launches are nothing beside it


def make_costly(session) -> None:
    for signature in session.callbacks.signatures.all():
        signature.cost = COST_NS


def test_operators_that_run_again_take_what_they_cost_on_the_gpu():
    with dtrrun.budget(beside() + SPACE + 200 * MIB, device=DEVICE, cost="model") as session:
        kept = chain(40)
        make_costly(session)
        before = session.times() | {"rematerializations": session.report()["rematerializations"]}
        assert correct(kept)
        after = session.times() | {"rematerializations": session.report()["rematerializations"]}
        spent = {name: after[name] - before[name] for name in after}
        assert spent["rematerializations"] > 0
        assert spent["device_rematerialization_ns"] == spent["rematerializations"] * COST_NS
        assert bound_by(spent) == "device"
        assert breakdown(spent)["rematerialization"] == pytest.approx(spent["rematerializations"])


def test_a_step_that_recomputes_too_long_on_the_gpu_is_stopped(capfd):
    weight = torch.nn.Parameter(torch.zeros(4, device=DEVICE))
    optimizer = torch.optim.SGD([weight], 0.1)
    options = {"cost": "model", "max_slowdown": 1.5, "on_thrash": "stop"}

    def step():
        with dtrrun.budget(beside() + SPACE + 200 * MIB, device=DEVICE, **options) as session:
            kept = chain(40)
            weight.grad = torch.ones_like(weight)
            make_costly(session)
            for one in kept:  # launching it takes the host some milliseconds
                one.sum()
            optimizer.step()

    with pytest.raises(SystemExit):
        step()
    assert "stopped (--on-thrash stop)" in capfd.readouterr().err


PRICES = """
import sys, time, torch, dtrrun

def wait(seconds):
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        pass

x = torch.randn(1 << 22, device="cuda")
with dtrrun.budget(None, device="cuda") as session:
    if "slow" in sys.argv:
        x * 2  # binds the session to its device
        session.callbacks.reasons.add("a test")
    for n, between in enumerate((0, 30e-6, 70e-6, 120e-6)):
        for _ in range(4):
            x[n:] * 2  # reads and writes 34 MB
            torch.cuda.synchronize()
            wait(between)
    print([one.cost for one in session.callbacks.signatures.all() if one.operator.name == "aten.mul"])
"""


@pytest.mark.skipif(not HOLLOW, reason="needs a GPU whose kernels take a known time: python -m tests.hollow")
@pytest.mark.parametrize("path", ["fast", "slow"])
def test_a_kernel_is_priced_by_its_own_time_though_the_gpu_waits_for_the_host(path):
    command = [sys.executable, "-m", "tests.hollow", "--clock", sys.executable, "-c", PRICES, path]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert ast.literal_eval(told)[-4:] == [pytest.approx(9400, rel=0.05)] * 4
