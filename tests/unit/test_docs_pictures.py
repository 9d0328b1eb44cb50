"""The scripts that draw the pictures of docs/, from the kept run."""

import gzip
import re
import runpy
from pathlib import Path

import pytest
from trace_format import broken_rules

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
TABLES = {"live-80.svg", "live-120.svg", "final-80.svg"}
DRAWINGS = {"idea.svg", "how-chain.svg", "how-versions.svg", "how-time.svg"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("TERM", "COLORTERM", "NO_COLOR"):  # the script sets what it needs
        monkeypatch.setenv(name, "")


def draw(script, folder):
    folder.mkdir()
    runpy.run_path(str(PICTURES / script))["main"](folder)
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(("script", "names"), [("tables.py", TABLES), ("drawings.py", DRAWINGS)])
def test_pictures_are_the_same_each_time_and_ask_for_nothing(tmp_path, script, names):
    if script == "drawings.py":
        pytest.importorskip("matplotlib")
    first, second = draw(script, tmp_path / "1"), draw(script, tmp_path / "2")
    assert first == second
    assert set(first) == names
    for name, svg in first.items():
        assert (PICTURES / name).stat().st_size > 1000, f"{name}: make docs-pictures"
        assert not re.search(r"(href|src)=\"http|url\(['\"]?http|@import", svg), name


def test_the_tables_are_whole(tmp_path):
    found = draw("tables.py", tmp_path / "1")
    for name in ("live-80.svg", "live-120.svg"):
        text = re.sub(r"<[^>]+>", "", found[name]).replace("&#160;", " ")
        for word in ("tensors", "peak 210 MB", "evictions", "last step", "aten.addmm", "step 6 loss"):
            assert word in text, f"{name}: {word}"
    assert "slowdown" in found["final-80.svg"]
    assert "/tmp" not in (PICTURES / "runs.json").read_text()


def test_the_kept_trace_is_one_of_ours():
    made = gzip.decompress((Path(__file__).parents[1] / "pictures" / "trace.json.gz").read_bytes()).decode()
    assert broken_rules(made) == []
    assert not re.search(r'"/(tmp|home|root|work)', made)
    assert (PICTURES / "perfetto.png").stat().st_size > 1000
