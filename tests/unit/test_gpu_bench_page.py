"""tests/bench/gpu/page.py: ratios, whether bits are equal, and what counts as missed."""

from dataclasses import replace

import pytest

from tests.bench.gpu.children import Run
from tests.bench.gpu.page import sections

GB = 10**9
PLAIN = Run(
    "ok",
    "plain",
    5.0,
    steps_ms=[100.0],
    losses=["0x1p+0"],
    parameters="abc",
    allocated=8 * GB,
    driver=10 * GB,
    driver_source="process",
)


def run(ms=100.0, **changes):
    return replace(PLAIN, steps_ms=[ms], **changes)


def ours(share=0.75, **changes):
    return [{"share": share, "run": run(**{"capped": 10 * GB, "report": {"evictions": 3}} | changes)}]


def verified(*mismatches):
    found = {
        "storages": 9,
        "mismatches": len(mismatches),
        "operators": [{"operator": one} for one in mismatches],
    }
    return run(report={"verify": found})


RESULTS = {
    "time": {
        "plain": [run(90), run(110)],
        "peak": 8 * GB,
        "shares": ours(0.99, ms=105) + ours(0.75, ms=113, allocated=6 * GB),
        "left_out": [],
        "checkpointed": run(120),
        "as_checkpointed": run(125, capped=10 * GB),
    },
    "bits": {"plain": [PLAIN, PLAIN], "tried": ours(), "verified": verified()},
    "batch": {
        "budget": 12 * GB,
        "plain": [{"size": 7, "run": run(50)}, {"size": 8, "run": run(status="out of memory")}],
        "dtrrun": [{"size": 14, "run": run(200)}],
        "plain_largest": 7,
        "dtrrun_largest": 14,
    },
}
NO_BATCH = {"plain": [], "dtrrun": [], "plain_largest": None, "dtrrun_largest": None}  # it was interrupted


def section(kind, **changes):
    (found,) = sections({"unet": {"case": "unet", "kind": kind} | RESULTS[kind] | changes})
    return found


@pytest.mark.parametrize(
    ("kind", "row", "figures"),
    [
        ("time", 2, ["113", "1.13", "1.14", "6 GB (0.75)"]),  # over the plain runs' mean; the prototype's
        ("bits", 0, ["0.75", "equal", "equal", "equal", "9", "0"]),
        ("batch", 0, ["batch", "7", "50", "14", "200", "10 GB", "2.00"]),
    ],
)
def test_what_is_as_it_should_be(kind, row, figures):
    found = section(kind)
    assert found.rows[row][1 : 1 + len(figures)] == figures
    assert found.missed == []


@pytest.mark.parametrize(
    ("kind", "changes", "missed"),
    [
        ("time", {"shares": ours(ms=115)}, "1.15 of the plain time"),
        ("time", {"shares": ours(capped=10 * GB - 1)}, "10 GB shown, the budget was"),
        ("time", {"shares": ours(status="budget")}, "0.75 of the peak: budget"),
        ("time", {"as_checkpointed": run(127)}, "1.06 of its time"),
        ("time", {"checkpointed": run(status="out of memory")}, "checkpointed: out of memory"),
        ("time", {"left_out": ["plain again"]}, "plain again: left out"),
        ("time", {"plain": [run(status="failed", error="boom")]}, "plain: failed: boom"),
        ("time", {"plain": [], "left_out": ["plain"]}, "plain: no time for it"),
        ("bits", {"tried": ours(losses=["0x1p+1"])}, "other bits"),
        ("bits", {"tried": ours(parameters="abd")}, "other bits"),
        ("bits", {"tried": ours(report={"evictions": 0})}, "nothing was evicted"),
        ("bits", {"tried": []}, "not measured"),
        ("bits", {"verified": run(status="no end")}, "--verify: did not end well"),
        ("bits", {"verified": verified("aten.mm")}, "--verify: aten.mm"),
        ("bits", {"plain": [run(losses=["nan"])] * 2}, "not finite"),
        ("batch", {"dtrrun_largest": 7, "dtrrun": [{"size": 7, "run": run(200)}]}, "no larger than plain"),
        ("batch", {"dtrrun_largest": None, "dtrrun": []}, "no larger than plain"),
        ("batch", NO_BATCH, "no larger than plain"),
        ("batch", {"dtrrun": [{"size": 14, "run": run(driver=12 * GB + 1)}]}, "shown, the budget was 12 GB"),
    ],
)
def test_what_is_missed(kind, changes, missed):
    assert any(missed in line for line in section(kind, **changes).missed)


def test_plain_runs_with_other_bits_are_told_apart():
    first = replace(PLAIN, no_deterministic_kernel=["max_pool"])
    [row] = section("bits", plain=[first, replace(first, parameters="abd")]).rows
    assert (row[2:5], row[-1]) == (["differ", "equal", "equal"], "max_pool")


def test_a_figure_of_the_whole_device_is_told_apart():
    assert section("time", shares=ours(driver_source="device")).rows[1][6] == "10 GB (device)"
