"""The pictures of docs/ are what today's code draws from the kept runs; `make docs-pictures` redraws them.

If a run lacks what is shown now: `make docs-runs`. Nothing here needs a browser: for a picture of a page,
its source is compared.
"""

import gzip
import json
import re
import runpy
from pathlib import Path

import pytest
from trace_format import broken_rules

from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.fields import COUNTERS
from dtrrun.views.report import build_report
from tests.pictures.__main__ import digests

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
SCRIPTS = {
    "tables.py": {"live-80.svg", "live-120.svg", "final-80.svg", "peak-80.svg"},
    "drawings.py": {"idea.svg", "how-chain.svg", "how-versions.svg", "how-time.svg"},
    "curves.py": {"slowdown.svg", "theory-trace.svg"},
}
PAGES = {"report-light.png", "report-dark.png", "report-phone.png", "perfetto.png"}
"""Pictures of pages, taken by `python -m tests.pictures`."""
VIEWS = build_report([], RuntimeSettings(), 0, [], 0.0)
"""A report with all current fields."""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("TERM", "COLORTERM", "NO_COLOR"):  # the script sets the ones that it needs
        monkeypatch.setenv(name, "")


def draw(script, folder):
    folder.mkdir()
    runpy.run_path(str(PICTURES / script))["main"](folder)
    return {path.name: path.read_text() for path in folder.iterdir()}


def words(svg):
    """Return the picture's text, as it is read."""
    return re.findall(r">([^<>]*\S[^<>]*)</(?:text|tspan)>", svg.replace("&#160;", " "))


def test_every_picture_is_made_by_a_script():
    made = set.union(*SCRIPTS.values(), PAGES)
    assert {path.name for path in PICTURES.iterdir() if path.suffix in (".svg", ".png")} == made
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    shown = {name for page in pages for name in re.findall(r"pictures/([\w-]+\.\w+)\)", page.read_text())}
    assert shown <= made
    assert made - shown <= {"report-dark.png", "report-phone.png"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_pictures_are_what_todays_code_makes(tmp_path, script):
    """They are equal byte for byte, or word for word if another version of the library drew them."""
    if script != "tables.py":
        pytest.importorskip("matplotlib")
    found = draw(script, tmp_path / "1")
    assert set(found) == SCRIPTS[script]
    for name, svg in found.items():
        kept = (PICTURES / name).read_text()
        assert not re.search(r"(href|src)=\"http|url\(['\"]?http|@import", svg), name
        library = re.search(r"Matplotlib v[\d.]+", svg)
        if library is None or library[0] not in kept:
            assert words(svg) == words(kept), f"{name} is stale: make docs-pictures"
        else:
            assert svg == kept, f"{name} is stale: make docs-pictures"


def test_pictures_are_the_same_each_time(tmp_path):
    assert draw("tables.py", tmp_path / "1") == draw("tables.py", tmp_path / "2")


def test_the_tables_are_whole(tmp_path):
    found = draw("tables.py", tmp_path / "1")
    for name in ("live-80.svg", "live-120.svg"):
        text = re.sub(r"<[^>]+>", "", found[name]).replace("&#160;", " ")
        for word in ("tensors", "peak 210 MB", "evictions", "last step", "aten.addmm", "step 6 loss"):
            assert word in text, f"{name}: {word}"
    text = re.sub(r"<[^>]+>", "", found["final-80.svg"])
    for word in ("slowdown", "process", "heuristic", "native"):
        assert word in text


def test_kept_runs_have_all_that_is_shown_today():
    runs = json.loads((PICTURES / "runs.json").read_text())
    reports = {name: runs[name] for name in ("ranks", "too_small")} | {"shown": runs["shown"]["report"]}
    reports["page"] = json.loads((ROOT / "tests" / "pictures" / "run.json").read_text())
    for name, report in reports.items():
        assert set(report) == set(VIEWS), f"{name}: make docs-runs"
        assert set(report["settings"]) == set(VIEWS["settings"]), f"{name}: make docs-runs"
        assert all(one["native"] for one in report["processes"]), f"{name} was not native: make docs-runs"
    for snapshot in (
        *runs["shown"]["snapshots"],
        *(one for run in runs["smoke"] for one in run["snapshots"]),
    ):
        assert set(snapshot["counters"]) == set(COUNTERS), "make docs-runs"
    for path in (PICTURES / "runs.json", *ROOT.glob("tests/pictures/*.json")):
        assert not re.search(r"/(tmp|home|root|work)/", path.read_text()), path


def test_the_curves_are_of_todays_simulator(tmp_path, command):
    """Check only the smallest log: replaying all of them takes minutes."""
    kept = json.loads((PICTURES / "curves.json").read_text())
    rows = [row for row in kept["rows"] if row["log"] == "resnet"]
    heuristics = ",".join(dict.fromkeys(row["heuristic"] for row in rows))
    log, found = str(ROOT / "tests" / "logs" / "resnet.log.gz"), tmp_path / "rows.json"
    words = ("simulate", log, "--heuristic", heuristics, "--jobs", "1", "--quiet", "--json", found)
    assert not command(*words)[0]
    made = json.loads(found.read_text())["rows"]
    assert [{name: row[name] for name in rows[0]} for row in made] == rows, "make docs-pictures"


def test_pages_are_as_they_were_when_their_pictures_were_taken():
    made = json.loads((PICTURES / "made.json").read_text())
    assert {f"{name}.png" for name in made} == PAGES
    for name, digest in digests().items():
        assert made[name] == digest, f"{name}.png is stale: make docs-pictures, on a machine with Chromium"


def test_the_kept_trace_is_one_of_ours():
    made = gzip.decompress((Path(__file__).parents[1] / "pictures" / "trace.json.gz").read_bytes()).decode()
    assert broken_rules(made) == []
    assert not re.search(r'"/(tmp|home|root|work)', made)
    assert (PICTURES / "perfetto.png").stat().st_size > 1000
