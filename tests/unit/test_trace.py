"""dtrrun.views.trace, against the rules of the format (trace_format.py)."""

import gzip
import json

import pytest
from fake_records import EVIL, snapshot
from trace_format import broken_rules

from dtrrun.telemetry.events import EVENT, EVICT, LEAVE, MODULE, NAME, REMATERIALIZE, SEARCH, STEP, Events
from dtrrun.views.trace import STEPS_TRACK, chrome_trace, compressed

HOSTILE = f"</script>\"'&<b>{EVIL}\u2028"
TIMELINE = {
    "processes": [
        {"pid": 7, "samples": {"seconds": [0.1, 0.2], "evictable_bytes": [5, 6], "pinned_bytes": [1, 1]}}
    ]
}


def data(*rows, names=("aten.relu", HOSTILE)):
    text = b""
    for number, name in enumerate(names):
        encoded = name.encode()
        text += EVENT.pack(NAME, number, len(encoded), 0, 0, 0, 0, 0) + encoded
    return text + b"".join(EVENT.pack(*row) for row in rows)


def example(left_out=0, pid=7):
    us = 1000
    return Events(
        pid,
        left_out,
        data(
            (SEARCH, 0, pid, 2_000 * us, 10 * us, 64, 900, 0),
            (EVICT, 0, pid, 2_010 * us, 5 * us, 64, 836, 64),
            (REMATERIALIZE, 1, pid + 1, 3_000 * us, 100 * us, 64, 900, 0),
            (STEP, 0, pid, 1_000 * us, 3_000 * us, 1, 900, 0),
            (99, 0, pid, 0, 0, 0, 0, 0),
            (LEAVE, 0, pid, 4_000 * us, 7 * us, 64, 836, 64),
        ),
    )


def text(found, snapshots=(), timeline=None):
    return b"".join(chrome_trace(found, snapshots, 1_000_000, {"command": [HOSTILE]}, timeline)).decode()


def test_the_rules_hold():
    made = text([example(), example(pid=20)], [snapshot(7, 0), snapshot(20, 1)], TIMELINE)
    assert broken_rules(made) == []
    assert made.isascii()


def test_what_is_in_it():
    trace = json.loads(text([example()], [snapshot(7, 3)], TIMELINE))
    events = trace["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert (spans["evict"]["ts"], spans["evict"]["dur"], spans["evict"]["cat"]) == (1010.0, 5.0, "eviction")
    assert spans["evict"]["args"] == {"output of": "aten.relu", "bytes": 64}
    assert spans["search"]["tid"] == 7
    assert spans["copy out"]["args"] == {"of": "aten.relu", "bytes": 64}
    assert (spans["step 1"]["ts"], spans["step 1"]["tid"]) == (0.0, 7 + STEPS_TRACK)
    (again,) = (event for event in events if event.get("cat") == "rematerialization")
    assert (again["tid"], again["args"]) == (8, {"bytes": 64})
    named = {(e["name"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert named["process_name", 7] == {"name": "rank 3: train.py"}
    assert named["thread_name", 7] == {"name": "main thread"}
    counters = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters[0] == ("tensor memory", 1015.0, {"resident": 836, "evicted": 64})
    assert counters[-1] == ("resident memory", 200_000.0, {"evictable": 6, "pinned": 1})
    assert trace["otherData"] == {"command": [HOSTILE], "events_left_out": 0}


def test_modules_are_arguments():
    rows = [(kind, 0, 7, 2_000_000, 10, 64, 900, 0) for kind in (SEARCH, EVICT, REMATERIALIZE)]
    names = (f"aten.relu{MODULE}encoder.{HOSTILE}", "")
    made = text([Events(7, 0, data(*rows, names=names))])
    assert broken_rules(made) == []
    spans = [event for event in json.loads(made)["traceEvents"] if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["search", "evict", "aten.relu"]
    assert all(span["args"]["module"].startswith("encoder.") for span in spans)
    assert [span["args"].get("output of") for span in spans] == ["aten.relu", "aten.relu", None]


def test_a_cut_is_told():
    made = text([example(left_out=5)])
    assert broken_rules(made) == []
    (mark,) = (event for event in json.loads(made)["traceEvents"] if event["ph"] == "i")
    assert (mark["name"], mark["args"]) == ("the trace was cut here", {"events left out": 5})
    assert json.loads(made)["otherData"]["events_left_out"] == 5


@pytest.mark.parametrize("found", [[], [Events(7, 0, b"")], [Events(7, 0, b"torn")]])
def test_nothing_happened(found):
    assert broken_rules(text(found)) == []


def test_compressed():
    pieces = list(chrome_trace([example()], [], 0, {}))
    assert gzip.decompress(b"".join(compressed(pieces))) == b"".join(pieces)


# -- the rules themselves ----------------------------------------------------------------------------


def spoiled(change):
    trace = json.loads(text([example(left_out=1)], [snapshot(7)], TIMELINE))
    change(trace["traceEvents"])
    return broken_rules(json.dumps(trace))


def first(events, phase):
    return next(event for event in events if event["ph"] == phase)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda e: first(e, "X").pop("dur"), "dur is no"),
        (lambda e: first(e, "X").update(ts="0"), "ts is no"),
        (lambda e: first(e, "X").update(ts=-1.0), "negative"),
        (lambda e: first(e, "X").update(ph="Q"), "unknown phase"),
        (lambda e: first(e, "X").update(name="a\x1b[2J"), "control characters"),
        (lambda e: first(e, "C").update(args={}), "at least one"),
        (lambda e: first(e, "C").update(args={"a": "1"}), "numbers"),
        (lambda e: first(e, "i").update(s="x"), "scope"),
        (lambda e: first(e, "M").update(name="title"), "unknown metadata"),
        (lambda e: first(e, "M").update(pid=8), "has no name"),
        (lambda e: first(e, "X").update(dur=12.0), "reaches out"),
        (lambda e: first(e, "X").update(ts=5000.0), "before the one before"),
    ],
)
def test_what_breaks_a_rule_is_found(change, rule):
    found = spoiled(change)
    assert any(rule in line for line in found), found
