"""dtrrun.cli.simulate"""

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.log_files import write_log
from tests.unit.simulator_logs import random_log
from tests.waiting import until


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "random.log"
    write_log(random_log(7), path)
    return str(path)


@pytest.fixture
def simulate(command):
    return partial(command, "simulate")


def test_rows_and_tables(log, tmp_path, simulate):
    path = tmp_path / "rows.json"
    words = ("--heuristic", "lru,h'(s=no,m=yes,c=local)", log, "--budgets", "1.0,50%,400B", "--jobs", "1")
    status, out, err = simulate(*words, "--json", path)
    assert (status, err) == (0, "")
    assert "random" in out
    assert "lru" in out
    found = json.loads(path.read_text())
    assert found["schema"] == "dtrrun.simulation/1"
    assert [(row["heuristic"], row["budget_ratio"]) for row in found["rows"][:2]] == [
        ("lru", 1.0),
        ("lru", 0.5),
    ]
    assert found["rows"][2]["budget_bytes"] == 400
    assert len(found["rows"]) == 6
    assert {
        "log",
        "heuristic",
        "budget_ratio",
        "budget_bytes",
        "status",
        "overhead",
        "evictions",
        "rematerializations",
        "evaluations",
        "seconds",
    } <= set(found["rows"][0])
    assert found["logs"][0]["path"] == log


def test_json_on_standard_output_moves_the_tables(log, simulate):
    status, out, err = simulate(log, "--heuristic", "lru", "--jobs", "1", "--json", "-")
    assert (status, len(json.loads(out)["rows"])) == (0, 10)
    assert "overhead" in err


def test_a_folder_is_all_of_its_logs(log, tmp_path, simulate):
    (tmp_path / "another.log").write_text(Path(log).read_text())
    (tmp_path / "notes.txt").write_text("no log")
    status, out, _ = simulate(tmp_path, "--heuristic", "lru", "--jobs", "1", "--no-paper-ties")
    assert status == 0
    assert out.index("another") < out.index("random")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("LOG --heuristic h_dt", "did you mean h_dtr?"),
        ("LOG --heuristic=", "--heuristic: unknown heuristic ''"),
        ("LOG --limit=", "--limit: '' is not"),
        ("LOG --heuristic os:getcwd --jobs 1", "os:getcwd"),
        ("LOG --budgets 200", "--budgets: '200' is neither"),
        ("LOG --budgets 0.5,2XB", "--budgets: '2XB' has an unknown unit"),
        ("LOG --budgets 0", "--budgets: '0' is neither"),
        ("LOG --budgets ,", "--budgets: '' is not a size"),
        ("LOG --deallocation soon", "--deallocation: 'soon' is not one of eager"),
        ("LOG --limit 1", "--limit: '1' is not above 1"),
        ("LOG --jobs 0", "--jobs: 0 is less than 1"),
        ("LOG --format gif", "--format: 'gif' is not one of svg, png"),
        ("LOG --planners soon", "--planners: 'soon' is not one of chen_sqrt"),
        ("LOG --semantics dtrrun", "dtrrun"),
        ("LOG --host-budget 4GB", "needs a log that dtrrun record has written"),
        ("LOG --host-budget 4GB --host-bandwidth 25GB", "'25GB' is not a bandwidth; write one like 25GB/s"),
        ("LOG --host-bandwidth 25GB/s", "--host-bandwidth needs --host-budget"),
        ("LOG --paper --host-budget 4GB", "--paper is about the paper's runtime"),
        ("--theory linear --host-budget 4GB", "cannot be combined with --host-budget"),
        ("LOG --search far", "--search: 'far' is not one of heap, scan"),
        ("LOG --figures BAD", "--figures: "),
        ("LOG --json FOLDER/no/x.json", "cannot be written"),
        ("BAD", "bad.log, line 2: unknown instruction 'X'"),
        ("", "Missing argument"),
        ("LOG --what", "No such option: --what"),
    ],
)
def test_bad_input_is_one_line_and_status_2(log, tmp_path, refused, words, message):
    (tmp_path / "bad.log").write_text('{"INSTRUCTION": "RELEASE", "NAME": "x"}\n{"INSTRUCTION": "X"}\n')
    for word, meant in (("LOG", log), ("BAD", str(tmp_path / "bad.log")), ("FOLDER", str(tmp_path))):
        words = words.replace(word, meant)
    assert message in refused("simulate", *words.split())


