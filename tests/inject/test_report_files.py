"""Files of a real run: JSON with a timeline, the page and the trace, without a terminal and with --quiet."""

import gzip
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))  # for the trace format's rules
import pytest
from trace_format import broken_rules

SCRIPT = """
import torch
torch.manual_seed(0)
layers = (layer for _ in range(12) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh()))
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.ones(1024, 256)).square().mean()
    loss.backward()
    optimizer.step()
print("loss", loss.item())
"""


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_run(dtrrun, plain, program, open_umask, tmp_path):
    script = program("<b>&train.py", SCRIPT)
    files = ("--html", "report.html", "--trace", "trace.json")
    run = dtrrun("--quiet", "--budget", "18MB", *files, script)
    assert (run.status, run.err) == (0, "")
    (process,) = run.report["timeline"]["processes"]
    assert process["pid"] == run.processes[0]["pid"]
    samples, steps = process["samples"], process["steps"]
    assert sum(samples["evictions"]) == run.report["evictions"] > 0
    assert sum(samples["rematerializations"]) == run.report["rematerializations"] > 0
    assert max(samples["resident_most_bytes"]) == run.report["peak_bytes"] <= 18_000_000
    assert steps["last"] == [1, 2, 3, 4, 5, 6]
    assert all(0 < end < run.report["elapsed_seconds"] for end in steps["ended"])
    walls = sum(steps["seconds"]["wall"])
    assert 0 < walls < run.report["seconds"]["wall"] + 0.1  # the step clock starts before the record's
    text = (tmp_path / "trace.json").read_text()
    assert broken_rules(text) == []
    events = json.loads(text)["traceEvents"]
    assert sum(event.get("cat") == "eviction" for event in events) == run.report["evictions"]
    assert sum(event.get("cat") == "step" for event in events) == 6
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"<b>&train.py"}
    html = (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;&amp;train.py" in html
    assert "<b>&train.py" not in html
    for name in ("report.html", "trace.json", "report.json"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert not [name for name in os.listdir(tmp_path) if name.startswith("dtrrun")]
    ended = plain(sys.executable, "-m", "dtrrun", "report", "report.json", "-o", "other.html")
    assert (ended.status, ended.err) == (0, "")
    assert (tmp_path / "other.html").read_text() == html


def test_a_target_that_is_killed_leaves_them_too(tmp_path, environment, program):
    program("train.py", SCRIPT + "\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    words = [
        "--budget",
        "18MB",
        "--json",
        "run.json",
        "--html",
        "run.html",
        "--trace",
        "run.json.gz",
        "train.py",
    ]
    ended = subprocess.run(
        [sys.executable, "-m", "dtrrun", "--quiet", *words], env=environment, cwd=tmp_path, timeout=120
    )
    assert ended.returncode == -9
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["timeline"]["processes"][0]["steps"]["last"]
    trace = gzip.decompress((tmp_path / "run.json.gz").read_bytes()).decode()
    assert broken_rules(trace) == []
    assert "killed" in (tmp_path / "run.html").read_text()


def test_a_folder_that_a_killed_launcher_left_goes(dtrrun, tmp_path):
    left = tmp_path / "dtrrun-left"
    left.mkdir(mode=0o700)
    (left / "lock").touch()
    (left / "1-2.record").touch()
    long_ago = time.time() - 3 * 86_400
    for path in (left / "lock", left / "1-2.record", left):
        os.utime(path, (long_ago, long_ago))
    assert dtrrun("sh", "-c", "exit 4").status == 4
    assert not left.exists()


KEEPS = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
def train():
    logits = []
    for step in range(12):
        model(torch.ones(512, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            logits.append(model(torch.ones(512, 256)))
    return torch.stack(logits)
result = train()
"""


@pytest.mark.parametrize("policy", ["error", "warn"])
def test_what_stays_has_its_role_and_its_name(dtrrun, program, policy):
    """Parameters, the optimizer's state and a list that an evaluation fills, in the error and the tables."""
    run = dtrrun("--budget", "7MB", "--over-budget", policy, program("train.py", KEEPS))
    rows = {row["reason"]: row["bytes"] for row in run.report["pinned"]}
    weights = 2 * (256 * 256 + 256) * 4
    assert rows["parameter"] == weights
    assert rows["optimizer state"] == pytest.approx(2 * weights, abs=1000)
    if policy == "error":
        assert run.status == 1
        assert "[`logits` in train at train.py:" in run.err
        assert "kept by the program: `logits` in train at train.py:" in run.err
        [name] = {held["name"] for row in run.report["pinned"] for held in row["held_by"]}
        assert name.startswith("`logits` in train at train.py:")
        assert "`logits` in train at train.py:" in run.report["error"]["hint"]
    else:
        assert run.status == 0
        assert run.report["over_budget"]
