"""`dtrrun profile` in real interpreters."""

import json
import os
import shlex
import signal
import sys

import pytest

from tests.waiting import until

MLP = """
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=1024)
parser.add_argument("--steps", type=int, default=9)
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(128, 128), nn.GELU())])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(args.steps):
    optimizer.zero_grad()
    loss = model(torch.randn(args.batch_size, 128)).square().mean()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item())
"""


@pytest.fixture
def profile(plain):
    return lambda *words: plain(sys.executable, "-m", "dtrrun", "profile", *words)


@pytest.fixture
def mlp(program):
    return program("mlp.py", MLP)


@pytest.fixture
def config(environment):
    return environment["XDG_CONFIG_HOME"]


RULES = "h_dtr_eq,h_chain(c=ancestors,s=0.333,next=0,released=first)"
"""The second one needs quotes in a shell."""


def test_from_a_script_to_a_run_with_its_profile(profile, plain, mlp, tmp_path, config):
    run = profile("--checks", "1", "--heuristic", RULES, "--json", "found.json", mlp)
    assert run.status == 0, run.err
    found = json.loads((tmp_path / "found.json").read_text())
    assert "step 0" not in run.out + run.err  # the script's output is hidden
    assert f"dtrrun --profile mlp {mlp}" in run.out
    peak, minimum, best = (found[f"{name}_bytes"] for name in ("plain_peak", "minimum", "recommended"))
    assert minimum <= best < peak
    if minimum < best:
        heuristic = shlex.quote(found["minimum_heuristic"])  # depends on the measured times
        assert f"--budget {minimum}B --heuristic {heuristic} {mlp}" in run.out
    assert found["minimum_certified"]
    measured = {row["budget_bytes"]: row for row in found["points"] if row["measured"]}
    assert measured[minimum]["measured"]["status"] == "ok"
    under = max(budget for budget in measured if budget < minimum)
    assert under >= minimum * 95 // 100
    assert measured[under]["measured"]["status"] != "ok"
    for row in measured.values():
        if row["measured"]["status"] == "ok":
            for count in ("evictions", "rematerializations"):
                if row["predicted"]["status"] == "ok":
                    assert row["predicted"][count] == row["measured"][count]
                else:  # at the slowdown limit, where the prediction stops and the run may just succeed
                    assert row["predicted"][count] <= row["measured"][count]
            assert row["measured"]["peak_bytes"] <= row["budget_bytes"]
    words = ("--quiet", "--profile", "mlp", "--json", "again.json", mlp, "--steps", "3")
    again = plain(sys.executable, "-m", "dtrrun", *words)
    assert again.status == 0, again.err
    report = json.loads((tmp_path / "again.json").read_text())
    assert report["warnings"] == []
    assert report["budget_bytes"] == best
    for count in ("evictions", "rematerializations"):
        assert report[count] == measured[best]["measured"][count]


def test_the_largest_value_that_fits(profile, mlp, tmp_path):
    words = ("--target-budget", "8MB", "--vary", "--batch-size {}", "--range", "512:513")
    run = profile(*words, "--steps", "2", "--json", "-", mlp, "--batch-size", "64")
    assert run.status == 0, run.err
    found = json.loads(run.out)
    tried = {row["value"]: row["status"] for row in found["values"]}
    assert tried[found["largest"]] == "ok"
    assert found["largest"] == 513 or tried[found["largest"] + 1] != "ok"
    in_less = {row["value"]: row["status"] for row in found["with_margin"]}
    assert found["margin_budget_bytes"] == 7_600_000
    certain = found["certain"]
    assert (certain is None and in_less[512] != "ok") or in_less[certain] == "ok"
    assert all(row["peak_bytes"] <= 7_600_000 for row in found["with_margin"])
    assert found["run"][-2:] == ["--batch-size", str(certain or found["largest"])]
    run = profile("--target-budget", "1MB", *words[2:], mlp)
    assert run.status == 3
    assert run.ours == ["not even 512 fits into 1 MB"]


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("import torch; raise SystemExit(7)", 7, "failed with 8 inside 1 MB (exit status 7)"),
        ("import torch; torch.ones(3) + 1", 3, "made no optimizer step with 8 inside 1 MB"),
    ],
)
def test_a_program_that_fails_with_the_least_value(profile, program, text, status, message):
    run = profile("--target-budget", "1MB", "--vary", "{}", "--range", "8:16", program("x.py", text), "4")
    assert (run.status, run.ours) == (status, [f"error: the program {message}"])


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("import torch\nprint('its own words')\nraise SystemExit(7)", 7, "(exit status 7)"),
        ("import torch\ntorch.randn(400, 400) @ torch.randn(400, 400)", 3, "no optimizer step"),
        (MLP.replace("128", "2").replace("default=1024", "default=4"), 3, "too little to save any"),
    ],
)
def test_what_cannot_be_profiled(profile, program, config, text, status, message):
    run = profile(program("x.py", text))
    assert run.status == status, run.err
    assert len(run.ours) == 1
    assert message in run.ours[0]
    assert ("its own words" in run.err) == (status == 7)
    assert not os.path.exists(config)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_there_is(mlp, started, tmp_path, number):
    process = started("profile", "--json", "found.json", mlp)
    until(lambda: list(tmp_path.glob("dtrrun-*/*.record")), 300)  # the first run has started
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert "interrupted" in err
    assert "Traceback" not in err
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["complete"] is False
    assert found["minimum_bytes"] is None
    assert list(tmp_path.glob("dtrrun-*")) == []
