"""One picture of the live table: figures in, lines of text out. Independent of terminals and time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import format_size
from dtrrun.telemetry.record import Snapshot, by_rank
from dtrrun.telemetry.times import breakdown
from dtrrun.views.figures import operators, other_gpus, step_slowdown, table, total
from dtrrun.views.panels import (
    BAR,
    EVICTABLE,
    OVER,
    PINNED,
    breakdown_table,
    console_for,
    memory_bar,
    narrowed,
    operators_table,
    rematerialized,
)
from dtrrun.views.rates import Rates
from dtrrun.views.text import SOURCE, duration, plain, rate, times, times_as_long

LEFT, GAP, RIGHT = 76, 2, 42
"""Columns of the two halves, if the terminal is wide enough to show the operators on the right."""
NARROW = 60
"""Below this many columns, only one line is shown."""
MOST_OPERATORS = 8
EVENTS = ("evictions", "rematerializations")
SHORT = ("evictions", "remat.")


def running(snapshots: Sequence[Snapshot]) -> list[Snapshot]:
    """Return the processes to show, by rank: the running ones, or the last one if none is running."""
    found = [one for one in snapshots if one.alive and not one.ended]
    return sorted(found, key=lambda one: by_rank(one.meta.get("rank"))) or list(snapshots[-1:])


def line(snapshot: Snapshot, rates: Rates) -> str:
    """Return one process as one line."""
    counters, pid = snapshot.counters, snapshot.pid
    budget = counters["budget_bytes"]
    of_budget = f" of {format_size(budget)}" if budget > 0 else ""
    others = "".join(f" + {format_size(one['bytes'])} on cuda:{one['index']}" for one in other_gpus(snapshot))
    use = snapshot.driver
    driver = f"driver {format_size(use.nbytes)} ({SOURCE[use.source]}), " if use else ""
    tensors = format_size(counters["resident_bytes"]) + of_budget + others
    return (
        f"dtrrun {name(snapshot)}: tensors {tensors}, {driver}"
        f"{times(counters['steps'], 'step')} in {duration(counters['wall_ns'] / 1e9)} "
        f"({rate(rates.steps(pid))}), " + ", ".join(_events(snapshot, rates))
    )


def _events(snapshot: Snapshot, rates: Rates, columns: int | None = None) -> list[str]:
    """Return the counts of events and the slowdown; with short names, or no rates, if they do not fit."""
    found = step_slowdown([snapshot])
    slow = [] if found is None else [f"slowdown {found:.2f} ×"]
    for names, also_rates in ((EVENTS, True), (SHORT, True), (SHORT, False)):
        events = [
            f"{shown} {snapshot.counters[what]:,}"
            + (f" ({rate(rates.rate(snapshot.pid, what))})" if also_rates else "")
            for shown, what in zip(names, EVENTS, strict=True)
        ]
        if columns is None or cell_len("  ".join([*events, *slow])) <= columns:
            break
    return [*events, *slow]


def name(snapshot: Snapshot) -> str:
    rank = snapshot.meta.get("rank")
    return f"pid {snapshot.pid}" if rank is None else f"rank {plain(rank, 8)}"


def picture(
    snapshots: Sequence[Snapshot],
    settings: RuntimeSettings,
    rates: Rates,
    stream: TextIO,
    columns: int,
    height: int,
) -> list[str]:
    """Return the table as lines of ANSI text, in at most half the rows of a terminal of this size."""
    console = console_for(stream, columns, live=True)
    shown, room = running(snapshots), height // 2
    if columns < NARROW or room < 5:
        return _lines(console, Text(line(shown[0], rates)))[: min(room, 1)]
    one = len(shown) == 1
    wide = one and columns >= LEFT + GAP + RIGHT
    most = max(1, room - 6)  # processes
    parts: list[RenderableType] = [
        _memory(shown[0], rates, LEFT if wide else columns)
        if one
        else _processes(shown, rates, most, columns)
    ]
    used = 4 + (shown[0].driver is not None) + len(other_gpus(shown[0])) if one else 3 + min(len(shown), most)

    times_of = [("in all", breakdown(total(shown)))]
    if one and (step := shown[0].values("step")) is not None:
        times_of.insert(0, ("last step", breakdown(step)))
    times_of = times_of[-max(1, room - used - 1) :]
    if used + 1 + len(times_of) <= room:
        parts.append(breakdown_table(times_of, LEFT if wide else columns, short=True))
        used += 1 + len(times_of)

    warning = _warning(shown)
    count = min(MOST_OPERATORS, used - 2 if wide else room - used - 1 - len(warning))
    if count > 0 and (costliest := rematerialized(operators(shown))):
        costs = operators_table(costliest, count, columns - LEFT - GAP if wide else columns)
        parts = [_side_by_side(Group(*parts), costs)] if wide else [*parts, costs]
    return _lines(console, Group(_title(shown, settings, rates, columns), *parts, *warning))[:room]


def _side_by_side(left: RenderableType, right: RenderableType) -> Table:
    sides = Table.grid(padding=(0, GAP, 0, 0))
    sides.add_column(width=LEFT, no_wrap=True, overflow="ellipsis")
    sides.add_column()
    sides.add_row(left, right)
    return sides


def _title(shown: Sequence[Snapshot], settings: RuntimeSettings, rates: Rates, columns: int) -> Text:
    counters = total(shown)
    device = shown[0].meta.get("device") or settings.device
    left = f" · {plain(settings.heuristic, 30)}{_changed(shown[0])} · {plain(device, 12)} "
    seconds = max(s.counters["wall_ns"] for s in shown) / 1e9
    speed = rate(max(rates.steps(s.pid) for s in shown))
    right = f" {times(counters['steps'], 'step')} · {speed} · {duration(seconds)} "
    fill = "─" * max(0, columns - cell_len("── dtrrun" + left + right + "──"))
    return Text.assemble(("── ", "dim"), ("dtrrun", "bold"), left, (fill, "dim"), right, ("──", "dim"))


def _changed(snapshot: Snapshot) -> str:
    """Return when --heuristic auto replaced the first rule, if it did. The final table names the new one."""
    rule = snapshot.values("rule") or {}
    if rule.get("source") not in ("searched", "varying", "remembered", "thrashing"):
        return ""
    return ", remembered" if rule["source"] == "remembered" else f", new at step {rule.get('since_step')}"


def _memory(snapshot: Snapshot, rates: Rates, columns: int) -> Group:
    counters = snapshot.counters
    budget = counters["budget_bytes"] if counters["budget_bytes"] > 0 else None
    pinned, evictable = counters["pinned_bytes"], counters["evictable_bytes"]
    against = f" of {format_size(budget)}" if budget else ", no budget"
    resident = f"  {format_size(counters['resident_bytes'])}{against}"
    room = max(10, columns - len("tensors  ") - 24)
    legend = [
        Text.assemble((BAR[0], PINNED), f" pinned {format_size(pinned)}"),
        Text.assemble((BAR[1], EVICTABLE), f" evictable {format_size(evictable)}"),
        Text(f"evicted {format_size(counters['evicted_bytes'])}"),
        Text(f"peak {format_size(counters['peak_bytes'])}"),
    ]
    while len(legend) > 2 and 9 + Text("  ").join(legend).cell_len > columns:
        del legend[2]  # rather than cut a figure
    return Group(
        Text.assemble(
            ("tensors  ", "dim"),
            memory_bar(pinned, evictable, counters["resident_bytes"], budget or counters["peak_bytes"], room),
            (resident, "bold"),
        ),
        Text.assemble("         ", Text("  ").join(legend)),
        Text.assemble("         ", "  ".join(_events(snapshot, rates, columns - 9))),
        *_driver(snapshot, budget),
        *(
            Text.assemble(
                (f"cuda:{found['index']}".ljust(9), "dim"),
                (format_size(found["bytes"]), OVER if budget and found["bytes"] > budget else "bold"),
                f"  evicted {format_size(found['evicted_bytes'])}  peak {format_size(found['peak_bytes'])}",
            )
            for found in other_gpus(snapshot)
        ),
    )


def _driver(snapshot: Snapshot, budget: int | None) -> list[Text]:
    """Return what the driver shows on a GPU: the figure that the budget limits."""
    use = snapshot.driver
    if use is None:
        return []
    over = budget is not None and use.nbytes > budget
    violations = f"  over the budget {times(use.violations, 'time')}" if use.violations else ""
    return [
        Text.assemble(
            ("driver   ", "dim"),
            (format_size(use.nbytes), OVER if over else "bold"),
            f"  peak {format_size(use.peak_bytes)}  ({SOURCE[use.source]})",
            (violations, OVER),
        )
    ]


def _processes(shown: Sequence[Snapshot], rates: Rates, most: int, columns: int) -> Table:
    """Return one line per process, with events per second, and one for all, with total events.

    The least important figures that do not fit are omitted.
    """
    rows = []
    for snapshot in shown[:most]:
        speeds = [rate(rates.rate(snapshot.pid, what)) for what in EVENTS]
        use = snapshot.driver
        driver = (format_size(use.nbytes), SOURCE[use.source]) if use else ("–", "")
        events = [*speeds, rate(rates.steps(snapshot.pid))]
        rows.append(_cells(name(snapshot), snapshot.counters, driver, events, step_slowdown([snapshot])))
    counters = total(shown)
    driver = (format_size(sum(s.driver.nbytes for s in shown if s.driver)), "")
    events = [f"{counters[what]:,}" for what in (*EVENTS, "steps")]
    rows.append(_cells(f"all {len(shown)}", counters, driver, events, step_slowdown(shown)))
    names = list(rows[0])
    if not any(snapshot.driver for snapshot in shown):
        names = [one for one in names if one not in ("driver", "source")]
    left_out = ("pinned", "evictable", "source", "slowdown", "evicted", "budget", "evictions")
    return narrowed(columns, rows, names, left_out)


def _cells(
    label: str,
    counters: Mapping[str, int],
    driver: tuple[str, str],
    events: Sequence[str],
    slowdown: float | None,
) -> dict[str, str]:
    budget = counters["budget_bytes"]
    evictions, rematerializations, steps = events
    return {
        "process": label,
        "tensors": format_size(counters["resident_bytes"]),
        "driver": driver[0],
        "source": driver[1],
        "budget": format_size(budget) if budget > 0 else "–",
        **{what: format_size(counters[f"{what}_bytes"]) for what in ("pinned", "evictable", "evicted")},
        "evictions": evictions,
        "remat.": rematerializations,
        "steps": steps,
        "slowdown": times_as_long(slowdown),
    }


def _warning(shown: Sequence[Snapshot]) -> list[Text]:
    newest = [row.get("text") for row in table(shown, "warnings")][-1:]
    return [Text.assemble(("warning  ", "yellow"), plain(text)) for text in newest]


def _lines(console: Console, what: RenderableType) -> list[str]:
    with console.capture() as capture:
        console.print(what, no_wrap=True, overflow="ellipsis")
    return capture.get().rstrip("\n").split("\n")
