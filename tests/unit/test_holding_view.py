"""`views.holding`: what holds the peak, on a terminal and on the page."""

import json

import pytest
from fake_records import EVIL, SETTINGS, printed, snapshot
from rich.cells import cell_len
from test_html import Elements
from view_snapshots import check

from dtrrun.telemetry.holding import CLASSES, GRADIENTS, PARAMETERS, STATE, as_lines, class_remedy
from dtrrun.views.holding import NOT_SEEN, lines_of, print_peak, short
from dtrrun.views.html import page
from dtrrun.views.report import build_report


def amount(nbytes, seconds=0.0, evictable=True):
    return {
        "bytes": nbytes,
        "storages": 4,
        "evictable_bytes": nbytes if evictable else 0,
        "recompute_seconds": seconds,
    }


def place(of, module, alike, line, operator, nbytes, seconds):
    row = {"class": of, "module": module, "alike": alike, "line": line, "operator": operator}
    return row | amount(nbytes, seconds)


SAVED, TRAIN = "saved for backward", "/home/me/train.py"
HOLDS = {
    "bytes": 420_000_000,
    "resident_bytes": 420_000_000,
    "step_bytes": 440_000_000,
    "step": 3,
    "operator": "aten._log_softmax_backward_data",
    "phase": "backward",
    "module": "GPT",
    "line": "/home/me/train.py:64",
    "classes": [
        {"name": "saved for backward", **amount(384_000_000, 0.082)},
        {"name": "optimizer state", **amount(13_100_000, evictable=False)},
        {"name": "kept by the program", **amount(12_900_000, evictable=False)},
        {"name": "parameters", **amount(6_500_000, evictable=False)},
        {"name": "temporaries", **amount(3_000_000)},
        {"name": "batch", **amount(500_000, evictable=False)},
    ],
    "places": [
        place(SAVED, "blocks.*.attention", 8, f"{TRAIN}:26", "aten.bmm", 102_000_000, 0.02),
        place(SAVED, "blocks.*.attention", 8, f"{TRAIN}:27", "aten._softmax", 100_000_000, 0.01),
        place(SAVED, "blocks.*.mlp.up", 8, f"{TRAIN}:41", "aten.addmm", 139_000_000, 0.043),
        place("saved for backward", "", 1, "/home/me/train.py:64", "aten._log_softmax", 43_000_000, 0.009),
        place("temporaries", "", 1, "/home/me/train.py:64", "aten.nll_loss_backward", 3_000_000, 0.001),
        place("kept by the program", "", 1, "", "", 12_900_000, 0.0),
    ],
    "variables": [
        {"name": "allp", "place": "in evaluate at train.py:29", "how": "container", **amount(9_000_000)},
        {"name": "logits", "place": "at train.py:64", "how": "variable", **amount(3_900_000)},
    ],
    "largest": {
        "operator": "aten._log_softmax",
        "module": "GPT",
        "line": "/home/me/train.py:64",
        "bytes": 129_000_000,
        "storages": 3,
        "logits": [8192, 32000],
    },
    "plans": [
        {
            "modules": "blocks.0-7.mlp",
            "count": 8,
            "peak_bytes": 300_000_000,
            "saved_bytes": 140_000_000,
            "recompute_seconds": 0.04,
        }
    ],
    "layers": {
        "operators": [0, 40, 90],
        "of": 100,
        "classes": {"parameters": [6, 6, 6], "saved for backward": [0, 384, 10]},
        "backward": 39,
        "optimizer": 80,
        "peak": 40,
        "places": [{"class": "saved for backward", "module": "blocks.*.mlp", "line": "/home/me/train.py:41"}],
        "top": [[], [[0, 139]], [[0, 10]]],
    },
}


def report_of(holds):
    told = snapshot(ended=True, tables={"holds": {"most_bytes": 1, "found": holds}})
    return json.loads(json.dumps(build_report([told], SETTINGS, 0, ["train.py"], 25.0)))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_looks_as_it_did(width):
    text = printed(print_peak, report_of(HOLDS), width)
    assert all(cell_len(line) <= width and line == line.rstrip() for line in text.splitlines())
    check(f"peak_{width}", text)


def test_without_a_look():
    assert NOT_SEEN in printed(print_peak, report_of(None), 200)


def test_the_table_of_a_message():
    lines = as_lines(HOLDS)
    assert lines[1].split() == [
        "saved",
        "for",
        "backward",
        "384",
        "MB",
        "91",
        "%",
        "evictable:",
        "82",
        "ms",
        "a",
        "step",
        "for",
        "all",
        "(--budget);",
        "or",
        "checkpoint",
    ]
    assert lines[-1].strip().startswith("allp in evaluate at train.py:29")  # `logits` is less than 2 %


def test_what_cannot_be_computed_again_may_leave_for_the_host():
    for name in (PARAMETERS, GRADIENTS, STATE):
        row = {"name": name, **amount(90, evictable=False)}
        assert "--host-budget" in class_remedy(row, 100)


def test_names_in_short():
    assert short("transformer.h.*.mlp.c_fc") == "transformer.h.*.mlp"
    assert short("bert.encoder.pooler.dense") == "bert.encoder"
    assert short("") == ""
    assert lines_of(["/a/b/model.py:30", "/a/b/model.py:26", "/a/train.py:4"]) == "model.py:26-30, train.py:4"


def test_the_page_has_it():
    found = Elements(page(report_of(HOLDS)).decode())
    text = " ".join("".join(found.shown).split())
    for said in (
        "What holds the peak",
        "8,192 x 32,000",
        "checkpoint blocks.0-7.mlp",
        "blocks.*.attention",
        "allp",
    ):
        assert said in text
    flames = [
        attributes for tag, attributes in found.found if tag == "svg" and "%" in attributes.get("x", "")
    ]
    widths = [float(one["width"].rstrip("%")) for one in flames if one["y"] == "22"]
    assert sum(widths) == pytest.approx(100, abs=0.5)
    [data] = [json.loads(raw[2]) for raw in found.raw if raw[1].get("id") == "data"]
    assert [one["name"] for one in data["layers"]["classes"]] == ["parameters", "saved for backward"]
    assert data["layers"]["top"][1] == [[0, 139]]
    assert 'id="layers"' not in page(report_of(None)).decode()


def test_names_of_the_script_are_text():
    holds = json.loads(json.dumps(HOLDS).replace("allp", f"{'<script>'}").replace("blocks", "<b>"))
    holds["module"] = EVIL
    found = Elements(page(report_of(holds)).decode())
    assert [tag for tag, _ in found.found].count("script") == 4
    assert "b" not in [tag for tag, _ in found.found]
    assert len(CLASSES) == len(set(CLASSES))
