"""dtrrun.views.html: the page is complete, small and safe, whatever names the script uses."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_records import EVIL, SETTINGS, on_gpu, snapshot

from dtrrun.launch.series import MOST_SAMPLES, MOST_STEPS
from dtrrun.telemetry.fields import PARTS
from dtrrun.views.html import page
from dtrrun.views.html.charts import MOST_VALUES, SAMPLES, charts, curve
from dtrrun.views.report import build_report

PICTURES = Path(__file__).parents[1] / "pictures"
HOSTILE = f"</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{EVIL}\u2028\ud800"
VOID = {"meta", "link", "img", "br", "hr", "input", "rect"}


class Elements(HTMLParser):
    """Checks that elements nest, and collects them and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.raw, self.shown = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "style"):
            self.raw.append([tag, dict(attributes), ""])

    def handle_startendtag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            self.raw[-1][2] += data
        else:
            self.shown.append(data)


def process_timeline(pid=4711, samples=20, steps=5, rank=None):
    return {
        "pid": pid,
        "rank": rank,
        "start": 0.5,
        "samples": {name: [123_456_789 + place for place in range(samples)] for name in SAMPLES},
        "steps": {
            name: list(range(1, steps + 1)) for name in ("first", "last", "count", "ended", "peak_bytes")
        }
        | {"seconds": {part: [0.123456] * steps for part in ("wall", *PARTS, "other")}},
    }


def report_of(*snapshots, timeline=None, command=("python", "train.py")):
    snapshots = snapshots or (snapshot(ended=True),)
    report = build_report(snapshots, SETTINGS, 0, command, 25.0, timeline)
    return json.loads(json.dumps(report))


def hostile():
    tables = {
        "operators": [{"name": HOSTILE, "rematerializations": 3, "seconds": 1.0, "bytes": 5, "evictions": 1}],
        "places": [
            {"module": HOSTILE, "line": HOSTILE, "name": HOSTILE, "rematerializations": 1, "seconds": 1.0}
        ],
        "pinned": [
            {"reason": HOSTILE, "bytes": 5, "storages": 2, "held_by": [{"name": HOSTILE, "why": HOSTILE}, 3]}
        ],
        "warnings": [{"text": HOSTILE, "count": 3}],
        "mismatches": [{"operator": HOSTILE, "bytes": 7, "count": 1}],
        "error": {"operator": HOSTILE, "needed_bytes": 9, "pinned": {}, "least_budget_bytes": 14},
    }
    one = snapshot(tables=tables, ended=True, least_budget_bytes=14)
    one.meta["device"] = one.meta["argv"][0] = one.meta["rank"] = HOSTILE
    report = report_of(one, command=[HOSTILE, HOSTILE])
    report["settings"][HOSTILE] = HOSTILE
    report["processes"][0]["status"] = HOSTILE
    report["timeline"] = {"processes": [process_timeline(rank=HOSTILE)]}
    return report


def test_elements_nest_and_the_text_is_there():
    made = Elements(page(report_of(timeline={"processes": [process_timeline()]})).decode())
    text = " ".join(made.shown)
    for word in ("train.py", "200 MB", "1,234", "aten.convolution", "rematerialization"):
        assert word in text
    assert not re.search(r"\bNone\b|Undefined", text)


def test_names_from_the_script_are_text():
    made = Elements(page(hostile()).decode())
    assert not [tag for tag, _ in made.found if tag in ("img", "iframe", "object", "link")]
    assert len([raw for raw in made.raw if raw[0] == "script"]) == 4
    text = "".join(made.shown)
    assert "</script><script>alert(1)" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", text)
    assert not [name for _, attributes in made.found for name in attributes if name.startswith("on")]


def test_the_data_can_end_no_script():
    made = Elements(page(hostile()).decode())
    (data,) = (raw for raw in made.raw if raw[1].get("type") == "application/json")
    assert not re.search("[<>&\u2028]", data[2])
    assert data[2].isascii()
    assert "</script>" in json.loads(data[2])["processes"][0]["label"] + "</script>"


