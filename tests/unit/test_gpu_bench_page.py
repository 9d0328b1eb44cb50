"""The tables and the picture of tests/bench/gpu, and what they count as missed."""

from dataclasses import replace

import pytest

from tests.bench.gpu.children import Run
from tests.bench.gpu.page import BATCH, BITS, TIME, machines, markdown, sections
from tests.bench.gpu.picture import draw

GB = 10**9


def run(ms=100.0, status="ok", kind="plain", **more):
    given = {"allocated": 8 * GB, "reserved": 9 * GB, "driver": 10 * GB, "driver_source": "process"}
    return replace(Run(status, kind, 5.0, steps_ms=[ms]), **(given | more))


def timed(**changes):
    shares = [
        {"share": 0.99, "run": run(105, kind="dtrrun", allocated=7 * GB, capped=11 * GB)},
        {"share": 0.75, "run": run(113, kind="dtrrun", allocated=6 * GB, capped=10 * GB)},
    ]
    result = {
        "case": "unet",
        "kind": "time",
        "machine": "Card",
        "plain": [run(100), run(100)],
        "peak": 8 * GB,
        "shares": shares,
        "left_out": [],
        "checkpointed": run(120, kind="checkpointed", allocated=5 * GB),
        "as_checkpointed": run(125, kind="dtrrun", allocated=5 * GB, capped=10 * GB),
    }
    return {"unet": result | changes}


def one_section(results):
    (section,) = sections(results)
    return section


def test_all_is_well():
    section = one_section(timed())
    assert section.title == TIME
    assert section.missed == []
    rows = {row[0]: row[1:] for row in section.rows}
    assert rows["0.75 of the peak"] == ["113", "1.13", "1.14", "6 GB (0.75)", "9 GB", "10 GB", "10 GB"]
    assert rows["**U-Net (6), 416 × 608**"][:3] == ["100, 100", "1", "(419 ms, 8.42 GB)"]
    assert list(rows)[-2:] == ["checkpointed by two convolutions", "same peak"]


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"shares": [{"share": 0.75, "run": run(115, capped=10 * GB)}]}, "1.15 of the plain time"),
        ({"shares": [{"share": 0.75, "run": run(110, capped=10 * GB - 1)}]}, "10 GB shown, the budget was"),
        ({"shares": [{"share": 0.75, "run": run(status="budget")}]}, "0.75 of the peak: budget"),
        ({"as_checkpointed": run(127, capped=10 * GB)}, "1.06 of its time"),
        ({"checkpointed": run(status="out of memory")}, "checkpointed: out of memory"),
        ({"left_out": ["plain again"]}, "plain again: left out"),
        ({"plain": [run(status="failed", error="boom")]}, "plain: failed: boom"),
        ({"plain": [], "left_out": ["plain"]}, "plain: no time for it"),
    ],
)
def test_what_is_missed(changes, missed):
    assert any(missed in line for line in one_section(timed(**changes)).missed)


def test_the_device_as_a_whole_is_told_apart():
    shares = [{"share": 0.75, "run": run(110, capped=10 * GB, driver_source="device")}]
    assert one_section(timed(shares=shares)).rows[1][6] == "10 GB (device)"


def bits(**changes):
    plain = run(losses=["0x1p+0"], parameters="abc")
    verified = run(report={"verify": {"storages": 40, "mismatches": 0, "operators": []}})
    ours = replace(plain, kind="dtrrun", report={"evictions": 3})
    tried = [{"share": 0.75, "run": ours}]
    result = {"case": "unet", "kind": "bits", "plain": [plain, plain], "tried": tried, "verified": verified}
    return {"unet-bits": result | changes}


def other(**changes):
    return [{"share": 0.75, "run": run(**({"losses": ["0x1p+0"], "parameters": "abc"} | changes))}]


def test_equal_bits():
    section = one_section(bits())
    assert section.title == BITS
    assert section.rows == [["U-Net (6), 416 × 608", "0.75", *["equal"] * 3, "40", "0", "–"]]
    assert section.missed == []


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"tried": other(losses=["0x1p+1"], report={"evictions": 1})}, "other bits"),
        ({"tried": other(parameters="abd", report={"evictions": 1})}, "other bits"),
        ({"tried": other(report={"evictions": 0})}, "nothing was evicted"),
        ({"tried": []}, "not measured"),
        ({"verified": run(status="no end")}, "--verify: did not end well"),
        (
            {
                "verified": run(
                    report={
                        "verify": {"storages": 9, "mismatches": 1, "operators": [{"operator": "aten.mm"}]}
                    }
                )
            },
            "--verify: aten.mm",
        ),
        ({"plain": [run(losses=["nan"], parameters="abc")] * 2}, "not finite"),
    ],
)
def test_missed_bits(changes, missed):
    assert any(missed in line for line in one_section(bits(**changes)).missed)


def test_operators_without_a_deterministic_kernel_are_named():
    plain = run(losses=["0x1p+0"], parameters="abc", no_deterministic_kernel=["max_pool"])
    section = one_section(bits(plain=[plain, replace(plain, parameters="abd")]))
    assert section.rows[0][2:5] == ["differ", "equal", "equal"]
    assert section.rows[0][-1] == "max_pool"


def batch(**changes):
    result = {
        "case": "unet",
        "kind": "batch",
        "budget": 12 * GB,
        "plain": [{"size": 7, "run": run(50)}, {"size": 8, "run": run(status="out of memory")}],
        "dtrrun": [{"size": 14, "run": run(200)}],
        "plain_largest": 7,
        "dtrrun_largest": 14,
        "incomplete": ["dtrrun"],
    }
    return {"unet-batch": result | changes}


def test_the_largest_batch():
    section = one_section(batch())
    assert section.title == BATCH
    row = ["U-Net", "batch", "7", "50", "≥ 14", "200", "10 GB", "2.00", "7 to 10 (1155 ms)"]
    assert section.rows == [row]
    assert section.missed == []


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"dtrrun_largest": 7, "dtrrun": [{"size": 7, "run": run(200)}]}, "no larger than plain"),
        ({"dtrrun_largest": None, "dtrrun": []}, "no larger than plain"),
        ({"dtrrun": [{"size": 14, "run": run(200, driver=12 * GB + 1)}]}, "shown, the budget was 12 GB"),
    ],
)
def test_missed_batches(changes, missed):
    assert any(missed in line for line in one_section(batch(**changes)).missed)


def test_what_an_interrupted_part_left_can_be_shown():
    results = {"unet-batch": {"case": "unet", "kind": "batch", "budget": 12 * GB, "plain": [], "dtrrun": []}}
    assert one_section(results).rows[0][2:6] == ["–"] * 4


def test_machines_are_named_with_their_parts_if_there_are_several():
    two = [{"case": "unet", "machine": "A"}, {"case": "lstm", "machine": "B"}]
    assert machines(two[:1]) == "A"
    assert machines(two) == "A (unet); B (lstm)"


def test_the_picture_is_linked_where_it_is():
    results = timed()
    section = one_section(results)
    assert "](pictures/gpu.svg)" in markdown(section, results, picture=True)
    assert "](pictures/gpu.svg)" not in markdown(section, results, picture=False)
    assert "`make bench-gpu` on Card." in markdown(section, results, picture=False)


def test_the_picture_has_all_that_was_measured(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "gpu.svg"
    draw([timed()["unet"], timed(plain=[])["unet"]], "Time over memory: Card", path)
    text = path.read_text()
    for label in (
        "prototype, Titan V",
        "dtrrun",
        "checkpointed by block",
        "dtrrun in the same peak",
        "U-Net",
    ):
        assert label in text
