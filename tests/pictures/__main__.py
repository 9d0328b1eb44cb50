"""Pictures of the report and of Perfetto in docs/pictures, of the runs kept here: `make docs-pictures`.

Beside them, made.json has a digest of what each was taken of, so that a test without a browser sees if one is
stale.
"""

import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from dtrrun.views.html import page
from tests.pictures import perfetto
from tests.pictures.browser import chromium, missing

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "pictures"
MADE = DOCS / "made.json"
LOOKS = {"light": {}, "dark": {"dark": True}, "phone": {"phone": True}}
"""By name of the picture: how the page is opened."""
FAILURES = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
PARTS = (0, 1), (0.309, 0.3094), (0.8262, 0.8334)
"""Of the second step: all of it; storages are looked for and evicted; operators are run again."""


def example():
    """The page that is shown."""
    run, profile = (json.loads((HERE / name).read_text()) for name in ("run.json", "profile.json"))
    return page(run, profile)


def take(folder):
    """A picture of each look into `folder`."""
    with tempfile.TemporaryDirectory() as made, chromium() as opened:
        file = Path(made, "report.html")
        file.write_bytes(example())
        for name, look in LOOKS.items():
            (Path(folder) / f"report-{name}.png").write_bytes(opened(file, **look).picture())


def trace():
    """The trace that is shown, as it was written."""
    return gzip.decompress((HERE / "trace.json.gz").read_bytes())


def digests():
    """By picture: of what it shows, without what is folded: the settings, with the help of each option."""
    seen = re.sub(rb"<details>.*?</details>", b"", example(), flags=re.DOTALL)
    shown = {f"report-{look}": seen for look in LOOKS} | {"perfetto": trace()}
    return {name: hashlib.sha256(content).hexdigest() for name, content in shown.items()}


def as_imported(viewer):
    """What the viewer has: spans of each kind and name, counts, ms and most in all, arguments, titles."""
    assert viewer.query(FAILURES) == []
    spans = viewer.query("select category, name, dur from slice")
    counters = viewer.query(
        "select t.name as name, value from counter c join counter_track t on c.track_id = t.id"
    )
    arguments = viewer.query(
        "select name, key, coalesce(string_value, int_value) as value from slice join args using (arg_set_id)"
    )
    titles = viewer.query(
        "select name from thread where tid > 0 union all select name from process where pid > 0"
    )
    return _told(
        [(row["category"], row["name"], row["dur"]) for row in spans],
        [(row["name"], row["value"]) for row in counters],
        [(row["name"], row["key"].removeprefix("args."), str(row["value"])) for row in arguments],
        [row["name"] for row in titles],
    )


def as_written(text):
    """The same of the file."""
    events = json.loads(text)["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    return _told(
        [(event["cat"], event["name"], int(event["dur"] * 1000)) for event in spans],
        [
            (f"{event['name']} {name}", value)
            for event in events
            if event["ph"] == "C"
            for name, value in event["args"].items()
        ],
        [
            (event["name"], key, str(value))
            for event in spans
            for key, value in event["args"].items()
            if value is not None
        ],
        [event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")],
    )


def _told(spans, counters, arguments, titles):
    lasted = {
        category: round(sum(span[2] for span in spans if span[0] == category) / 1e6) for category, *_ in spans
    }
    peaks = {name: max(value for other, value in counters if other == name) for name, _ in counters}
    counted = Counter(name for name, _ in counters)
    return Counter(span[:2] for span in spans), lasted, counted, peaks, Counter(arguments), Counter(titles)


def take_perfetto(folder):
    """Pictures of the trace in Perfetto, as one: a step, and parts of it."""
    from PIL import Image

    with perfetto.imported(trace()) as viewer:
        assert as_imported(viewer) == as_written(trace())
        (step,) = viewer.query("select ts, dur from slice where name = 'step 2'")
        begin, lasts = int(step["ts"]), int(step["dur"])
        shown = []
        for part in PARTS:
            viewer.show(*(begin + share * lasts for share in part))
            shown.append(Image.open(io.BytesIO(viewer.picture())))
        assert not viewer.complaints, viewer.complaints
        assert not viewer.refused, viewer.refused
    whole = Image.new("RGB", (shown[0].width, sum(one.height for one in shown)))
    for place, one in enumerate(shown):
        whole.paste(one, (0, place * one.height))
    whole.save(Path(folder) / "perfetto.png")


if __name__ == "__main__":
    why = missing()
    if why:
        sys.exit(f"no pictures of the report: {why}")
    from PIL import Image

    DOCS.mkdir(exist_ok=True)
    take(DOCS)
    taken, lacking = [f"report-{look}" for look in LOOKS], None
    try:
        perfetto.fetch()
        take_perfetto(DOCS)
        taken.append("perfetto")
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        lacking = f"no picture of Perfetto, whose viewer npm has: {error}"
    for name in taken:  # a third of the bytes, with 255 colours
        path = DOCS / f"{name}.png"
        Image.open(path).convert("RGB").quantize(255).save(path, optimize=True)
    made, shown = json.loads(MADE.read_text()) if MADE.exists() else {}, digests()
    MADE.write_text(json.dumps(made | {name: shown[name] for name in taken}, indent=1) + "\n")
    sys.exit(lacking)
