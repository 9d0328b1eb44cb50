"""A trace loaded into Perfetto itself has what was written."""

import pytest

from tests.pictures import perfetto
from tests.pictures.__main__ import as_imported, as_written, trace
from tests.pictures.browser import missing

WHY = missing() or perfetto.missing()
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"no Perfetto: {WHY}")


@pytest.fixture(scope="module")
def found():
    with perfetto.imported(trace()) as viewer:
        return as_imported(viewer), viewer.complaints, viewer.refused


def test_all_of_a_trace_is_imported(found):
    assert found == (as_written(trace()), [], [])


@pytest.mark.parametrize(
    ("written", "other"),
    [
        (b'"cat":"search"', b'"cat":"eviction"'),
        (b'"module":"', b'"module":"x'),
        (b'"bytes":', b'"bytes":1'),
        (b'"resident":', b'"resident":99'),
        (b'"name":"steps"', b'"name":"step"'),
    ],
)
def test_what_is_another_is_seen(found, written, other):
    changed = trace().replace(written, other)
    assert changed != trace()
    assert found[0] != as_written(changed)


def test_spans_that_are_lost_are_missed():
    broken = trace().replace(b'"ph":"X"', b'"ph":"E"', 3)
    with perfetto.imported(broken) as viewer:
        assert as_imported(viewer) != as_written(trace())


def test_what_it_asks_of_others_is_refused_and_told():
    with perfetto.imported(trace()) as viewer:
        asked = "fetch('http://perfetto.invalid/').then(() => 'answered', () => 'refused')"
        assert viewer.page.evaluate(asked) == "refused"
        assert viewer.refused == ["http://perfetto.invalid/"]
