"""Markers for tests that use PyTorch: `dtrrun_budget` and `dtrrun_limit`.

pytest loads this file in every run, in which dtrrun is installed. It imports nothing but pytest until a test
with one of the markers runs.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

BUDGET, LIMIT = "dtrrun_budget", "dtrrun_limit"
MARKERS = (
    f"{BUDGET}(size, **options): run the test inside a memory budget, as dtrrun.budget does; it fails with "
    "a BudgetError if it does not fit.",
    f"{LIMIT}(size, device='auto'): fail the test if its tensors take more at once. Nothing is evicted.",
)
PEAK = "dtrrun_peak_bytes"
"""The property that a test with a marker has in JUnit's XML."""


def pytest_configure(config: pytest.Config) -> None:
    for line in MARKERS:
        config.addinivalue_line("markers", line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    budget, limit = item.get_closest_marker(BUDGET), item.get_closest_marker(LIMIT)
    if budget is not None and limit is not None:
        raise pytest.UsageError(f"{item.nodeid}: {BUDGET} and {LIMIT} cannot be combined")
    if budget is not None:
        return (yield from _in_budget(item, budget))
    if limit is not None:
        return (yield from _within(item, limit))
    return (yield)


def _in_budget(item: pytest.Item, marker: pytest.Mark) -> Generator[None, Any, Any]:
    size, options = _read(item, marker)
    import dtrrun

    with dtrrun.budget(size, **options) as session:
        result = yield
        item.user_properties.append((PEAK, session.report()["peak_bytes"]))
    return result


def _within(item: pytest.Item, marker: pytest.Mark) -> Generator[None, Any, Any]:
    size, options = _read(item, marker)
    import dtrrun
    from dtrrun.sizes import as_bytes, format_size, format_size_up
    from dtrrun.telemetry.holding import as_lines

    most = as_bytes(size)
    if most is None:
        raise pytest.UsageError(f"{item.nodeid}: {LIMIT} takes a size")
    # When there is more than that, it is looked at once what there is.
    with dtrrun.budget(None, peak=True, peak_bytes=most + 1, quiet=True, **options) as session:
        result = yield
        report = session.report()
    peak = report["peak_bytes"]
    item.user_properties.append((PEAK, peak))
    if peak > most:
        found = report["holds"]["found"]
        lines = [f"tensors take {format_size_up(peak)}, more than the limit of {format_size(most)}"]
        if found is not None:
            size = format_size(found["bytes"])
            lines += [f"what {size} of that was, {_when(found)}:", *as_lines(found)]
        pytest.fail("\n".join(lines), pytrace=False)
    return result


def _when(found: dict[str, Any]) -> str:
    place = " ".join(filter(None, (found["operator"], found["module"], found["line"])))
    return f"in the {found['phase']} pass, after {place}"


def _read(item: pytest.Item, marker: pytest.Mark) -> tuple[int | str, dict[str, Any]]:
    if len(marker.args) != 1:
        raise pytest.UsageError(f'{item.nodeid}: {marker.name} takes a size, such as "200MB"')
    return marker.args[0], dict(marker.kwargs)
