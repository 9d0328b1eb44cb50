"""Each option of the command and each verb on a GPU: the losses are those of a plain run."""

import json
import re
import sys

import pytest
import torch
from gpu_programs import DEVICE, HOLLOW, MIB, beside
from test_memory import SPACE
from test_whole_processes import hollow
from torch import nn

import dtrrun
from dtrrun.core.heuristics import HEURISTIC_NAMES

WHOLE = pytest.mark.skipif(not HOLLOW, reason="needs python -m tests.hollow")

PROGRAM = """
import sys, torch
from torch import nn
torch.manual_seed(0)
parts = [part for _ in range(5) for part in (nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))]
model = nn.Sequential(*parts, nn.Linear(128, 8)).cuda()
run = torch.compile(model) if "compile" in sys.argv else model
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for step in range(2):
    loss = run(torch.randn(1 << 13, 128, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
"""
COMMAND = [sys.executable, "-m", "dtrrun"]
BUDGET = ["--budget", "640MB"]  # of 578 MB without tensors
"""Options of one kind that exclude each other are in several runs; all others are together."""
RUNS = {
    "counting": "--where --json report.json --html page.html --trace trace.json --live always",
    "budget": f"{' '.join(BUDGET)} --where --json report.json --html page.html --trace trace.json --verify "
    "--cost model --ignore-small 1% --sample --seed 3 --no-remember --on-thrash stop --max-slowdown 1000 "
    "--on-violation stop --live never --heuristic h_dtr",
    "warn": "--budget 585MB --over-budget warn --device cuda:0 --max-steps 2 --quiet --return-memory never",
    "eager": f"{' '.join(BUDGET)} --compile eager --device cuda -- train.py compile",
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The program's folder, and what it prints without dtrrun."""
    folder = tmp_path_factory.mktemp("program")
    program = folder / "train.py"
    program.write_text(PROGRAM)
    return folder, hollow(sys.executable, str(program))[0]


@WHOLE
@pytest.mark.parametrize("name", RUNS)
def test_options_of_a_run(plain, name):
    folder, losses = plain
    options = [
        str(folder / word) if "." in word and "-" not in word and word[0].isalpha() else word
        for word in RUNS[name].split()
    ]
    program = [] if "--" in options else [str(folder / "train.py")]
    found, told = hollow(*COMMAND, *options, *program)
    assert found
    assert found == losses[: len(found)]  # --max-steps ends the program
    assert "Traceback" not in told
    if name in ("counting", "budget"):
        report = json.loads((folder / "report.json").read_text())
        assert (report["evictions"] > 0) == (name == "budget")
        assert bool(report["places"]) == (name == "budget")
        assert json.loads((folder / "trace.json").read_text())["traceEvents"]
        assert "</html>" in (folder / "page.html").read_text()


@WHOLE
def test_verbs(plain, tmp_path):
    folder, _ = plain
    program, log = str(folder / "train.py"), str(tmp_path / "step.jsonl")
    _, told = hollow(*COMMAND, "record", "-o", log, program)
    assert re.search(r"wrote step 2 .* \d+ operators", told)
    found, _ = hollow(*COMMAND, "simulate", log)
    assert any("h_dtr_eq" in line for line in found)
    found, told = hollow(*COMMAND, "smoke", "--steps", "2", "--budget", BUDGET[1], program)
    assert "the same bits" in "\n".join([*found, told])
    found, told = hollow(
        *COMMAND, "profile", "--steps", "2", "--checks", "1", "-o", str(tmp_path / "train.yaml"), program
    )
    assert "recommended" in "\n".join([*found, told])
    hollow(*COMMAND, "top", "--once")


def chain():
    """Return the gradient of a short chain of layers with dropout, of 2 MiB each."""
    torch.manual_seed(5)
    weight = torch.full((64, 64), 0.01, device=DEVICE, requires_grad=True)
    x = torch.randn(1 << 13, 64, device=DEVICE)
    for _ in range(10):
        x = nn.functional.dropout((x @ weight).tanh(), 0.1)
    x.square().mean().backward()
    return weight.grad.cpu()


def test_heuristics(gpu):
    expected, budget = chain(), beside() + SPACE + 60 * MIB
    for heuristic in (*HEURISTIC_NAMES, "h'(s=no,m=yes,c=eqclass)", "builtins:max"):
        with dtrrun.budget(budget, device=DEVICE, heuristic=heuristic, sample=heuristic == "lru") as session:
            assert torch.equal(chain(), expected), heuristic
            assert session.report()["evictions"] > 0, heuristic
