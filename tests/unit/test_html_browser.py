"""The page in a real headless Chromium draws, requests nothing, and looks as in docs/pictures."""

import io
import json

import pytest
from test_html import HOSTILE, hostile, process_timeline, report_of

from dtrrun.views.html import page
from tests.pictures.__main__ import DOCS, LOOKS, example
from tests.pictures.browser import PHONE, chromium, missing

WHY = missing()
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"no browser: {WHY}")
PIL = pytest.importorskip("PIL.Image", reason="needs Pillow")
SMALL = (55, 110)
ALIKE = 6.0
"""Greatest mean difference of gray values (0 to 255) of two downscaled pictures: fonts differ."""
POSITIONS = "() => [...document.querySelectorAll('section:not([hidden]) canvas')].map(c => c.width)"


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def show(browser, tmp_path):
    def show(made, **look):
        (tmp_path / "report.html").write_bytes(made)
        return browser(tmp_path / "report.html", **look)

    return show


def picture(data):
    return PIL.open(io.BytesIO(data)).convert("RGB")


def difference(one, other):
    """Return the mean absolute difference of gray values, at a size where letters do not show."""
    one, other = (image.convert("L").resize(SMALL, PIL.Resampling.BOX) for image in (one, other))
    pairs = zip(one.tobytes(), other.tobytes(), strict=True)
    return sum(abs(a - b) for a, b in pairs) / (SMALL[0] * SMALL[1])


@pytest.mark.parametrize("look", LOOKS)
def test_it_looks_as_in_the_docs(show, look):
    opened = show(example(), **LOOKS[look])
    assert opened.complaints == []
    assert len(opened.requests) == 1  # the file itself
    assert len(opened.page.evaluate(POSITIONS)) == 3
    taken = picture(opened.picture())
    kept = PIL.open(DOCS / f"report-{look}.png").convert("RGB")
    assert abs(taken.height - kept.height) < 0.1 * kept.height
    assert difference(taken, kept) < ALIKE
    corner = sum(taken.getpixel((2, 2)))
    assert (corner < 150) == (look == "dark")


def test_a_missing_chart_would_be_noticed(show):
    whole = picture(show(example()).picture())
    hidden = show(example())
    hidden.page.evaluate("document.querySelectorAll('canvas').forEach(c => c.remove())")
    assert difference(whole, picture(hidden.picture())) > ALIKE / 3
    assert difference(whole, picture(show(example(), dark=True).picture())) > 10 * ALIKE


def test_twice_the_same_picture(show):
    assert show(example()).picture() == show(example()).picture()


RUNS = json.loads((DOCS / "runs.json").read_text())


@pytest.mark.parametrize("name", ["example", "peak", "ranks", "too_small", "hostile"])
def test_a_phone_scrolls_down_only_and_nothing_is_out_of_sight(show, name):
    made = {"example": example, "hostile": lambda: page(hostile())}
    opened = show(made[name]() if name in made else page(RUNS[name]), phone=True)
    opened.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert opened.page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    assert max(opened.page.evaluate(POSITIONS), default=0) <= PHONE[0]
    hidden = """() => [...document.querySelectorAll('.scroll')].filter(
        one => one.scrollWidth > one.clientWidth).map(one => one.textContent)"""
    assert opened.page.evaluate(hidden) == []


def test_a_phone_shows_every_column_and_each_legend_in_two(show):
    opened = show(example(), phone=True)
    figures = (
        "() => [...document.querySelectorAll('.cost tbody tr:first-child .n')].map(e => e.offsetHeight > 0)"
    )
    assert opened.page.evaluate(figures) == [True] * 7
    legends = """() => [...document.querySelectorAll('section:not([hidden]) .u-legend')].map(
        one => new Set([...one.querySelectorAll('tr')].map(row => row.getBoundingClientRect().left)).size)"""
    assert opened.page.evaluate(legends) == [2, 2, 2]


def test_the_budget_changes_in_the_chart(show):
    report = report_of(timeline={"processes": [process_timeline(samples=30)]})
    report["processes"][0]["budget_changes"] = [
        {"seconds": 123_456_799.0, "from_bytes": 150_000_000, "to_bytes": 200_000_000}
    ]
    opened = show(page(report))
    assert opened.complaints == []
    found = "JSON.parse(document.getElementById('data').textContent).processes[0]"
    drawn = opened.page.evaluate(f"dtrrunCharts.memory({found}).data.at(-1)")
    assert drawn == 11 * [150_000_000] + 19 * [200_000_000]


def test_charts_follow_the_width(show):
    opened = show(example())
    wide = opened.page.evaluate(POSITIONS)
    opened.page.set_viewport_size({"width": 500, "height": 800})
    opened.page.wait_for_function("document.querySelector('canvas').width <= 500")
    assert max(opened.page.evaluate(POSITIONS)) < min(wide)
    assert opened.complaints == []


def test_colours_follow_the_system(show):
    opened = show(example())
    before = opened.picture()
    opened.page.emulate_media(color_scheme="dark")
    opened.page.wait_for_timeout(100)
    assert difference(picture(before), picture(opened.picture())) > 10 * ALIKE
    assert len(opened.page.evaluate(POSITIONS)) == 3


def test_names_from_the_script_do_nothing(show):
    opened = show(page(hostile()))
    assert opened.complaints == []
    assert opened.page.evaluate("document.querySelectorAll('img, script:not([type])').length") == 3
    assert HOSTILE[:40] in opened.page.inner_text("body")


def test_foreign_scripts_do_not_run(show):
    made = page(hostile()).replace(
        b"</body>", b"<script>window.ran = 1</script><img src='http://a.invalid/x'></body>"
    )
    opened = show(made)
    assert opened.page.evaluate("window.ran === undefined")
    refused = [complaint for complaint in opened.complaints if "Content Security Policy" in complaint]
    assert any("inline script" in complaint for complaint in refused)
    assert any("a.invalid" in complaint for complaint in refused)


def test_one_process_of_several_is_chosen(show):
    processes = [process_timeline(8, rank=1, steps=9), process_timeline(7, rank=0)]
    opened = show(page(report_of(timeline={"processes": processes})))
    assert opened.page.inner_text("#which").split("\n")[0].startswith("Charts of")
    assert opened.page.inner_text("select").split() == ["rank", "0", "rank", "1"]
    assert opened.page.evaluate("document.querySelector('select').selectedIndex") == 0
    opened.page.select_option("select", "rank 1")
    assert opened.complaints == []
    assert len(opened.page.evaluate(POSITIONS)) == 2


def test_without_a_timeline_there_are_tables(show):
    opened = show(page(report_of()))
    assert opened.complaints == []
    assert opened.page.evaluate(POSITIONS) == []
    assert "aten.convolution" in opened.page.inner_text("body")


def test_without_scripts_there_are_tables(show):
    opened = show(example(), script=False)
    assert "The charts need JavaScript" in opened.page.inner_text("body")
    assert "aten.addmm" in opened.page.inner_text("body")