def test_nothing_is_asked_of_a_network():
    made = Elements(page(report_of()).decode())
    for _, attributes in made.found:
        assert not {"src", "href", "action", "background", "style"} & set(attributes)
    code = "".join(raw[2] for raw in made.raw)
    assert not re.search(
        r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|sendBeacon|\beval\(|new Function", code
    )


def test_the_policy_lets_our_own_scripts_run_and_no_other():
    made = Elements(page(hostile()).decode())
    (policy,) = (a["content"] for tag, a in made.found if tag == "meta" and "http-equiv" in a)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"

    def digests(tag):
        found = [raw for raw in made.raw if raw[0] == tag and "type" not in raw[1]]
        return {
            f"'sha256-{base64.b64encode(hashlib.sha256(raw[2].encode()).digest()).decode()}'" for raw in found
        }

    assert set(rules["script-src"].split()) == digests("script")
    assert set(rules["style-src"].split()) == digests("style")


@pytest.mark.parametrize("count", [1, 8, 64])
def test_it_stays_below_a_megabyte(count):
    processes = [process_timeline(pid, MOST_SAMPLES, MOST_STEPS, rank=pid) for pid in range(count)]
    many = [snapshot(pid, pid) for pid in range(count)]
    made = page(report_of(*many, timeline={"processes": processes}))
    assert len(made) < 1_000_000
    figures = charts(report_of(*many, timeline={"processes": processes}), None)
    values = sum(
        len(v) for p in figures["processes"] for part in ("samples", "steps") for v in p[part].values()
    )
    assert values <= MOST_VALUES
    for process in figures["processes"]:
        assert len({len(values) for values in process["samples"].values()}) == 1
        assert len({len(values) for values in process["steps"].values()}) == 1
        assert sum(process["steps"]["count"]) == MOST_STEPS * (MOST_STEPS + 1) // 2


@pytest.mark.parametrize(
    "report",
    [
        report_of(timeline=None),
        report_of(snapshot(steps=0, evictions=0, wall_ns=0, operators_ns=0, tables={"operators": []})),
        report_of(on_gpu(snapshot(), violations=2)),
        {**report_of(), "processes": [], "budget_bytes": None},
        {name: value for name, value in report_of().items() if name != "timeline"},  # of an older version
    ],
    ids=["no timeline", "nothing happened", "GPU", "no process", "older"],
)
def test_whatever_ran(report):
    Elements(page(report).decode())


def shown_text(report):
    return " ".join(" ".join(Elements(page(report).decode()).shown).split())


def test_settings_are_options_in_words_and_those_that_were_given_come_first():
    report = report_of()
    report["settings"] |= {"ignore_small": 0.01, "max_slowdown": 3.0, "verify": True, "max_steps": 2000}
    text = shown_text(report)
    settings = text[text.index(" Settings ") :]
    for words in (
        "--budget 200 MB The most memory that tensors may take",
        "--ignore-small 1.0 % Evict",
        "--max-slowdown 3 × Treat",
        "--max-steps 2,000 End",
        "--verify yes Compare",
        "--where no Show",
        "--costs – Read",
    ):
        assert words in settings
    assert settings.index("--verify") < settings.index("--where")
    assert not re.search(r"\b(True|False|budget_bytes|200000000)\b", settings)


def test_the_rule_is_named_and_there_is_one_total():
    name = "h_chain(c=ancestors,s=0.6,next=0,released=alike)"
    rule = {"heuristic": name, "since_step": 4, "source": "repeating"}
    text = shown_text(report_of(snapshot(tables={"rule": rule}, ended=True)))
    facts = "the default for steps that are alike; since step 4; c=ancestors, s=0.6, next=0, released=alike"
    assert f"heuristic h_chain {facts}" in text
    assert "1.80 × per step, median without the first; 1.33 × with the start" in text
    assert "of 23.4 s in all time" in text
    text = shown_text(report_of(snapshot(1, 0, ended=True), snapshot(2, 1, ended=True)))
    assert "of 46.8 s in 2 processes" in text
    assert "in all time" not in text


def test_each_wide_table_has_a_form_for_a_phone():
    report = json.loads((PICTURES.parents[1] / "docs" / "pictures" / "runs.json").read_text())["peak"]
    change = {"pid": 1, "rank": 0, "step": 1, "seconds": 2.0, "from_bytes": 5, "to_bytes": 6}
    report["budget_changes"] = [change | {"reason": "too small", "operator": "aten.mm", "least_bytes": 4}]
    made = page(report).decode()
    places = hostile()
    narrow = re.search(r"@media \(max-width: 36rem\) \{(.*?)\n\}", made, re.DOTALL)[1]
    tables = [
        table
        for text in (made, page(places).decode())
        for table in re.findall(r"<table.*?</table>", text, re.DOTALL)
    ]
    wide = {
        re.match(r'<table(?: class="(\w+)")?', one)[1]
        for one in tables
        if len(re.findall("<th[ >]", one)) > 4
    }
    assert wide == {"cost", "modules", "facts"}
    assert all(f".{name} tr" in narrow for name in (*wide, "held", "settings"))


def test_the_budget_is_drawn_as_it_was_at_each_moment():
    one = snapshot(4711, ended=True, budget_bytes=70)
    one.tables["budget_changes"] = [
        {
            "seconds": 2.0,
            "step": 1,
            "from_bytes": 50,
            "to_bytes": 90,
            "reason": "too small",
            "least_bytes": 80,
        },
        {"seconds": 4.0, "step": 2, "from_bytes": 90, "to_bytes": 70, "reason": "refused"},
    ]
    timeline = {"processes": [process_timeline(), process_timeline(1)]}
    drawn = charts(report_of(one, snapshot(1, budget_bytes=-1), timeline=timeline), None)["processes"]
    assert [process["budgets"] for process in drawn] == [[[0, 50], [2.5, 90], [4.5, 70]], []]
    assert charts(report_of(timeline=timeline), None)["processes"][0]["budgets"] == [[0, 200_000_000]]


def test_the_curve_of_a_profile():
    points = [
        {"budget_bytes": 20, "predicted": {"status": "ok", "slowdown": 1.1}, "measured": {"slowdown": 1.2}},
        {"budget_bytes": 10, "predicted": 1.5, "measured": {"status": "oom", "slowdown": None}},
        {"budget_bytes": 15, "predicted": None, "measured": None},
    ]
    found = curve({"points": points})
    assert [point["budget_bytes"] for point in found] == [10, 15, 20]
    assert [point["predicted"] for point in found] == [1.5, None, 1.1]
    assert [point["measured"] for point in found] == [None, None, 1.2]
    assert [point["failed"] for point in found] == [True, False, False]
    assert curve(None) == []
    assert '"curve":[{' in page(report_of(), {"points": points}).decode()
    assert '"curve":[{' in page(report_of() | {"profile": {"points": points}}).decode()


@pytest.mark.parametrize("value", ["1", True, float("nan"), float("inf"), None, [], {}])
def test_what_is_no_number_is_none(value):
    report = report_of(timeline={"processes": [process_timeline()]})
    report["timeline"]["processes"][0]["samples"]["seconds"][3] = value
    with pytest.raises((TypeError, ValueError)):
        page(report)


def test_the_same_report_makes_the_same_page():
    report = json.loads((PICTURES / "run.json").read_text())
    assert page(report) == page(report)


def test_the_library_comes_with_its_licence():
    text = page(report_of()).decode()
    assert "uPlot (v1.6.32)" in text
    assert "Copyright (c) 2022 Leon Sorokin" in text
