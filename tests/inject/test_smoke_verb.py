"""`dtrrun smoke` in real interpreters: it passes if all is well, and fails for the right reason."""

import json
import signal
import sys
from textwrap import indent
from xml.etree import ElementTree

import pytest
from modes import MODES

from tests.waiting import until

SCRIPT = """
import sys, torch
from torch import nn
layers = [part for _ in range(8) for part in (nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh())]
model = nn.Sequential(*layers, nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
for step in range(10):
    optimizer.zero_grad()
    model(torch.randn(512, 64)).square().mean().backward()
    optimizer.step()
    print("step", step)
"""
WRONG_RANDOM_NUMBERS = """
import dtrrun.runtime.rng as rng
rng.replaying.__enter__ = lambda self: None
rng.replaying.__exit__ = lambda self, *exc: None
"""


@pytest.fixture
def smoke(plain, tmp_path):
    def run(script, *words, name="train.py", **options):
        (tmp_path / name).write_text(script)
        command = [sys.executable, "-m", "dtrrun", "smoke", "--json", "smoke.json", *words, name]
        ended = plain(*command, **options)
        path = tmp_path / "smoke.json"
        ended.report = json.loads(path.read_text()) if path.exists() else None
        return ended

    return run


def outcomes(ended):
    return {check["name"]: check["passed"] for check in ended.report["checks"]}


def details(ended):
    return {check["name"]: check["detail"] for check in ended.report["checks"]}


def test_a_script_that_is_well(smoke, tmp_path):
    ended = smoke(SCRIPT, "--junit", "smoke.xml")
    assert ended.status == 0, ended.err
    assert set(outcomes(ended).values()) == {True}
    assert ended.report["passed"] is True
    assert "5 steps" in details(ended)["plain run"]
    assert "evictions" in details(ended)["run in the budget"]
    assert "step 0" not in ended.out
    assert len(ended.out.splitlines()) == 6
    suite = ElementTree.parse(tmp_path / "smoke.xml").find("testsuite")
    assert (suite.get("tests"), suite.get("failures")) == ("5", "0")


def test_quiet_says_nothing_where_all_is_well(smoke):
    """Nothing is printed, since both runs have the same seed for all generators."""
    draws = "float(numpy.random.rand()) + random.random() + len({'a', 'b'}) * (hash('a') % 7)"
    script = SCRIPT.replace("import sys, torch", "import numpy, random, sys, torch").replace(
        "    optimizer.step()\n", f"    optimizer.step()\n    model[0].bias.data += {draws}\n"
    )
    ended = smoke(script, "--quiet", "--budget", "2MB", "--steps", "1", "--seed", "5")
    assert (ended.status, ended.out, ended.err) == (0, "", "")
    assert outcomes(ended)["slowdown"] is None
    assert ended.report["budget_bytes"] == 2_000_000


def test_a_script_that_depends_on_the_mode(smoke):
    """Both a difference in what it trains and one in how long it takes are reported."""
    script = SCRIPT.replace(
        "    optimizer.step()\n",
        "    optimizer.step()\n"
        "    import time\n"
        f"{indent(MODES, '    ')}\n"
        "    if modes():\n"
        "        model[0].bias.data += 1e-3\n"
        "    time.sleep(2.0 if modes() else 0.05)\n",
    )
    ended = smoke(script, "--max-slowdown", "2")
    assert ended.status == 1
    wrong = {"training state": False, "slowdown": False}
    assert outcomes(ended) == dict.fromkeys(outcomes(ended), True) | wrong
    assert "differ: Sequential.0.weight" in details(ended)["training state"]
    assert "at most 2" in details(ended)["slowdown"]
    for name in wrong:
        assert [line for line in ended.ours if line.startswith(f"error: smoke: {name}: ")]


def test_random_numbers_that_are_replayed_wrongly(smoke):
    script = SCRIPT.replace("import sys, torch", f"import sys, torch{WRONG_RANDOM_NUMBERS}")
    ended = smoke(script)
    assert ended.status == 1
    assert outcomes(ended)["training state"] is False


def test_a_budget_that_is_too_small(smoke, tmp_path):
    ended = smoke(SCRIPT, "--budget", "500kB", "--junit", "smoke.xml")
    assert ended.status == 1
    assert outcomes(ended) == {
        "plain run": True,
        "run in the budget": False,
        "training state": None,
        "peak": None,
        "slowdown": None,
    }
    assert "the budget is too small: it takes at least " in details(ended)["run in the budget"]
    assert "BudgetError" in ended.err
    failure = ElementTree.parse(tmp_path / "smoke.xml").find("testsuite/testcase/failure")
    assert "BudgetError" in failure.text


def test_a_model_whose_weights_and_optimizer_take_most_of_its_peak(smoke):
    """Without --budget, more than 60 % of the peak is tried; a share that is given stays as it is."""
    script = SCRIPT.replace("512, 64", "512, 256").replace("64, 64", "256, 256").replace("64, 1)", "256, 1)")
    ended = smoke(script)
    assert ended.status == 0, ended.err
    assert "too small)" in details(ended)["run in the budget"]
    assert smoke(script, "--budget", "60%").status == 1


def test_a_script_that_crashes(smoke):
    ended = smoke("import torch\nprint('so far')\nraise RuntimeError('my own error')\n")
    assert ended.status == 1
    assert outcomes(ended)["plain run"] is False
    assert "RuntimeError: my own error" in ended.err
    assert "so far" in ended.err
    assert details(ended)["plain run"] == "exit status 1"


def test_a_script_without_steps_or_torch(smoke):
    ended = smoke("import torch\nprint(torch.ones(3))\n")
    assert details(ended)["plain run"] == "the script made no optimizer step"
    ended = smoke("print('nothing')\n")
    assert ended.status == 1
    assert "never imported torch" in details(ended)["plain run"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_leaves_nothing(started, tmp_path, number):
    (tmp_path / "train.py").write_text(SCRIPT.replace("range(10)", "range(10**6)"))
    process = started("smoke", "--steps", "1000000", "--json", "smoke.json", "train.py")
    until(lambda: list(tmp_path.glob("dtrrun-*/*.record")), 300)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
