"""The native fast path through the command line: --native on machines that can and cannot build it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtrrun.native import build

pytestmark = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < build.OLDEST, reason="too old a PyTorch"
)

TRAINS = """
import torch
weight = torch.nn.Parameter(torch.randn(64, 64))
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(2):
    weight.relu().sum().backward()
    optimizer.step()
print('trained')
"""
NO_COMPILER = "no C++ compiler was found; install one (apt install g++), or set CXX to one"
IN_PYTHON = f"operators are handled in Python, which is slower: {NO_COMPILER}"


@pytest.fixture
def bare(tmp_path):
    """An environment without a compiler, and without what was built before."""
    (tmp_path / "bin").mkdir()
    return {"PATH": str(tmp_path / "bin"), "CXX": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def script(program):
    return program("train.py", TRAINS)


def test_without_a_compiler_it_trains(dtrrun, script, bare):
    ended = dtrrun("--budget", "1GB", script, env=bare)
    assert (ended.status, ended.out) == (0, "trained\n")
    assert ended.warnings == [IN_PYTHON]
    assert [row["text"] for row in ended.report["warnings"]] == [IN_PYTHON]
    assert ended.report["steps"] == 2
    assert not Path(bare["XDG_CACHE_HOME"], "dtrrun", "native").exists()


def test_quiet_keeps_the_warning_that_the_budget_does_not_hold(dtrrun, script, bare):
    """The other warnings are in the report only."""
    ended = dtrrun("--budget", "1kB", "--over-budget", "warn", "--quiet", script, env=bare)
    exceeded = "the budget was exceeded, because nothing was left to evict (--over-budget warn)"
    assert (ended.status, ended.err) == (0, f"dtrrun: warning: {exceeded}\n")
    assert {IN_PYTHON, exceeded} <= {row["text"] for row in ended.report["warnings"]}


def test_off_says_nothing(dtrrun, script, bare):
    ended = dtrrun("--budget", "1GB", "--quiet", "--native", "off", script, env=bare)
    assert (ended.status, ended.out, ended.err) == (0, "trained\n", "")
    assert ended.report["warnings"] == []
    assert ended.report["native"] is None


def test_ctrl_c_while_it_is_built(environment, program, tmp_path):
    """The program is then importing torch, and its traceback says that."""
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\nsleep 60\n")
    compiler.chmod(0o755)
    text = "def load():\n    import torch\nload()\n"
    script = program("train.py", text)
    words = [sys.executable, "-m", "dtrrun", "--budget", "1GB", script]
    env = environment | {
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "DTRRUN_NATIVE": "auto",
    }
    child = subprocess.Popen(words, cwd=tmp_path, env=env, text=True, stderr=subprocess.PIPE)
    lines = []
    for line in child.stderr:
        lines.append(line)
        if "building the native fast path" in line:
            child.send_signal(signal.SIGINT)  # which it passes on
    assert child.wait() == -signal.SIGINT
    assert "".join(lines[2:]) == (
        "Traceback (most recent call last):\n"
        f'  File "{tmp_path}/{script}", line 3, in <module>\n'
        "    load()\n"
        f'  File "{tmp_path}/{script}", line 2, in load\n'
        "    import torch\n"
        "KeyboardInterrupt\n"
        "dtrrun: the program ended while it imported torch, before dtrrun had started in it\n"
    )
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == ["lock"]


def test_required_and_not_there(dtrrun, program, bare):
    script = program("train.py", "try:\n    import torch\nexcept BaseException:\n    pass\nprint('trains')\n")
    ended = dtrrun("--budget", "1GB", "--quiet", "--native", "require", script, env=bare)
    assert (ended.status, ended.out) == (125, "")
    (line,) = ended.err.splitlines()
    assert line.startswith("dtrrun: error: a process could not be put under the budget: ")
    assert line.endswith(f"the native fast path is required: {NO_COMPILER}")
    assert ended.report["processes"] == []


def test_processes_say_it_once(dtrrun, program, bare):
    script = program(
        "both.py",
        "import subprocess, sys\n"
        "both = [subprocess.Popen([sys.executable, 'train.py']) for _ in range(2)]\n"
        "raise SystemExit(max(one.wait() for one in both))\n",
    )
    program("train.py", TRAINS)
    ended = dtrrun("--budget", "1GB", script, env=bare)
    assert (ended.status, ended.out) == (0, "trained\n" * 2)
    assert len(ended.warnings) == 1
    assert len(ended.report["processes"]) == 2


def test_a_compiler_that_fails(dtrrun, script, bare, tmp_path):
    cxx = tmp_path / "cxx"
    cxx.write_text("#!/bin/sh\necho 'cxx: error: unrecognized option -std=c++20' >&2\nexit 1\n")
    cxx.chmod(0o755)
    ended = dtrrun("--budget", "1GB", script, env=bare | {"CXX": str(cxx)})
    assert (ended.status, ended.out) == (0, "trained\n")
    (line,) = ended.warnings
    why, _, errors = line.partition("; see ")
    assert why.endswith(f"{cxx} failed: cxx: error: unrecognized option -std=c++20")
    assert os.path.dirname(errors).startswith(bare["XDG_CACHE_HOME"])
    assert "-std=c++20" in Path(errors).read_text()


@pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")
def test_with_it(dtrrun, script):
    """Built for other tests, or now."""
    ended = dtrrun("--budget", "1GB", "--native", "require", "--quiet", script)
    assert (ended.status, ended.out) == (0, "trained\n"), ended.err
    assert ended.report["settings"]["native"] == "require"
    native = ended.report["native"]
    assert native == ended.processes[0]["native"]
    assert native["operators"] > 2 * 3
    assert 0 < native["in_python"] < native["operators"]
    assert sum(row["count"] for row in native["calls"]) == native["in_python"]


@pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")
def test_the_counts_outlast_the_session(plain, program):
    program(
        "own.py",
        "import dtrrun, json, torch\n"
        "with dtrrun.budget(None, device='cpu') as session:\n"
        "    torch.ones(5).add(1).sort()\n"
        "    before = session.report()['native']\n"
        "torch.ones(5).sort()\n"
        "print(json.dumps([before, session.report()['native']]))\n",
    )
    ended = plain(sys.executable, "own.py")
    before, after = json.loads(ended.out)
    assert before == after
    assert before["operators"] == 3
