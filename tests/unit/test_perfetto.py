"""A trace in Perfetto itself: it has what was written."""

import pytest

from tests.pictures import perfetto
from tests.pictures.__main__ import as_imported, as_written, trace
from tests.pictures.browser import missing

WHY = missing() or perfetto.missing()
pytestmark = pytest.mark.skipif(WHY is not None, reason=f"no Perfetto: {WHY}")


def test_all_of_a_trace_is_imported():
    with perfetto.imported(trace()) as viewer:
        assert as_imported(viewer) == as_written(trace())
        assert viewer.complaints == []


def test_spans_that_are_lost_are_missed():
    broken = trace().replace(b'"ph":"X"', b'"ph":"E"', 3)
    with perfetto.imported(broken) as viewer:
        assert as_imported(viewer) != as_written(trace())
