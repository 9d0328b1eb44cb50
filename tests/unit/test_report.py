"""`views.report`: the report, and that its page in docs names its fields."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from fake_records import EVIL, SETTINGS, printed, snapshot

from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.driver import SOURCES, DriverUse
from dtrrun.telemetry.record import Snapshot
from dtrrun.views.final import print_final
from dtrrun.views.report import PRIVATE, build_report
from dtrrun.views.text import SOURCE

PAGE = Path(__file__).parents[2] / "docs" / "report.md"
CODE = Path(__file__).parents[2] / "dtrrun"
TABLES = {
    "pinned": [{"reason": "gradient", "bytes": 5, "storages": 2, "held_by": []}],
    "warnings": [{"text": EVIL, "count": 3}],
    "native": {
        "operators": 9,
        "in_python": 2,
        "read_by_address": 1,
        "calls": [{"name": "my.op", "count": 2}],
    },
    "rule": {"heuristic": "size", "since_step": 3, "source": "searched", "predicted": 1.5, "share": "wrong"},
    "mismatches": [{"operator": "my.op", "bytes": 7, "count": 1}],
    "error": {
        "operator": "aten.mm",
        "needed_bytes": 9,
        "pinned": {"gradient": 5},
        "least_budget_bytes": 14,
        "called": "aten.cat",
        "called_bytes": 20,
        "training": {"parameters": 2, "gradients": 2, "optimizer": 4},
        "expected_bytes": 24,
        "expected_slowdown": 1.0,
        "likely_bytes": 24,
        "plain_bytes": 0,
        "basis": "steps",
        "hint": "",
        "held_by": {},
        "holds": None,
    },
}


def test_one_process() -> None:
    report = build_report([snapshot(ended=True)], SETTINGS, 0, ["train.py", "--lr", "1"], 25.0)
    assert report["schema"] == "dtrrun.report/1"
    assert report["command"] == ["train.py", "--lr", "1"]
    assert report["budget_bytes"] == 200_000_000
    assert report["peak_bytes"] == 199_800_000
    assert report["evictions"] == 1234
    assert report["rematerialized_bytes"] == 3_200_000_000
    assert report["elapsed_seconds"] == 25.0
    assert report["slowdown_estimate"] == pytest.approx(23.4 / (23.4 - 4.2 - 0.4 - 0.06 - 1.2))
    assert report["operators"][0]["name"] == "aten.convolution"
    assert report["least_budget_bytes"] is None
    assert report["error"] is None
    assert "record_dir" not in report["settings"]
    [process] = report["processes"]
    assert (process["pid"], process["status"]) == (4711, "ended")
    assert {name: report[name] for name in process if name in report} == {
        name: value for name, value in process.items() if name in report
    }


def test_the_resident_set_is_the_largest_processs() -> None:
    assert build_report([snapshot()], SETTINGS, 0, ["x"], 1.0)["process_peak_bytes"] is None
    two = [snapshot(1, 0, process_peak_bytes=7), snapshot(2, 1, process_peak_bytes=9)]
    report = build_report(two, SETTINGS, 0, ["x"], 1.0)
    assert report["process_peak_bytes"] == 9
    assert [process["process_peak_bytes"] for process in report["processes"]] == [7, 9]


def test_the_last_step() -> None:
    run = snapshot(ended=True)
    step = build_report([run], SETTINGS, 0, ["x"], 25.0)["processes"][0]["last_step"]
    assert (step["index"], step["peak_bytes"]) == (41, 199_800_000)
    assert step["seconds"]["rematerialization"] == pytest.approx(0.08)
    assert step["slowdown_estimate"] == pytest.approx(400 / (400 - 80 - 8 - 1 - 20))
    run.tables["step"] = None
    assert build_report([run], SETTINGS, 0, ["x"], 25.0)["processes"][0]["last_step"] is None


def test_several_processes() -> None:
    report = build_report(
        [snapshot(1, 0), snapshot(2, 1, peak_bytes=7, alive=False)], SETTINGS, 0, ["x"], 25.0
    )
    assert report["peak_bytes"] == 199_800_000
    assert report["evictions"] == 2468
    assert report["steps"] == 42
    assert report["seconds"]["wall"] == pytest.approx(46.8)
    assert [(p["rank"], p["peak_bytes"], p["status"]) for p in report["processes"]] == [
        (0, 199_800_000, "running"),
        (1, 7, "killed"),
    ]


USE = DriverUse("GPU-a", 5_900_000_000, 6_100_000_000, "nvml_pid", 2, 100_000_000)


def test_how_long_ranks_wait_for_the_one_that_recomputes_longest() -> None:
    def rank(number: int, *overheads: int, world: str | None = "one") -> Snapshot:
        steps = [
            {"index": index, "wall_ns": 100, "rematerialization_ns": most, "bookkeeping_ns": 1}
            for index, most in enumerate(overheads, 1)
        ]
        found = snapshot(number, number, tables={"latest_steps": steps})
        return replace(found, meta=found.meta | {"world": world})

    ranks = [rank(0, 90, 10, 20), rank(1, 0, 30, 20, 90), rank(2, 0, 10, 40)]
    others = [rank(3, 0, 90, world="another"), rank(4, 0, 90, world=None)]
    report = build_report([*ranks, *others], SETTINGS, 0, ["x"], 1.0)
    shares = [process["waited_share"] for process in report["processes"]]  # of the second step and the third
    assert shares == [0.2, 0.1, 0.1, None, None]
    rows = [line for line in shown(report).splitlines() if line.startswith("rank ")]
    assert [re.findall("[0-9]+ %|–", row) for row in rows] == [["20 %"], ["10 %"], ["10 %"], ["–"], ["–"]]


def test_what_the_driver_shows() -> None:
    estimate = replace(USE, source="reserved_overhead", peak_bytes=1, violations=1, most_over_bytes=7)
    both = [replace(snapshot(1, 0), driver=USE), replace(snapshot(2, 1), driver=estimate), snapshot(3, 2)]
    report = build_report(both, SETTINGS, 0, ["x"], 1.0)
    assert report["driver_peak_bytes"] == 6_100_000_000
    assert report["driver_source"] == "reserved_overhead"
    assert report["violations"] == {"count": 3, "most_bytes": 100_000_000}
    first, second, third = report["processes"]
    assert (first["driver_device"], first["driver_bytes"]) == ("GPU-a", 5_900_000_000)
    assert (first["driver_peak_bytes"], first["driver_source"]) == (6_100_000_000, "nvml_pid")
    assert second["violations"] == {"count": 1, "most_bytes": 7}
    names = ("driver_device", "driver_bytes", "driver_peak_bytes", "driver_source", "violations")
    assert {third[name] for name in names} == {None}


def test_on_the_cpu_there_is_no_driver() -> None:
    report = build_report([snapshot()], SETTINGS, 0, ["x"], 1.0)
    assert report["driver_peak_bytes"] is report["driver_source"] is report["violations"] is None


def native(*calls: tuple[str, int], operators: int) -> dict[str, Any]:
    rows = [{"name": name, "count": count} for name, count in calls]
    return {
        "native": {
            "operators": operators,
            "in_python": sum(n for _, n in calls),
            "read_by_address": 0,
            "calls": rows,
        }
    }


def test_which_operators_went_to_python() -> None:
    first = snapshot(1, tables=native(("aten.cat", 3), ("aten.sort", 1), operators=1000))
    second = snapshot(2, tables=native(("aten.sort", 4), operators=1000))
    both = build_report([first, second, snapshot(3)], SETTINGS, 0, ["x"], 1.0)
    assert both["native"] == native(("aten.sort", 5), ("aten.cat", 3), operators=2000)["native"]
    assert [process["native"] for process in both["processes"]] == [
        first.tables["native"],
        second.tables["native"],
        None,
    ]
    assert re.search(r"native +99\.6 % of 2,000 operators\n", shown(both))
    for none in ({}, {"native": None}, native(operators=0)):
        assert "native " not in shown(build_report([snapshot(tables=none)], SETTINGS, 0, ["x"], 1.0))


def test_no_process() -> None:
    report = build_report([], SETTINGS, 125, ["true"], 0.1)
    assert (report["processes"], report["peak_bytes"], report["slowdown_estimate"]) == ([], 0, None)


@pytest.mark.parametrize(("counted", "said"), [(-1, None), (0, 200_000_000), (5, 5)])
def test_budget_of_a_process(counted: int, said: int | None) -> None:
    report = build_report([snapshot(budget_bytes=counted)], SETTINGS, 0, ["x"], 1.0)
    assert report["processes"][0]["budget_bytes"] == said


def test_a_budget_too_small() -> None:
    report = build_report([snapshot(tables=TABLES, least_budget_bytes=14)], SETTINGS, 1, ["x"], 1.0)
    assert report["least_budget_bytes"] == 14
    assert report["error"] == TABLES["error"] | {"pid": 4711, "rank": None}
    assert report["pinned"] == TABLES["pinned"]


def test_the_rule_of_a_process() -> None:
    report = build_report([snapshot(tables=TABLES), snapshot(2)], SETTINGS, 0, ["x"], 1.0)
    one, other = (process["rule"] for process in report["processes"])
    assert other is None
    assert (one["heuristic"], one["since_step"], one["predicted"]) == ("size", 3, 1.5)
    assert one["share"] is None


def test_it_is_json() -> None:
    report = build_report([snapshot(tables=TABLES), snapshot(2)], SETTINGS, 0, ["x"], 1.0)
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_a_record_that_had_only_begun() -> None:
    report = build_report([Snapshot(5, {"pid": 5}, {})], SETTINGS, 137, ["x"], 1.0)
    assert (report["evictions"], report["processes"][0]["rank"]) == (0, None)


def described(heading: str) -> set[str]:
    """Return the fields in the table of a section of the page."""
    section = PAGE.read_text().split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_the_page_names_reasons_that_exist():
    section = PAGE.read_text().split("\n## Why memory is pinned\n")[1].split("\n## ")[0]
    paths = [path for part in ("core", "native", "runtime") for path in (CODE / part).rglob("*.*")]
    code = "".join(path.read_text() for path in paths if path.suffix in (".py", ".h"))
    rows = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    reasons = [reason for row in rows for reason in re.findall("`(.+?)`", row)]
    assert len(reasons) > 30
    assert [reason for reason in reasons if f'"{reason}"' not in code] == []
    patterns = (
        r'as_pin\("([^"]+)"\)',
        r'(?:make_constant|\.pin|_hand_out|escape\w*)\([^"()\n]*, "([^"\n]+)"',
        r'\.pin = [^"\n]*"([^"\n]+)"',
    )
    given = {reason for pattern in patterns for reason in re.findall(pattern, code)}
    assert len(given) > 20
    assert sorted(given - set(reasons)) == []


def test_the_page_describes_each_field_and_no_other() -> None:
    report = build_report([snapshot(tables=TABLES, least_budget_bytes=14)], SETTINGS, 1, ["x"], 1.0)
    [process] = report["processes"]
    assert described("The run") == set(report)
    assert described("`seconds`") == set(report["seconds"])
    assert described("`native`") == set(report["native"])
    assert described("`rule`") == set(process["rule"])
    assert described("`verify`") == set(report["verify"])
    assert described("`error`") == set(report["error"])
    for name in ("operators", "pinned", "warnings"):
        assert described(f"`{name}[]`") == set(report[name][0])
    assert described("`processes[]`") == set(process) - set(report) - {"budget_bytes"}
    text = PAGE.read_text()
    sources = text.split("\n## `driver_source`\n")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", sources, re.MULTILINE)) == SOURCES == tuple(SOURCE)
    shared = re.search(r"Each entry has the fields(.*?), for that", text, re.DOTALL)
    assert shared
    assert set(re.findall(r"`(\w+)`", shared[1])) == set(process) & set(report)
    settings = text.split("\n## `settings`\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", settings)) == {f.name for f in fields(RuntimeSettings)} - set(PRIVATE)


def test_operators_that_were_run_again() -> None:
    runs = [snapshot(pid=1, oom_retries=2), snapshot(pid=2, oom_retries=3)]
    report = build_report(runs, SETTINGS, 0, ["train.py"], 1.0)
    assert report["oom_retries"] == 5
    assert [process["oom_retries"] for process in report["processes"]] == [2, 3]
    assert "5 operators run again" in shown(report)
    assert "run again" not in shown(build_report([snapshot()], SETTINGS, 0, ["train.py"], 1.0))


def shown(report: dict[str, Any]) -> str:
    return printed(print_final, report)
