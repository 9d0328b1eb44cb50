"""dtrrun.research.figures"""

import os
import sys
from dataclasses import asdict
from xml.etree import ElementTree

import pytest

from dtrrun.core.heuristics import ABLATION_NAMES
from dtrrun.research.figures import MissingMatplotlib, draw
from dtrrun.research.figures.slowdown import draw_slowdown
from dtrrun.research.figures.trace import trace
from dtrrun.simulator import sweep
from dtrrun.simulator.replay import simulate
from dtrrun.simulator.schedule import schedule_of
from tests.log_files import write_log
from tests.unit.simulator_logs import random_log

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    for seed in (1, 2):
        write_log(random_log(seed), folder / f"random{seed}.log")
    logs = sweep.read_facts([str(path) for path in sorted(folder.iterdir())])
    budgets = [sweep.Budget(ratio=share) for share in (1.0, 0.7, 0.4)]
    cells = sweep.cells(logs, ["h_dtr_eq", "lru", *ABLATION_NAMES[:2]], budgets)
    cells += sweep.cells(logs, ["h_dtr_eq"], budgets, ("eager", "ignore"), ("heap", "scan"), count=True)
    return {
        "logs": [asdict(log) for log in logs],
        "rows": [asdict(row) for _, row in sweep.run_all(sweep.run_cell, cells, 1)],
    }


def words(path):
    return "".join(ElementTree.parse(path).getroot().itertext())


def test_every_picture_that_the_rows_have_figures_for(result, tmp_path):
    made = draw(result, tmp_path / "new")
    assert sorted(path.name for path in made) == [
        "ablation-e_star.svg",
        "accesses.svg",
        "deallocation-h_dtr_eq.svg",
        "slowdown.svg",
        "trace-random1.svg",
        "trace-random2.svg",
    ]
    text = words(tmp_path / "new" / "slowdown.svg")
    for word in ("random1", "random2", "h_dtr_eq", "lru", "constants", "slowdown"):
        assert word in text
    assert "h'" not in text
    assert "s=yes, m=no" in words(tmp_path / "new" / "ablation-e_star.svg")
    assert "h_dtr_eq, scan" in words(tmp_path / "new" / "accesses.svg")


def test_the_same_rows_give_the_same_bytes(result, tmp_path):
    few = {"logs": result["logs"][:1], "rows": [row for row in result["rows"] if row["log"] == "random1"]}
    for format in ("svg", "png"):
        once, twice = draw(few, tmp_path / "a", format), draw(few, tmp_path / "b", format)
        assert [path.read_bytes() for path in once] == [path.read_bytes() for path in twice]
        assert len(once) == 5


def test_nothing_of_the_user_or_the_day_gets_into_a_picture(result, tmp_path, monkeypatch):
    import matplotlib as mpl

    few = {"logs": result["logs"][:1], "rows": result["rows"][:3]}
    plain = draw(few, tmp_path / "a")[0].read_text()
    with mpl.rc_context({"font.size": 20, "axes.facecolor": "red"}):
        assert draw(few, tmp_path / "b")[0].read_text() == plain
    assert "dc:date" not in plain


def test_what_did_not_do_is_marked_and_leaves_a_gap(tmp_path):
    log = {"log": "x", "peak_bytes": 100, "constant_bytes": 10, "largest_bytes": 20}
    rows = [
        {"log": "x", "heuristic": "lru", "budget_ratio": ratio, "status": status, "overhead": overhead}
        for ratio, status, overhead in (
            (1.0, "ok", 1.0),
            (0.7, "ok", 1.1),
            (0.5, "thrash", None),
            (0.3, "ok", 1.5),
        )
    ]
    lines = []
    import dtrrun.research.figures.slowdown as module

    save = module.save
    try:
        module.save = lambda figure, *_: lines.extend(figure.axes[0].get_lines())
        draw_slowdown([log], rows, lambda row: row["heuristic"], "", tmp_path, "x", "svg")
    finally:
        module.save = save
    slowdown, mark = lines
    assert [str(y) for y in slowdown.get_ydata()] == ["1.0", "1.1", "nan", "1.5"]
    assert mark.get_linestyle() == "--"
    assert mark.get_xdata()[0] == pytest.approx(0.7, abs=0.02)


def test_a_trace_is_the_run():
    schedule = schedule_of(random_log(3), "random")
    budget = schedule.peak_bytes // 2
    found, outcome = trace(schedule, budget, "lru"), simulate(schedule, budget, "lru")
    assert found.end == outcome.time
    assert max(nbytes for _, nbytes in found.memory) <= outcome.peak_bytes <= budget
    assert any(came_back for *_, came_back in found.spans)
    assert all(0 <= begin <= until <= found.end for _, begin, until, _ in found.spans)
    assert {place for place, *_ in found.spans} == set(range(found.storages))
    firsts = [place for place, _, _, came_back in found.spans if not came_back]
    assert sorted(firsts) == list(range(found.storages))


def test_without_matplotlib_it_says_what_to_install(result, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingMatplotlib, match=r"pip install matplotlib"):
        draw(result, tmp_path / "none")
    assert os.listdir(tmp_path) == []
