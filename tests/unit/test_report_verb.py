"""dtrrun.cli.report: the page from a JSON report, and one line of error for anything else."""

import io
import json
import stat
import sys
from pathlib import Path

import pytest

from dtrrun.cli.main import main

PICTURES = Path(__file__).parents[1] / "pictures"
RUN, PROFILE = str(PICTURES / "run.json"), str(PICTURES / "profile.json")
GOOD = json.loads(Path(RUN).read_text())


@pytest.fixture
def dtrrun(capsys):
    def run(*words):
        with pytest.raises(SystemExit) as caught:
            main(["report", *map(str, words)])
        return caught.value.code, *capsys.readouterr()

    return run


def test_a_page(dtrrun, tmp_path):
    path = tmp_path / "report.html"
    assert dtrrun(RUN, "-o", path) == (0, "", "")
    assert path.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert '"curve":[]' in path.read_text()
    assert dtrrun(RUN, "-o", path, "--profile-json", PROFILE)[0] == 0
    assert '"curve":[{' in path.read_text()


def test_from_standard_input(dtrrun, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(GOOD)))
    assert dtrrun("-", "-o", tmp_path / "x.html")[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is not a report of dtrrun"),
        ("{}", "is not the report of a run: its schema is not dtrrun.report/1"),
        ('{"schema": 1}', "is not the report of a run"),
        ('{"schema": "dtrrun.smoke/1"}', "is not the report of a run"),
        (
            '{"schema": "dtrrun.report/2"}',
            "has the format dtrrun.report/2; this version of dtrrun reads dtrrun.report/1",
        ),
        ('{"schema": "dtrrun.report/1"}', "is damaged: it has no"),
        (json.dumps({**GOOD, "peak_bytes": "x"}), "is damaged"),
        (json.dumps({**GOOD, "processes": [None]}), "is damaged"),
        (json.dumps({**GOOD, "timeline": {"processes": [{}]}}), "is damaged"),
        (json.dumps({**GOOD, "seconds": {**GOOD["seconds"], "operators": float("inf")}}), "is damaged"),
        (json.dumps({**GOOD, "operators": {"a": 1}}), "is damaged"),
    ],
)
def test_what_is_no_report(dtrrun, tmp_path, text, message):
    path = tmp_path / "run.json"
    path.write_text(text)
    status, out, err = dtrrun(path, "-o", tmp_path / "x.html")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((RUN,), "report needs -o PATH, the file to write the page to"),
        (("/nowhere/run.json", "-o", "x.html"), "/nowhere/run.json cannot be read: No such file"),
        ((RUN, "-o", "/nowhere/x.html"), "-o: /nowhere/x.html cannot be written"),
        (
            (RUN, "-o", "x.html", "--profile-json", RUN),
            f"--profile-json: {RUN} was not written by dtrrun profile --json",
        ),
        ((__file__, "-o", "x.html"), "is not JSON"),
        (("/dev/null/\x1b[2J", "-o", "x.html"), "/dev/null/�[2J cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line(dtrrun, words, message):
    status, out, err = dtrrun(*words)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