def test_a_heuristic_of_the_users_own(log, tmp_path, simulate, monkeypatch):
    (tmp_path / "mine_to_try.py").write_text(
        "def score(size, staleness, cost, projected_cost): return -size\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    _, out, _ = simulate(log, "--heuristic", "mine_to_try:score,size", "--jobs", "1", "--budgets", "1.0,0.6")
    mine, paper = out.splitlines()[-2:]
    assert mine.split()[1:] == paper.split()[1:]


def test_a_host_tier(tmp_path, simulate):
    """What it gives: budgets that are too small without it, and a table of what it takes."""
    log, rows = str(Path(__file__).parents[1] / "logs" / "vae.log.gz"), tmp_path / "rows.json"
    words = (log, "--heuristic", "h_dtr_eq", "--jobs", "1", "--budgets", "0.5,0.2", "--limit", "50")
    found = {}
    for more in ((), ("8GB/s",), ("80GB/s",)):
        options = ["--host-budget", "1GB", "--host-bandwidth", *more] if more else ["--semantics", "dtrrun"]
        status, out, _ = simulate(*words, "--json", rows, *options)
        assert (status, "on the host" in out) == (0, bool(more))
        found[more] = json.loads(rows.read_text())["rows"]
    (alone, without), (ample, slow), (_, fast) = found.values()
    assert (without["status"], slow["status"], fast["status"]) == ("oom", "ok", "ok")
    assert ample["overhead"] <= alone["overhead"]
    assert min(slow["copies_out"], slow["copies_in"], slow["host_peak_bytes"]) > 0
    assert slow["overhead"] > fast["overhead"]


def test_pictures(log, tmp_path, simulate):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "pictures"
    words = (log, "--heuristic", "lru", "--jobs", "1", "--budgets", "1.0,0.6", "--format", "png")
    status, _, err = simulate(*words, "--figures", folder)
    assert status == 0
    assert sorted(path.name for path in folder.iterdir()) == ["slowdown.png", "trace-random.png"]
    assert f"dtrrun: wrote {folder / 'slowdown.png'}" in err


def test_pictures_without_matplotlib_are_refused_at_once(log, tmp_path, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused("simulate", log, "--figures", tmp_path / "new")


def test_the_papers_evaluation(log, tmp_path, simulate):
    path = tmp_path / "rows.json"
    status, out, _ = simulate(log, "--paper", "--budgets", "1.0,0.6", "--jobs", "1", "--json", path)
    assert status == 0
    rows = json.loads(path.read_text())["rows"]
    cells = [
        tuple(row[key] for key in ("heuristic", "deallocation", "search", "budget_ratio")) for row in rows
    ]
    assert len(cells) == len(set(cells)) == 2 * (3 * 2 + 4 + 16 + 2)
    counted = {row["heuristic"] for row in rows if row["accesses"] is not None}
    assert counted == {"h_dtr", "h_dtr_eq", "h_dtr_local"}
    assert {row["deallocation"] for row in rows} == {"eager", "banish", "ignore"}
    assert "accesses" in out
    assert "h_dtr, banish" in out


def test_ctrl_c_keeps_what_was_done(log, tmp_path):
    """The two quick rows are kept when a sleeping heuristic is interrupted."""
    (tmp_path / "napping.py").write_text(
        "import pathlib, time\n"
        "def score(size, staleness, cost, projected_cost):\n"
        "    pathlib.Path('asleep').touch()\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "dtrrun", "simulate", log, "--heuristic", "lru,napping:score"]
    command += ["--budgets", "1.0,0.6", "--jobs", "1", "--json", "rows.json"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    until((tmp_path / "asleep").exists)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "interrupted: 2 of 4 were done" in err
    assert "Traceback" not in err
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 2


def test_help_names_the_verb_and_its_options(simulate):
    _, out, _ = simulate("--help")
    assert "dtrrun simulate [OPTIONS]" in out
    for word in ("LOG", "--heuristic", "--budgets", "--deallocation", "--limit", "--json", "130"):
        assert word in out
