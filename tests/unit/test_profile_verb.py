"""dtrrun.cli.profile; real interpreters are in tests/inject."""

import os
import signal
import sys

import pytest

from dtrrun.cli.profile import _name_of, _run


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a script that must not be started."""
    for name in [name for name in os.environ if name.startswith("DTRRUN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "no-config"))
    (tmp_path / "x.py").write_text("raise SystemExit(99)")
    (tmp_path / "folder.yaml").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-",), "cannot be read from standard input"),
        (("--vary", "--b {}", "x.py"), "must be given together"),
        (("--steps", "0", "x.py"), "--steps: 0 is less than 1"),
        (("--steps", "99", "x.py"), "more than 32"),
        (("--heuristic", "h_next", "x.py"), "h_next learns from the first steps"),
        (("--heuristic", "h_dtr,portfolio", "x.py"), "--heuristic: portfolio compares heuristics on a log"),
        (("--heuristic", "paper,h_dtr_qe", "x.py"), "--heuristic: unknown heuristic 'h_dtr_qe'"),
        (("--heuristic", "not_here:score", "x.py"), "--heuristic: heuristic 'not_here:score' cannot be used"),
        (("--heuristic", "json:loads", "x.py"), "--heuristic: heuristic 'json:loads' cannot be used"),
        (("--max-slowdown", "1", "x.py"), "--max-slowdown"),
        (("-o", "x.txt", "x.py"), "ends in .yaml"),
        (("-o", "/nowhere/x.yaml", "x.py"), "/nowhere is not a folder"),
        (("-o", "/proc/x.yaml", "x.py"), "/proc/x.yaml cannot be written: No such file or directory"),
        (("-o", "folder.yaml", "x.py"), "folder.yaml cannot be written: Is a directory"),
        (("--name", "a/b", "x.py"), "not a valid name for a profile"),
        (("--name", "paper", "x.py"), "paper is the name of a profile that comes with dtrrun"),
        (("--target-budget", "1", "--vary", "--b {}", "--range", "1:2", "x.py"), "has no unit"),
        (("--target-budget", "1GB", "--vary", "--b", "--range", "1:2", "x.py"), "needs exactly one {}"),
        (("no-such.py",), "no such script"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(here, refused, words, message):
    status = 125 if "cannot be written" in message else 127 if "no such" in message else 2
    assert message in refused("profile", *words, status=status)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("train.py --epochs 3", "train"),
        ("a/b/train.py", "train"),
        ("-m package.train --x y.py", "package.train"),
        ("torchrun --nproc-per-node 2 work/train.py", "train"),
        ("./run-it", "program"),
    ],
)
def test_a_profile_is_called_as_its_script(words, name):
    assert _name_of(words.split()) == name


class Search:
    """Stands for a study: `work` is what it does between two calls of `attend`."""

    now, seconds, left = "", 0.0, None

    def __init__(self, work):
        self._work = work
        self.attend = lambda search: None

    def run(self):
        for _ in range(2):
            self._work()
            self.attend(self)


class Dies:
    """Something whose finalizer runs when the signal comes."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("work", [Dies, lambda: signal.raise_signal(signal.SIGTERM)])
def test_an_interruption_is_not_lost(work):
    assert _run(Search(work), quiet=True) == signal.SIGTERM


def test_nothing_interrupts_it():
    assert _run(Search(lambda: None), quiet=True) == 0
