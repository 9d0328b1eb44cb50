"""dtrrun.cli.report: the page from a JSON report, and one line of error for anything else."""

import io
import json
import re
import stat
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fake_records import SETTINGS, snapshot

from dtrrun.views.report import build_report

PICTURES = Path(__file__).parents[1] / "pictures"
RUN, PROFILE = str(PICTURES / "run.json"), str(PICTURES / "profile.json")
GOOD = json.loads(Path(RUN).read_text())


@pytest.fixture
def dtrrun(command):
    return partial(command, "report")


def test_a_page(dtrrun, tmp_path):
    path = tmp_path / "report.html"
    assert dtrrun(RUN, "-o", path) == (0, "", "")
    assert path.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert '"curve":[]' in path.read_text()
    assert dtrrun(RUN, "-o", path, "--profile-json", PROFILE)[0] == 0
    assert '"curve":[{' in path.read_text()


def test_without_a_page_the_final_table_is_printed_once_more(dtrrun):
    status, out, err = dtrrun(RUN)
    assert (status, err) == (0, "")
    assert out.startswith("dtrrun ──")
    assert "costliest to rematerialize" in out


def of_rank(rank, peak, operator, **more):
    tables = {
        "operators": [{"name": operator, "rematerializations": 3, "seconds": 1.0 + rank, "bytes": 5}],
        "places": [{"module": "a", "line": "b", "name": "c", "rematerializations": 1, "seconds": 1.5}],
        "pinned": [{"reason": "parameter", "bytes": 7, "storages": 2, "held_by": []}],
        "warnings": [{"text": "careful", "count": 2}],
        "native": {"operators": 100, "in_python": rank, "read_by_address": 0, "calls": []},
        "compiled": {"graphs": 1, "kernels": 2, "opaque": 0},
        "step_slowdown": 1.2 + rank / 10,
    }
    tables |= more.pop("tables", {})
    return snapshot(4000 + rank, rank, tables=tables, ended=True, peak_bytes=peak, **more)


def test_the_reports_of_nodes_become_one_as_if_one_command_had_run_them(dtrrun, tmp_path):
    change = {"seconds": 2.0, "step": 1, "from_bytes": 5, "to_bytes": 6, "reason": "refused"}
    ranks = [
        of_rank(0, 180_000_000, "aten.mm"),
        of_rank(1, 150_000_000, "aten.add", host_budget_bytes=10, copies_out=3, left_peak_bytes=5),
        of_rank(
            2, 190_000_000, "aten.mm", tables={"error": {"operator": "aten.mm"}, "budget_changes": [change]}
        ),
        of_rank(3, 170_000_000, "aten.mm", verified=7, oom_retries=2, steps=50),
    ]
    command = ["torchrun", "train.py"]
    for name, some in (("b", ranks[2:]), ("a", ranks[:2])):
        made = build_report(some, SETTINGS, 0, command, 10.0)
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    whole = json.loads(json.dumps(build_report(ranks, SETTINGS, 0, command, 10.0)))
    paths = [tmp_path / f"{name}.json" for name in "ab"]
    assert dtrrun(*paths, "--json", tmp_path / "all.json") == (0, "", "")
    merged = json.loads((tmp_path / "all.json").read_text())
    assert {one.pop("report") for one in merged["processes"]} == {None}
    assert merged.pop("seconds") == pytest.approx(whole.pop("seconds"))
    assert merged.pop("slowdown_estimate") == pytest.approx(whole.pop("slowdown_estimate"))
    assert merged == whole
    for path in paths:  # as a batch system writes them
        folder = tmp_path / f"run-{path.stem}"
        folder.mkdir()
        path.rename(folder / "report.json")
        (folder / "other.json").write_text("{}")
    paths = [tmp_path / "run-a", tmp_path / "run-b"]
    _, out, _ = dtrrun(*reversed(paths))
    assert "4; the largest peak: rank 2 (190 MB); the slowest: rank 3 (1.50 ×)" in " ".join(out.split())
    assert [line.split()[1] for line in out.splitlines() if line.startswith("rank ")] == ["0", "1", "2", "3"]
    assert dtrrun(*paths, "-o", tmp_path / "all.html")[0] == 0
    assert "rank 3 (pid 4003)" in (tmp_path / "all.html").read_text()


def test_what_differs_between_reports_is_told(dtrrun, tmp_path):
    for name, settings in (("x", SETTINGS), ("y", replace(SETTINGS, heuristic="lru"))):
        made = build_report([of_rank(0, 1, "aten.mm")], settings, 0, ["python", f"{name}.py"], 10.0)
        (tmp_path / f"{name}.json").write_text(json.dumps(made))
    _, out, _ = dtrrun(tmp_path / "x.json", tmp_path / "y.json")
    said = " ".join(out.split())
    assert "the reports differ in heuristic, command; what is shown is that of x" in said
    assert "2 (peaks and slowdowns are alike)" in said
    assert re.findall(r"(\w) rank 0 ", said) == ["x", "y"]  # ranks do not tell which they are
    (tmp_path / "empty").mkdir()
    assert (
        dtrrun(tmp_path / "empty")[2]
        == f"dtrrun: error: no file *.json in {tmp_path}/empty is the report of a run\n"
    )
    (tmp_path / "y.json").write_text("{}")
    assert dtrrun(tmp_path / "x.json", tmp_path / "y.json")[0] == 2


def test_from_standard_input(dtrrun, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(GOOD)))
    assert dtrrun("-", "-o", tmp_path / "x.html")[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "is not a report of dtrrun"),
        ("{}", "is not the report of a run: its schema is not dtrrun.report/1"),
        ('{"schema": 1}', "is not the report of a run"),
        ('{"schema": "dtrrun.smoke/1"}', "is not the report of a run"),
        (
            '{"schema": "dtrrun.report/2"}',
            "has the format dtrrun.report/2; this version of dtrrun reads dtrrun.report/1",
        ),
        (json.dumps({**GOOD, "peak_bytes": "x"}), "is damaged"),
        (json.dumps({**GOOD, "processes": [None]}), "is damaged"),
        (json.dumps({**GOOD, "timeline": {"processes": [{}]}}), "is damaged"),
        (json.dumps({**GOOD, "seconds": {**GOOD["seconds"], "operators": float("inf")}}), "is damaged"),
        (json.dumps({**GOOD, "operators": {"a": 1}}), "is damaged"),
    ],
)
def test_what_is_no_report(refused, tmp_path, text, message):
    path = tmp_path / "run.json"
    path.write_text(text)
    assert message in refused("report", path, "-o", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "report needs RUN, a report that dtrrun --json has written"),
        ((RUN, "--profile-json", PROFILE), "--profile-json needs -o PATH, the file to write the page to"),
        ((RUN, "-o", "x", "--json", "x"), "-o and --json both write to x"),
        ((RUN, "-o", "/nowhere/x.html"), "-o: /nowhere/x.html cannot be written"),
        (
            (RUN, "-o", "x.html", "--profile-json", RUN),
            f"--profile-json: {RUN} was not written by dtrrun profile --json",
        ),
        (("/dev/null/\x1b[2J", "-o", "x.html"), "/dev/null/�[2J cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line(refused, words, message):
    assert message in refused("report", *words)
