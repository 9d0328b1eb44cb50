"""`views.final`: the table at the end of a run."""

from typing import Any

import pytest
from fake_records import EVIL, SETTINGS, on_gpu, printed, snapshot, stream, written
from rich.cells import cell_len
from view_snapshots import check

from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.record import Snapshot
from dtrrun.views.final import print_final
from dtrrun.views.html.tables import tables
from dtrrun.views.picture import line
from dtrrun.views.rates import Rates
from dtrrun.views.report import build_report
from dtrrun.views.text import change_words, host_words

LOGITS = {"name": "`logits` in evaluate at train.py:31", "why": "input mutated", "bytes": 7_000_000}
PINNED = [
    {"reason": "parameter", "bytes": 30_000_000, "storages": 120},
    {"reason": "gradient", "bytes": 30_000_000, "storages": 118},
    {"reason": "kept by the program", "bytes": 8_000_000, "storages": 4, "held_by": [LOGITS]},
]
SMALL = {
    "operator": "aten.convolution",
    "needed_bytes": 25_000_000,
    "pinned": {},
    "least_budget_bytes": 213_456_789,
    "training": {"parameters": 30_000_000, "gradients": 30_000_000, "optimizer": 60_000_000},
    "expected_bytes": 312_345_678,
}
VERIFY = RuntimeSettings(budget_bytes=200_000_000, verify=True)
CASES: dict[str, tuple[list[Snapshot], RuntimeSettings, int]] = {
    "good": ([snapshot(ended=True)], SETTINGS, 0),
    "nothing_evicted": (
        [
            snapshot(
                ended=True,
                evictions=0,
                rematerializations=0,
                rematerialization_ns=0,
                tables={"operators": []},
            )
        ],
        RuntimeSettings(),
        0,
    ),
    "too_small": (
        [snapshot(ended=True, least_budget_bytes=213_456_789, tables={"error": SMALL, "pinned": PINNED})],
        SETTINGS,
        1,
    ),
    "over_budget": (
        [
            snapshot(
                ended=True,
                over_budget=3,
                tables={
                    "pinned": PINNED,
                    "warnings": [{"text": EVIL, "count": 3}, {"text": "once", "count": 1}],
                },
            )
        ],
        SETTINGS,
        0,
    ),
    "verified": ([snapshot(ended=True, verified=1000, process_peak_bytes=612_345_678)], VERIFY, 0),
    "mismatches": (
        [
            snapshot(
                ended=True,
                verified=1000,
                verify_mismatches=2,
                tables={"mismatches": [{"operator": EVIL, "bytes": 4096, "count": 2}]},
            )
        ],
        VERIFY,
        3,
    ),
    "killed": ([snapshot(alive=False)], SETTINGS, 137),
    "ranks": ([snapshot(100 + rank, rank, ended=rank != 2, alive=False) for rank in range(4)], SETTINGS, 1),
    "gpu": ([on_gpu(snapshot(ended=True))], SETTINGS, 0),
    "gpu_violations": ([on_gpu(snapshot(ended=True), "device_delta", 3)], SETTINGS, 4),
    "gpu_ranks": (
        [
            on_gpu(snapshot(100, 0, ended=True)),
            on_gpu(snapshot(101, 1, ended=True), "nvml_new_pid", 1),
            on_gpu(snapshot(102, 2, ended=True), "reserved_overhead"),
            snapshot(103, 3, ended=True),
        ],
        SETTINGS,
        0,
    ),
    "many_ranks": ([snapshot(100 + rank, rank, ended=True) for rank in range(16)], SETTINGS, 0),
}


AT_WIDTH = {
    60: ("good", "too_small", "over_budget", "ranks", "gpu_ranks"),
    120: ("good", "ranks", "gpu_ranks"),
}
"""What has other columns or lines than at a width of 80."""


def shown(case: str, width: int, encoding: str = "utf-8") -> str:
    snapshots, settings, code = CASES[case]
    report = build_report(snapshots, settings, code, ["train.py"], 25.0)
    return printed(print_final, report, width, encoding)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("case", CASES)
def test_looks_as_it_did(case: str, width: int) -> None:
    text = shown(case, width)
    assert "\x1b" not in text  # not a terminal: no color
    assert all(cell_len(line) <= width and line == line.rstrip() for line in text.splitlines())
    if width == 80 or case in AT_WIDTH[width]:
        check(f"final_{case}_{width}", text)


def test_says_what_is_known_of_the_least_budget() -> None:
    text = " ".join(shown("too_small", 120).split())
    assert "It takes at least 214 MB for aten.convolution;" in text
    assert "parameters, gradients and the optimizer's state need about 120 MB. Try --budget 313MB " in text
    assert "`dtrrun profile` finds the least budget." in text


def test_colour_only_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    to = stream()
    monkeypatch.setattr(to, "isatty", lambda: True)
    print_final(build_report(CASES["mismatches"][0], VERIFY, 3, ["x"], 1.0), to, width=80)
    assert "\x1b[31m" in written(to)


def test_a_stream_that_knows_only_ascii() -> None:
    text = shown("good", 80, "ascii")
    assert "about 1.33 x" in text


