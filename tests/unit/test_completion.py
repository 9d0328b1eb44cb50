"""dtrrun.cli.completion: the answers that shells get, and real shells that ask."""

import os
import shutil
import subprocess
import sys

import pytest

from dtrrun.cli.completion import SCRIPTS, answer
from dtrrun.cli.main import VERBS


def told(line, shell="fish"):
    """Return the answer's kind and words for a command line whose last word is incomplete."""
    kind, *lines = answer(line.split(" "), shell)
    return kind, [line.partition("\t")[0] for line in lines]


def test_the_first_word_is_a_verb_or_a_file():
    assert told("") == ("files", list(VERBS))
    assert told("pro") == ("files", ["profile"])
    assert told("--quiet rec") == ("files", ["record"])
    assert told("run pro") == ("files", [])  # the target: a file
    assert told("-- pro") == ("files", [])


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("--bu", ["--budget"]),
        ("--no-s", ["--no-sample"]),
        ("--budget 6GB --ver", ["--verify", "--version"]),
        ("smoke --ju", ["--junit"]),
        ("simulate step.log --budg", ["--budgets"]),
    ],
)
def test_options_are_those_of_the_verb(line, some):
    assert told(line) == ("words", some)


@pytest.mark.parametrize(
    ("line", "kind", "some"),
    [
        ("--return-memory ", "words", ["auto", "always", "never"]),
        ("--return-memory=al", "words", ["--return-memory=always"]),
        ("--heuristic h_dt", "words", ["h_dtr", "h_dtr_eq", "h_dtr_local"]),
        ("--device c", "words", ["cpu", "cuda"]),
        ("--profile p", "files", ["paper"]),
        ("--json ", "files", []),
        ("--budget ", "words", []),
        ("--show-completion ", "words", ["bash", "zsh", "fish"]),
    ],
)
def test_values(line, kind, some, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert (told(line)[0], sorted(told(line)[1])) == (kind, sorted(some))


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("--budget 6GB torchrun --nproc", "target 3"),
        ("smoke --steps 3 train.py ", "target 4"),
        ("train.py --json ", "target 1"),
        ("-m mypackage.tr", "files"),
        ("-- top ", "target 2"),
        ("top ", "words"),
    ],
)
def test_the_targets_words_are_the_shells(line, kind):
    assert answer(line.split(" "), "zsh")[0] == kind


def test_bash_splits_words_that_are_one():
    assert answer(["--return-memory", "=", "al"], "bash") == ["words", "always"]
    assert answer(["--return-memory", "="], "bash") == ["words", "auto", "always", "never"]
    assert answer(["--device", "cuda", ":", "0", "train.py", ""], "bash") == ["target 5"]


def test_zsh_and_fish_show_what_a_word_means():
    assert answer(["doc"], "fish") == ["files", "doctor\tCheck this machine."]
    assert answer(["doc"], "zsh") == ["files", "doctor:Check this machine."]
    _, line = answer(["--max-st"], "zsh")
    assert line == "--max-steps:End the script after N optimizer steps, with exit status 0"


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script(shell, command):
    assert command("--show-completion", shell) == (0, SCRIPTS[shell], "")
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=SCRIPTS[shell], text=True, check=True)


@pytest.mark.skipif(not shutil.which("bash"), reason="no bash")
def test_bash(tmp_path):
    """The function completes a command line as bash passes it."""
    (tmp_path / "dtrrun").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dtrrun "$@"\n')
    (tmp_path / "dtrrun").chmod(0o755)
    (tmp_path / "training data.py").touch()
    asks = SCRIPTS["bash"] + (
        "compopt() { :; }\n"  # the real one works only during completion
        "ask() {\n"
        '    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))\n'
        '    _dtrrun dtrrun "${@: -1}" "${@: -2:1}"\n'
        '    echo "${COMPREPLY[*]@Q}"\n'
        "}\n"
        "ask dtrrun pro\n"
        "ask dtrrun --return-memory = al\n"
        "ask dtrrun tr\n"
        "ask dtrrun train.py tr\n"
        '_command_offset() { COMPREPLY=("from $1"); }\n'
        "ask dtrrun --budget 6GB torchrun --np\n"
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "--norc", "-c", asks], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [
        "'profile'",
        "'always'",
        "'training data.py'",
        "'training data.py'",
        "'from 3'",
    ], done.stderr
