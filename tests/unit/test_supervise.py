"""dtrrun.cli.supervise"""

import json
import os
import tempfile

import pytest

from dtrrun.cli.options import collect
from dtrrun.cli.supervise import supervise


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run a command that is not Python, and return its status, stdout and stderr."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def run(*command, **options):
        status = supervise(collect(options, {}, tmp_path), command)
        return status, *capfd.readouterr()

    return run


def test_what_was_understood_comes_first_and_the_streams_are_the_targets(run):
    status, out, err = run("sh", "-c", "echo out; echo err >&2; exit 4", budget="200MB", device="cpu")
    assert (status, out) == (4, "out\n")
    first, second, third = err.splitlines()
    assert first == "dtrrun: budget 200 MB (200,000,000 bytes) on cpu, heuristic auto"
    assert second == "err"
    assert third.startswith("dtrrun: the target started no Python")


def test_no_budget(run):
    assert run("false")[2].startswith("dtrrun: no budget: memory is only counted, on cpu\n")


def test_a_budget_that_stands_too_far_behind(run):
    """A warning says that it is not applied; it may be meant as an option of the script."""
    for words in (["--budget", "5MB"], ["--budget=5MB"]):
        first = run("false", *words)[2].splitlines()[0]
        assert "memory is only counted, on cpu (a --budget after the target is passed to it" in first
        assert "target's where" not in run("false", *words, budget="200MB", device="cpu")[2]


def test_quiet_leaves_errors_only(run):
    assert run("sh", "-c", "exit 4", quiet=True) == (4, "", "")
    status, out, err = run("true", quiet=True)
    assert (status, out) == (125, "")
    assert err.startswith("dtrrun: error: no process ran under dtrrun")


def test_a_report_on_standard_output_comes_after_the_target(run):
    _, out, _ = run("sh", "-c", "echo '{'; exit 4", json="-")
    assert out.startswith("{\n")
    report = json.loads(out[2:])
    assert (report["exit_code"], report["command"]) == (4, ["sh", "-c", "echo '{'; exit 4"])


def test_the_folder_of_records_is_ours_alone_and_goes_with_us(run, tmp_path):
    status, out, _ = run("sh", "-c", 'stat -c %a "$DTRRUN_RECORDS"; touch "$DTRRUN_RECORDS/x"; exit 4')
    assert (status, out) == (4, "700\n")
    assert os.listdir(tmp_path) == []
