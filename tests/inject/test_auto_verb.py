"""`--heuristic auto` in real interpreters."""

import shutil
import signal
import subprocess
import sys

import pytest

from dtrrun.extensions import building
from tests.waiting import until

SCRIPT = """
import time, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.Tanh())])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = 0
for step in range(60):
    optimizer.zero_grad()
    loss = model(torch.randn(256, 64)).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.1)
print(loss.item())
"""
WORDS = ("--quiet", "--budget", "700kB", "--heuristic", "auto")


@pytest.fixture
def cache(tmp_path):
    """A separate cache, without building the extension again."""
    folder = tmp_path / "cache" / "dtrrun"
    folder.mkdir(parents=True)
    if building.cache_folder().exists():
        (folder / "native").symlink_to(building.cache_folder())
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "DTRRUN_REMEMBER": "yes"}


def rule_of(run):
    (process,) = run.processes
    return process["rule"]


def test_the_next_run_begins_with_what_was_found(dtrrun, plain, program, cache, tmp_path):
    script = program("train.py", SCRIPT)
    first = dtrrun(*WORDS, str(script), env=cache)
    assert first.status == 0, first.err
    assert not first.ours
    found = rule_of(first)
    assert found["share"] is not None
    assert list((tmp_path / "cache" / "dtrrun" / "rules").iterdir())

    second = dtrrun(*WORDS, str(script), env=cache)
    assert second.out == first.out
    again = rule_of(second)
    assert (again["source"], again["since_step"]) == ("remembered", 1)
    assert again["heuristic"] == found["heuristic"]

    other = dtrrun(*WORDS, "--no-remember", "--max-steps", "3", str(script), env=cache)
    assert other.status == 0, other.err
    assert rule_of(other)["source"] != "remembered"


def test_a_cache_that_cannot_be_written(dtrrun, program, cache, tmp_path):
    (tmp_path / "cache" / "dtrrun" / "rules").write_text("a file where a folder should be")
    run = dtrrun(*WORDS[1:], str(program("train.py", SCRIPT)), env=cache)
    assert run.status == 0
    (line,) = run.warnings
    assert line.startswith("cannot keep what was learned about this program for the next run (")
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)


def test_a_named_rule_stays(dtrrun, program, cache):
    run = dtrrun(*WORDS[:-1], "h_dtr_eq", "--max-steps", "5", str(program("train.py", SCRIPT)), env=cache)
    assert run.status == 0
    assert rule_of(run) is None


KILLED = SCRIPT.replace("    time.sleep(0.1)", "    look()").replace(
    "import time, torch",
    """
import glob, os, signal, torch
def look():
    if glob.glob(os.environ["TMPDIR"] + "/**/steps.log", recursive=True):
        os.kill(os.getpid(), signal.SIGKILL)
""",
)


def test_a_killed_run_leaves_no_log(dtrrun, program, cache, tmp_path):
    (tmp_path / "temporary").mkdir()
    cache["TMPDIR"] = str(tmp_path / "temporary")
    run = dtrrun(*WORDS, str(program("train.py", KILLED)), env=cache)
    assert run.status == -signal.SIGKILL
    assert not list((tmp_path / "temporary").glob("dtrrun-*"))


BLOCKED = """
import os, sys
from pathlib import Path
from dtrrun.runtime.observe.learning import Search
search = Search(Path(sys.argv[1]), 1)
os.mkfifo(search.log)
search.start(1_000_000, "lru", 30)
os._exit(0)
"""


def test_a_search_ends_with_its_program(tmp_path):
    folder = tmp_path / "search"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", BLOCKED, folder], check=True)
    until(lambda: not folder.exists(), 10)  # reading the log would take longer


WAITS = SCRIPT.replace(
    "    time.sleep(0.1)\n",
    """\
    time.sleep(0.1)
    if not (child := os.fork()):
        os._exit(0)
    assert os.wait()[0] == child
""",
).replace("import time", "import os, time")


def test_a_program_that_waits_for_any_child_gets_its_own(dtrrun, program):
    run = dtrrun(*WORDS, str(program("train.py", WAITS)))
    assert run.status == 0, run.err
    assert rule_of(run)["share"] is not None  # proves that there was a search
