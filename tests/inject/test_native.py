"""The native extension through the command line, on machines that have it, can build it, or cannot."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtrrun.extensions import build

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
REFUSED = "dtrrun: error: {} could not be put under the budget: {}"


@pytest.fixture
def bare(tmp_path):
    """An environment without a compiler and without earlier builds."""
    (tmp_path / "bin").mkdir()
    return {"PATH": str(tmp_path / "bin"), "CXX": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def script(program):
    return program("train.py", TRAINS)


def test_without_a_compiler_nothing_runs(dtrrun, program, bare):
    """One line says what to do, even with --quiet and if the program catches every exception."""
    script = program("train.py", "try:\n    import torch\nexcept BaseException:\n    pass\nprint('trains')\n")
    for quiet in ([], ["--quiet"]):
        ended = dtrrun("--budget", "1GB", *quiet, script, env=bare)
        assert (ended.status, ended.out) == (125, "")
        assert ended.err.splitlines()[-1] == REFUSED.format("a process", NO_COMPILER)
        assert len(ended.err.splitlines()) == 1 or not quiet
        assert ended.report["processes"] == []
    assert not Path(bare["XDG_CACHE_HOME"], "dtrrun", "native").exists()


def test_without_a_cache_it_runs_all_the_same(dtrrun, script, tmp_path):
    """It uses what an earlier run has built in a temporary folder."""
    spare = tmp_path / f"dtrrun-{os.getuid()}" / build.key()
    spare.mkdir(mode=0o700, parents=True)
    spare.parent.chmod(0o700)
    shutil.copy(build.found_at(build.built()), spare)
    (tmp_path / "file").touch()
    env = {"XDG_CACHE_HOME": str(tmp_path / "file"), "CXX": "/none"}
    ended = dtrrun("--quiet", "--budget", "1GB", script, env=env)
    assert (ended.status, ended.out, ended.err) == (0, "trained\n", "")


def test_without_a_compiler_no_block_begins(plain, program, bare):
    program("own.py", "import dtrrun\nwith dtrrun.budget('1GB'):\n    print('inside')\n")
    ended = plain(sys.executable, "own.py", env=bare)
    assert (ended.status, ended.out) == (1, "")
    assert ended.err.splitlines()[-1] == f"dtrrun.extensions.building.CannotBuild: {NO_COMPILER}"


def test_a_script_with_a_block_of_its_own_is_told_to_choose(dtrrun, program):
    program("own.py", "import dtrrun, torch\nwith dtrrun.budget('1GB'):\n    print('inside')\n")
    ended = dtrrun("--quiet", "--budget", "1GB", "own.py")
    assert (ended.status, ended.out) == (1, "")
    assert (
        "RuntimeError: dtrrun: a session is already running in this process: that of the command "
        in ended.err
    )


def test_ctrl_c_while_it_is_built(environment, program, tmp_path):
    """The program is importing torch at that point, and its traceback says so."""
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\nsleep 60\n")
    compiler.chmod(0o755)
    text = "def load():\n    import torch\nload()\n"
    script = program("train.py", text)
    words = [sys.executable, "-m", "dtrrun", "--budget", "1GB", script]
    env = environment | {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    child = subprocess.Popen(words, cwd=tmp_path, env=env, text=True, stderr=subprocess.PIPE)
    lines = []
    for line in child.stderr:
        lines.append(line)
        if "building the native part" in line:
            child.send_signal(signal.SIGINT)  # which dtrrun passes on
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


def test_processes_say_it_once(dtrrun, program, bare):
    """This includes `multiprocessing` children whose parent has not imported torch."""
    script = program(
        "both.py",
        "import multiprocessing, subprocess, sys\n"
        "def work():\n"
        "    import torch\n"
        "if __name__ == '__main__':\n"
        "    own = multiprocessing.get_context('fork').Process(target=work)\n"
        "    own.start()\n"
        "    others = [subprocess.Popen([sys.executable, 'train.py']) for _ in range(2)]\n"
        "    own.join()\n"
        "    print(own.exitcode, *[one.wait() for one in others])\n",
    )
    program("train.py", TRAINS)
    ended = dtrrun("--budget", "1GB", script, env=bare)
    assert (ended.status, ended.out) == (125, "125 125 125\n")
    assert [line for line in ended.err.splitlines() if "compiler" in line] == [
        REFUSED.format("3 processes", NO_COMPILER)
    ]


def test_a_compiler_that_fails(dtrrun, script, bare, tmp_path):
    cxx = tmp_path / "cxx"
    cxx.write_text("#!/bin/sh\necho 'cxx: error: unrecognized option -std=c++20' >&2\nexit 1\n")
    cxx.chmod(0o755)
    ended = dtrrun("--budget", "1GB", script, env=bare | {"CXX": str(cxx)})
    assert (ended.status, ended.out) == (125, "")
    why, _, errors = ended.err.splitlines()[-1].partition("; see ")
    assert why.endswith(f"{cxx} failed: cxx: error: unrecognized option -std=c++20")
    assert os.path.dirname(errors).startswith(bare["XDG_CACHE_HOME"])
    assert "-std=c++20" in Path(errors).read_text()


@pytest.mark.skipif(not shutil.which("g++"), reason="no compiler")
def test_with_it(dtrrun, script):
    """With the extension (built for other tests, or now), operators are handled."""
    ended = dtrrun("--budget", "1GB", "--quiet", script)
    assert (ended.status, ended.out) == (0, "trained\n"), ended.err
    native = ended.report["native"]
    assert native == ended.processes[0]["native"]
    assert native["operators"] > 2 * 3
    assert 0 <= native["in_python"] < native["operators"]
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