@pytest.mark.parametrize("case", ["good", "ranks"])
def test_nothing_of_the_driver_on_the_cpu(case: str) -> None:
    assert "driver" not in shown(case, 120)
    assert "violations" not in shown(case, 120)


def test_nothing_where_there_was_no_training_process() -> None:
    assert printed(print_final, build_report([], SETTINGS, 0, ["true"], 0.1)) == ""


RULE = {"heuristic": "h_chain(c=ancestors,s=0.6,next=0,released=alike)", "since_step": 1, "source": "first"}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (RULE, "the default"),
        (RULE | {"source": "remembered"}, "learned by an earlier run"),
        (
            RULE | {"source": "searched", "since_step": 9, "share": 0.1, "share_before": 0.2},
            "learned from logged steps; since step 9; "
            "10% of the step's own work is recomputed instead of 20%",
        ),
    ],
)
def test_names_the_heuristic_and_says_where_it_comes_from(rule: Any, words: str) -> None:
    native = {"operators": 1000, "in_python": 35, "calls": []}
    report = build_report(
        [snapshot(ended=True, tables={"rule": rule, "native": native})], SETTINGS, 0, ["train.py"], 25.0
    )
    lines = printed(print_final, report, 200).splitlines()
    (line,) = (line for line in lines if line.startswith("heuristic"))
    words = f"{RULE['heuristic']}  ({words})"
    assert line.removeprefix("heuristic").strip() == words
    page = tables(report)["figures"]
    assert ("native", "96.5 %", "of 1,000 operators") in page
    name, _, settings = RULE["heuristic"].removesuffix(")").replace(",", ", ").partition("(")
    remark = words.partition("  (")[2].removesuffix(")")
    assert [row for row in page if row[0] == "heuristic"] == [("heuristic", name, f"{remark}; {settings}")]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_figure_loses_its_unit(width: int) -> None:
    long = {"peak_bytes": 123_456_789_012, "evictions": 1_234_567, "rematerializations": 1_234_567}
    ranks = [snapshot(100 + rank, rank, alive=False, **long) for rank in range(4)]
    text = printed(print_final, build_report(ranks, SETTINGS, 137, ["train.py"], 25.0), width)
    rows = [line for line in text.splitlines() if line.startswith("rank ")]
    assert len(rows) == 4
    for row in rows:
        assert "123 GB" in row
        assert "1.80 ×" in row
        assert row.endswith("killed")
        assert "…" not in row


def test_the_budget_in_which_state_stays_is_told_from_the_one_that_was_in_force():
    """The budget may have been raised before most of it left (`--over-budget raise`)."""
    host = {"host_budget_bytes": 10**9, "copies_out": 1, "copied_out_bytes": 50_000_000}
    host |= {"copies_in": 1, "copied_in_bytes": 50_000_000, "host_peak_bytes": 50_000_000}
    host |= {"left_peak_bytes": 50_000_000}
    change = {"seconds": 1.0, "step": 1, "from_bytes": 200_000_000, "to_bytes": 250_000_000}
    change |= {"reason": "too small", "operator": "aten.mm", "least_bytes": 240_000_000}

    def told(*changes: dict[str, Any]) -> str:
        one = snapshot(ended=True, tables={"budget_changes": [*changes]}, **host)
        return host_words(build_report([one], SETTINGS, 0, ["train.py"], 1.0))

    assert SETTINGS.budget_bytes == 200_000_000
    assert told().endswith("state stays inside 250 MB")
    assert told(change).endswith("state stays inside 300 MB")


def test_each_change_of_the_budget_has_its_reason():
    row: dict[str, Any] = {"pid": 1, "rank": 3, "step": 2, "seconds": 9.0, "operator": None}

    def told(reason: str, now: int, **more: Any) -> str:
        return change_words(
            row | {"reason": reason, "from_bytes": 8, "to_bytes": now} | more, several=reason == "free"
        )

    assert told("refused", 6) == "8 B to 6 B in step 2, after 9.00 s, refused more"
    assert told("free", 9) == "rank 3: 8 B to 9 B in step 2, after 9.00 s, free again"
    assert told("too small", 9, operator="aten.mm") == "8 B to 9 B in step 2, after 9.00 s, for aten.mm"


def test_each_gpu_of_a_process_has_a_line() -> None:
    other = {"device_index": 1, "resident_bytes": 80_000_000, "peak_bytes": 90_000_000}
    one = snapshot(tables={"other_devices": [other | {"footprint_peak_bytes": 150_000_000}]})
    report = build_report([one, snapshot(pid=2)], SETTINGS, 0, ["train.py"], 3.0)
    assert report["processes"][0]["other_gpus"] == [
        {
            "index": 1,
            "bytes": 80_000_000,
            "peak_bytes": 90_000_000,
            "evicted_bytes": 0,
            "footprint_peak_bytes": 150_000_000,
        }
    ]
    assert report["processes"][1]["other_gpus"] == []
    text = printed(print_final, report, 120)
    assert "cuda:1              peak 90 MB, with all else 150 MB  (75.0 % of the budget of 200 MB)" in text
    assert "200 MB + 80 MB on cuda:1, " in line(one, Rates())
