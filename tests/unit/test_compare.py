"""dtrrun compare: what changed from one run to another; and Markdown for CI."""

import copy
import json
from pathlib import Path

import pytest
from view_snapshots import check

from dtrrun.cli.github_summary import VARIABLE
from dtrrun.views.markdown import of_profile, of_smoke

PICTURES = Path(__file__).parents[1] / "pictures"
RUN = json.loads((PICTURES / "run.json").read_text())
PROFILE = json.loads((PICTURES / "profile.json").read_text())


def later():
    """The same run, but with more memory, twice the evictions of one operator, and another option."""
    report = copy.deepcopy(RUN)
    report["peak_bytes"] = int(1.1 * RUN["peak_bytes"])
    most = max(report["operators"], key=lambda row: row["evictions"])
    most["evictions"] *= 2
    most["name"] += "|<b>"
    report["settings"]["heuristic"] = "lru"
    report["seconds"]["rematerialization"] *= 1.5
    holds = {"classes": [{"name": "parameters", "bytes": 10}, {"name": "temporaries", "bytes": 5}]}
    return report | {"holds": holds}


@pytest.fixture
def compare(tmp_path, command):
    def run(*words, before=RUN, after=None):
        paths = [tmp_path / "before.json", tmp_path / "after.json"]
        for path, report in zip(paths, (before, after or later()), strict=True):
            path.write_text(json.dumps(report))
        return command("compare", *words, *paths)

    return run


@pytest.mark.parametrize("width", [60, 80])
def test_looks_as_it_did(compare, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    before = RUN | {"holds": {"classes": [{"name": "parameters", "bytes": 8}]}}
    status, out, _ = compare(before=before)
    assert status == 0
    assert all(len(line) <= width for line in out.splitlines())
    check(f"compare_{width}", out)


def test_markdown(compare):
    status, out, _ = compare("--markdown")
    assert status == 0
    assert out.startswith("### dtrrun compare: ")
    tables = [line for line in out.splitlines() if line.startswith("|")]
    assert any(line.startswith("| peak |") and line.endswith("| +10.0 % |") for line in tables)
    assert "<b>" not in out  # names of the script are text
    assert "\\|&lt;b&gt;" in out
    assert "| heuristic |" in out


def test_a_peak_that_grows_fails(compare):
    assert compare("--max-growth", "15%")[0] == 0
    status, _, err = compare("--max-growth", "5%")
    assert status == 1
    assert "the peak has grown by 10.0 %, more than 5 %" in err
    assert compare("--max-growth", "5%", before=later(), after=RUN)[0] == 0


def test_the_summary_of_a_job(compare, tmp_path, monkeypatch):
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    monkeypatch.setenv(VARIABLE, str(path))
    assert compare("--github-summary")[0] == 0
    assert path.read_text().startswith("before\n")
    assert "### dtrrun compare" in path.read_text()
    monkeypatch.delenv(VARIABLE)
    status, _, err = compare("--github-summary")
    assert status == 2
    assert VARIABLE in err


def test_a_damaged_report(compare):
    status, _, err = compare(after=RUN | {"seconds": {}, "operators": "x"})
    assert status == 2
    assert "is damaged" in err


def test_smoke_and_profile_as_markdown():
    checks = [
        {"name": "plain run", "passed": True, "detail": "5 steps in 4.8 s"},
        {"name": "training state", "passed": False, "detail": "a|b differs"},
        {"name": "peak", "passed": None, "detail": "skipped"},
    ]
    text = of_smoke("train.py", checks, passed=False)
    assert "| training state | **failed** | a\\|b differs |" in text
    text = of_profile(PROFILE)
    assert f"dtrrun profile: {' '.join(PROFILE['target'])}".replace("_", "\\_") in text
    assert text.count("\n| ") >= len(PROFILE["points"])
