"""`views.picture`: the live table at several sizes of the terminal."""

import pytest
from fake_records import EVIL, SETTINGS, on_gpu, snapshot, stream, without_colour
from rich.cells import cell_len
from view_snapshots import check

from dtrrun.telemetry.record import Snapshot
from dtrrun.views.picture import line, picture, running
from dtrrun.views.rates import Rates


def draw(processes: int, columns: int, height: int, **more: object) -> list[str]:
    rates = Rates()
    for seconds in range(4):
        now = [
            snapshot(100 + n, None if processes == 1 else n, seconds, **more)  # type: ignore[arg-type]
            for n in range(processes)
        ]
        rates.add(now)
    return picture(now, SETTINGS, rates, stream(), columns, height)


@pytest.mark.parametrize("processes", [1, 2, 9])
@pytest.mark.parametrize(("columns", "height"), [(80, 24), (80, 14), (120, 24), (120, 40), (50, 24)])
def test_looks_as_it_did(processes: int, columns: int, height: int) -> None:
    lines = draw(processes, columns, height)
    check(f"live_{processes}_{columns}x{height}", without_colour("\n".join(lines)) + "\n")


def draw_gpu(processes: int, columns: int, height: int) -> list[str]:
    rates = Rates()
    now = [
        on_gpu(snapshot(100 + n, n if processes > 1 else None), violations=n % 2) for n in range(processes)
    ]
    if processes > 1:
        now[-1] = snapshot(99 + processes, processes - 1)  # the driver has not been asked about it yet
    rates.add(now)
    return picture(now, SETTINGS, rates, stream(), columns, height)


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize(("columns", "height"), [(80, 24), (80, 14), (120, 40)])
def test_looks_as_it_did_on_a_gpu(processes: int, columns: int, height: int) -> None:
    lines = draw_gpu(processes, columns, height)
    assert len(lines) <= height // 2
    assert all(cell_len(without_colour(text)) <= columns for text in lines)
    check(f"live_gpu_{processes}_{columns}x{height}", without_colour("\n".join(lines)) + "\n")


def test_over_the_budget_by_the_driver() -> None:
    now = on_gpu(snapshot(), violations=2)
    text = without_colour("\n".join(picture([now], SETTINGS, Rates(), stream(), 80, 24)))
    assert "over the budget 2 times" in text
    assert "driver 212 MB (NVML)" in line(now, Rates())
    assert "driver" not in line(snapshot(), Rates())


@pytest.mark.parametrize("processes", [1, 2, 9])
def test_fits_every_terminal(processes: int) -> None:
    for columns in (1, 20, 59, 60, 79, 80, 119, 120, 121, 300):
        for height in (1, 2, 3, 9, 10, 14, 24, 100):
            lines = draw(processes, columns, height)
            assert len(lines) <= height // 2
            assert all(cell_len(without_colour(text)) <= columns for text in lines)


def test_figures_that_do_not_fit_are_left_out_rather_than_cut() -> None:
    lines = [without_colour(text).rstrip() for text in draw(1, 60, 24)]
    assert "         █ pinned 60 MB  ▓ evictable 120 MB  peak 200 MB" in lines
    assert not [text for text in lines if "…" in text]


def test_names_from_the_script_are_shown_as_they_are() -> None:
    row = {"name": EVIL, "rematerializations": 1, "seconds": 1.0, "bytes": 1}
    text = "\n".join(draw(1, 80, 24, tables={"operators": [row], "warnings": [{"text": EVIL, "count": 1}]}))
    assert without_colour(text).count("[bold red]mine[/]") == 2
    assert all(c.isprintable() or c == "\n" for c in without_colour(text))


def test_a_record_that_has_published_nothing_yet() -> None:
    lines = picture([Snapshot(7, {"pid": 7}, snapshot().counters)], SETTINGS, Rates(), stream(), 80, 24)
    assert "last step" not in "\n".join(lines)


def test_over_the_budget_or_without_one() -> None:
    for counters in ({"resident_bytes": 250_000_000}, {"budget_bytes": -1}):
        text = without_colour("\n".join(draw(1, 80, 24, **counters)))
        assert ("no budget" in text) == ("budget_bytes" in counters)


def test_processes_that_have_ended_are_not_shown() -> None:
    ended, live, killed = snapshot(1, ended=True), snapshot(2), snapshot(3, alive=False)
    assert running([ended, live, killed]) == [live]
    assert running([ended, killed]) == [killed]
    assert running([]) == []


def test_one_line() -> None:
    text = line(snapshot(rank=3), Rates())
    assert text.startswith("dtrrun rank 3: tensors 187 MB of 200 MB, 42 steps in 23.4 s")
    assert "pid 4711" in line(snapshot(), Rates())
