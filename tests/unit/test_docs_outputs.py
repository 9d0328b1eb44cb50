"""The commands in the pages are run, and the outputs that they show are reproduced.

Programs that train are run up to the moment when they would start. README.md's first command and its code
run in full. `make docs-pictures` rewrites the outputs in the pages.
"""

import gzip
import importlib
import multiprocessing.process
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from test_docs import CODE, PAGES, PLACEHOLDERS, ROOT, commands, text

from dtrrun.cli import smoke

sys.path.append(str(ROOT / "docs" / "pictures"))

import outputs

TRAIN = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
weight = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(weight.parameters(), 0.1)
for _ in range(parser.parse_args().epochs):
    weight(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""
MENTIONED = (
    *("run", "peak", "estimate", "record", "profile", "smoke", "simulate", "report", "compare"),
    "doctor",
)
"""Verbs that a sentence may name; `dtrrun doctor` takes a while, and has its own tests."""
STARTS = {"run": "supervise", "record": "supervise", "profile": ("_study", "_vary"), "smoke": "_check"}
STARTS |= {"peak": "_look", "estimate": "_look"}
"""By verb: the functions that start the program."""
SLOW = (
    "--paper",
    "--theory linear",
    "--theory adversary",
    "portfolio",
    "tests/logs",
    " steps ",
    " trees ",
    " LOGS ",
)
"""Replays that take long, or whose logs other commands of a page record."""
MADE_BY = {"docs/howto/insurance.md": "tests/inject/test_insurance.py"}
"""By page whose outputs another test checks: that test."""
ELSEWHERE = (
    "<(",
    "/dev/stdin",
    "node",
    "SCRIPT",
    "SIZE",
    "adversary|",
    "top 4711",
    "top PID",
    "sh -c",
    "record --step 1-4",
    "--github-summary",
)
"""Words for things that only a reader has, and for what only a shell can run."""


@pytest.mark.parametrize("page", sorted({page for page, _ in outputs.OUTPUTS}))
def test_outputs_are_what_todays_code_prints(page):
    assert outputs.with_outputs(page, text(page)) == text(page), f"{page} is stale: make docs-pictures"


def shows_output(block):
    """Return true if a fenced block has a command and, below it, something that is not one."""
    lines = [line.strip() for line in block.splitlines()]
    prompts = [place for place, line in enumerate(lines) if line.startswith("$ ")]
    return bool(prompts) and len(lines) > prompts[-1] + 1


def test_every_output_is_made_here():
    shown = {
        (page, lines[-1])
        for page in PAGES
        for _, _, _, block in CODE.findall(text(page))
        if shows_output(block)
        and (lines := [line.strip() for line in block.splitlines() if line.strip().startswith("$ ")])
    }
    made = {(page, line) for page, line in outputs.OUTPUTS if line.startswith("$ ")}
    assert {one for one in shown if one[0] not in MADE_BY} == made
    assert all((ROOT / test).exists() for test in MADE_BY.values())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files that the commands name."""
    folder = tmp_path_factory.mktemp("reader")
    for name in (
        "mypackage",
        "docs/examples",
        "docs/howto",
        "logs",
        "steps",
        "trees",
        "bin",
        "run-0",
        "run-1",
    ):
        (folder / name).mkdir(parents=True)
    for name in ("train.py", "ddp.py", "mypackage/train.py"):
        (folder / name).write_text(TRAIN)
    (folder / "mine.py").write_text(
        "def score(size, staleness, cost, projected_cost):\n    return cost / size\n"
    )
    for name in (
        "report.json",
        "run.json",
        "before.json",
        "after.json",
        "main.json",
        "branch.json",
        "run-0/x.json",
        "run-1/x.json",
    ):
        shutil.copy(ROOT / "tests" / "pictures" / "run.json", folder / name)
    for script in (ROOT / "docs").glob("[eh]*/*.py"):
        (folder / script.relative_to(ROOT)).symlink_to(script)
    (folder / "step.log").write_bytes(gzip.decompress(outputs.LOG.read_bytes()))
    shutil.copy(ROOT / "tests" / "logs" / "resnet.log.gz", folder / "logs")
    for name in ("torchrun", "accelerate", "python"):
        (folder / "bin" / name).write_text("#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    profiles = folder / "config" / "dtrrun" / "profiles"
    profiles.mkdir(parents=True)
    for path in (profiles / "train.yaml", folder / "train.yaml"):
        path.write_text("budget: 6GB\nmax_slowdown: 3\n")
    return folder


@pytest.fixture
def reader(place, monkeypatch):
    """Run commands in that folder, without starting programs."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    monkeypatch.setattr(multiprocessing.process, "ORIGINAL_DIR", str(place))  # where processes start
    started = []
    for verb, names in STARTS.items():
        module = importlib.import_module(f"dtrrun.cli.{verb}")
        for name in (names,) if isinstance(names, str) else names:
            passed = ([], None, 1) if module is smoke else 0
            monkeypatch.setattr(module, name, lambda *given, passed=passed: started.append(given) or passed)
        monkeypatch.setattr(module, "choose", lambda python: sys.executable)
    path = list(sys.path)
    yield started
    sys.path[:] = path
    sys.modules.pop("mine", None)


def runnable(page):
    """Return the words of the page's commands, except mere mentions of a verb or an option."""
    for line in dict.fromkeys(commands(text(page))):
        words = shlex.split(line, comments=True)[1:]
        mention = all(word.startswith("-") for word in words) or words in [[verb] for verb in MENTIONED]
        if words[0] == "--help" or not (
            mention or any(word in f"{line} " for word in (*SLOW, *ELSEWHERE, *PLACEHOLDERS))
        ):
            yield tuple(words)


ONCE = {words: page for page in reversed(PAGES) for words in runnable(page)}
"""By command, the first page that contains it."""


@pytest.mark.parametrize("page", dict.fromkeys(ONCE.values()))
def test_commands_run(page, reader, command):
    for words in (words for words, first in ONCE.items() if first == page):
        status, _, err = command(*words)
        assert not status, f"{page}: dtrrun {shlex.join(words)}: {err}"


def test_most_commands_are_run():
    assert len(ONCE) > 40


def test_the_first_command_runs(place):
    first = next(commands(text("README.md")))
    assert first == "dtrrun --budget 6GB train.py --epochs 3"
    words = [sys.executable, "-m", "dtrrun", *shlex.split(first)[1:]]
    done = subprocess.run(
        words, cwd=place, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^steps +3 ", done.stderr, re.MULTILINE)


def test_the_code_of_the_first_page_runs(capsys):
    (code,) = (block for _, _, language, block in CODE.findall(text("README.md")) if language == "python")
    exec(code, {"train": lambda: None})
    assert capsys.readouterr().out == "0\n"


def test_the_code_of_the_recipe_for_notebooks_runs(capsys):
    """All of it runs in a kernel, if there is one: tests/inject/test_notebook.py."""
    blocks = [block for _, _, _, block in CODE.findall(text("docs/howto/notebook.md"))]
    exec("".join(blocks[:2]), {"train": lambda: torch.ones(1000).sum()})
    assert capsys.readouterr().out == "4096 0 0\n"


def test_pytorchs_error_on_a_cpu_is_quoted_as_it_is():
    """For that on a GPU, see tests/gpu/test_memory.py."""
    (quoted,) = re.findall(r"^RuntimeError: (.*)$", text("docs/howto/out-of-memory.md"), re.MULTILINE)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**46)
    assert re.sub(r"\d+", "1", str(caught.value)) == re.sub(r"\d+", "1", quoted)


def test_what_make_and_python_are_asked_for_exists():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in PAGES:
        for target in re.findall(r"(?:^ {4}|`)make ([a-z][\w-]*)", text(page), re.MULTILINE):
            assert target in targets, f"{page}: make {target}"
        for module in re.findall(r"python -m ((?:tests|dtrrun)[\w.]*)", text(page)):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page}: {module}"
        for file in re.findall(r"`((?:dtrrun|tests|docs)/[\w/.-]+)`", text(page)):
            assert (ROOT / file).exists(), f"{page}: {file}"
