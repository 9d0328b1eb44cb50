"""Each unwritable result gives one line; the others are written, and the run's status is kept."""

import json
import os
import subprocess
import sys

import pytest
from modes import TRAINS

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")

FULL = "/dev/full cannot be written: No space left on device"
OUTPUTS = {"--json": "a.json", "--html": "a.html", "--trace": "a.trace.json"}


@pytest.fixture
def shell(plain):
    """Run a line of sh, in which `dtrrun` is this one."""
    return lambda line, **more: plain(
        "sh", "-c", f'dtrrun() {{ "{sys.executable}" -m dtrrun "$@"; }}; {line}', **more
    )


@pytest.mark.parametrize("full", [["--json"], ["--html", "--trace"]])
def test_each_result_is_written_whatever_becomes_of_the_others(plain, program, tmp_path, full):
    script = program("train.py", TRAINS)
    paths = OUTPUTS | dict.fromkeys(full, "/dev/full")
    words = [word for pair in paths.items() for word in pair]
    run = plain(sys.executable, "-m", "dtrrun", "--quiet", *words, script)
    assert (run.status, run.out) == (125, "trained\n")
    assert run.err == "".join(f"dtrrun: error: {option}: {FULL}\n" for option in full)
    for path in paths.values():
        assert path == "/dev/full" or (tmp_path / path).stat().st_size > 0


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 15)", -15)]
)
def test_the_status_of_a_run_that_failed_is_kept(plain, program, tmp_path, end, status):
    script = program("train.py", TRAINS + end)
    words = ("--quiet", "--json", "/dev/full", "--html", "a.html")
    run = plain(sys.executable, "-m", "dtrrun", *words, script)
    assert run.status == status
    assert run.ours == [f"error: --json: {FULL}"]
    assert (tmp_path / "a.html").exists()


def test_an_error_of_ours_in_one_result_does_not_cost_the_others(monkeypatch, capsys):
    from dtrrun.cli.report_file import write_each

    monkeypatch.delenv("DTRRUN_DEBUG", raising=False)
    done = []
    writes = {"--html": lambda: 1 / 0, "--trace": lambda: done.append("trace")}
    assert write_each(writes) == ["--html"]
    assert done == ["trace"]
    assert capsys.readouterr().err.startswith("dtrrun: error: --html: ZeroDivisionError: division by zero")


def test_a_run_whose_standard_error_is_full_is_not_disturbed(shell, program, tmp_path):
    script = program("train.py", "import torch\nprint(torch.ones(3).sum().item())\n")
    run = shell(f"dtrrun --json a.json {script} 2>/dev/full")
    assert (run.status, run.out) == (0, "3.0\n")
    assert json.loads((tmp_path / "a.json").read_text())["exit_code"] == 0


LOG = """{"INSTRUCTION":"CONSTANT","NAME":"w"}
{"INSTRUCTION":"MEMORY","NAME":"w","MEMORY":"64"}
{"INSTRUCTION":"CALL","NAME":"mm","ARGS":["w"],"RESULT":["a"],"TIME":"9"}
{"INSTRUCTION":"MEMORY","NAME":"a","MEMORY":"64"}
{"INSTRUCTION":"ALIAS","NAME":"a","ALIAS":"-1"}
"""
VERBS = {
    "help": "--help",
    "version": "--version",
    "top": "top",
    "doctor": "doctor --device cpu",
    "simulate": "simulate step.log --heuristic lru --budgets 1.0 --jobs 1",
    "report": "report run.json -o -",
    "smoke": "smoke --steps 1 --budget 1MB train.py",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The text of one run's report."""
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-m", "dtrrun", "--device", "cpu", "--json", "run.json", "-c", TRAINS]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return (folder / "run.json").read_text()


@pytest.fixture
def inputs(program, report):
    program("step.log", LOG)
    program("train.py", TRAINS)
    program("run.json", report)


@pytest.mark.parametrize("verb", VERBS)
def test_a_full_standard_output_is_one_line(shell, inputs, verb):
    run = shell(f"dtrrun {VERBS[verb]} >/dev/full")
    assert (run.status, run.out) == (125, "")
    (line,) = run.ours
    assert line.endswith("standard output cannot be written: No space left on device")
    assert "Traceback" not in run.err
    assert "Exception ignored" not in run.err


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "smoke"])
def test_a_reader_of_standard_output_may_leave(environment, inputs, tmp_path, verb):
    """If the reader leaves, as with `| head`, the verb completes and prints no error."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "dtrrun", *VERBS[verb].split()]
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment, timeout=120
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
