"""Real interpreters: `dtrrun` as a user at a terminal would call it, and the same program without it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Ended:
    status: int
    out: str
    err: str
    report: dict | None = None

    @property
    def ours(self):
        """Return dtrrun's own lines on stderr, without the prefix."""
        return [
            line.removeprefix("dtrrun: ") for line in self.err.splitlines() if line.startswith("dtrrun: ")
        ]

    @property
    def warnings(self):
        return [line.removeprefix("warning: ") for line in self.ours if line.startswith("warning: ")]

    @property
    def processes(self):
        return self.report["processes"]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The environment of the tests' programs: without dtrrun's variables and the user's profiles."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DTRRUN_", "PYTHON"))}
    clean["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{clean['PATH']}"
    return clean | {
        "OMP_NUM_THREADS": "1",
        "DTRRUN_REMEMBER": "no",  # must not use what other tests have learned
        "DTRRUN_DEVICE": "cpu",  # the programs compute on the CPU even where there is a GPU
        "PYTHONDONTWRITEBYTECODE": "1",
        "XDG_CONFIG_HOME": str(tmp_path / "no-config"),
        "TMPDIR": str(tmp_path),
    }


@pytest.fixture
def plain(tmp_path, environment):
    """Run a command without dtrrun."""

    def run(*command, env=None, stdin=None):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment | (env or {}),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def dtrrun(tmp_path, plain):
    """Run `dtrrun` with these words."""

    def run(*words, env=None, stdin=None):
        file = tmp_path / "report.json"
        ended = plain(sys.executable, "-m", "dtrrun", "--json", str(file), *words, env=env, stdin=stdin)
        if file.exists():
            ended.report = json.loads(file.read_text())
        return ended

    return run


@pytest.fixture
def started(tmp_path, environment):
    """Start `dtrrun` with these words, and return the process."""

    def start(*words, **options):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-m", "dtrrun", *words]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes | options)

    return start


@pytest.fixture
def program(tmp_path):
    """Write a program's text into the folder where it will run."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write
