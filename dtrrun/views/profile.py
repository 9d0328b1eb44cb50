"""The display of `dtrrun profile`: a progress bar, and tables at the end."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from dtrrun.sizes import format_size, format_size_up
from dtrrun.views.panels import console_for, facts_table, heading, print_to
from dtrrun.views.text import duration, for_encoding, plain, times_as_long

STYLES = {"too small": "red", "thrash": "yellow", "failed": "red"}


class Bar:
    """On a terminal, a bar with the current activity and the time left; otherwise nothing."""

    def __init__(self, stream: TextIO, *, quiet: bool) -> None:
        console = console_for(stream, None)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._bar = Progress(
            *columns, console=console, transient=True, disable=quiet or not console.is_terminal
        )
        self._task = self._bar.add_task("", total=1.0, left="")

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, what: str, seconds: float, left: float | None) -> None:
        """Update after `seconds`, with about `left` seconds remaining."""
        done = seconds / (seconds + left) if left is not None else 0.0
        text = "" if left is None else f"about {duration(max(round(left), 1))} left"
        self._bar.update(self._task, description=plain(what, 60), completed=done, left=text)


def print_profile(result: Mapping[str, Any], stream: TextIO, *, width: int | None = None) -> None:
    """Write the tables of a `result` (docs/profile.md) to `stream`; in colour only on a terminal."""
    console = console_for(stream, width)
    sections = _varied(result) if "vary" in result else _curve(result, console.width)
    print_to(stream, console, heading("dtrrun profile"), *sections)
    for name, comment in (("run", ""), ("run_minimum", "  # the minimum")):
        if words := result.get(name):  # to be copied, so not truncated as the tables are
            command = f"\n{plain(shlex.join(words), 2000)}{comment}\n"
            stream.write(for_encoding(command, stream.encoding))
    stream.flush()


def _curve(result: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    peak, minimum, best = (result[f"{name}_bytes"] for name in ("plain_peak", "minimum", "recommended"))
    if peak is None:
        yield Text("nothing was found yet", style="dim")
        return
    rows: dict[str, str | Text] = {"plain peak": _bytes(peak)}
    if (reserve := result.get("plain_reserve_bytes")) is not None:  # most of a small program's peak
        overhead = result["plain_overhead_bytes"]
        rows["of that"] = (
            f"{format_size(overhead)} CUDA itself, {format_size(reserve)} kept free as a reserve"
        )
    rows["plain step"] = duration(result["plain_step_seconds"])
    if minimum is not None:
        label = "minimum" if result["minimum_certified"] else "least so far"  # no run just below failed
        needs = _needs(result.get("minimum_host_bytes"))
        rows[label] = f"{_bytes(minimum)}  {100 * minimum / peak:.0f} % of the peak{needs}"
    if best is not None:
        needs = _needs(result.get("recommended_host_bytes"))
        rows["recommended"] = Text(
            f"{_bytes(best)}  {100 * best / peak:.0f} % of the peak{needs}", style="bold"
        )
    yield facts_table(rows)
    if result["points"]:
        yield ""
        marks = {
            point["budget_bytes"]: "larger failed"
            for point in result["points"]
            if point["measured"] and (minimum is None or point["budget_bytes"] < minimum)
        }
        marks |= {minimum: "minimum" if result["minimum_certified"] else "", best: "recommended"}
        yield _points(result["points"], marks, narrow=width < 96)


def _points(points: Sequence[Mapping[str, Any]], marks: Mapping[int, str], *, narrow: bool) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    leaves = any(map(_on_host, points))
    counts = ([] if leaves and narrow else ["evictions"]) + (["on host"] if leaves else [])
    for label in ("budget", "", "predicted", "measured", *counts):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("heuristic", no_wrap=True, overflow="ellipsis")
    table.add_column("status", no_wrap=True)
    for point in points:
        budget, measured = point["budget_bytes"], point["measured"]
        shown = measured or point["predicted"]
        note = marks.get(budget, "")
        status = shown["status"]
        if not measured:
            status = "predicted" if status == "ok" else f"{status}, predicted"
        elif status != "ok":
            note = ""
        cells = {
            "evictions": f"{shown['evictions']:,}" if shown["status"] == "ok" else "",
            "on host": format_size_up(_on_host(point)) if _on_host(point) else "",
        }
        table.add_row(
            f"{100 * point['share']:.0f} %",
            format_size(budget),
            times_as_long(point["predicted"]["slowdown"]),
            times_as_long(measured["slowdown"] if measured else None),
            *map(cells.__getitem__, counts),
            Text(plain(point["heuristic"], 8 if narrow else 40)),
            Text.assemble(
                (status, STYLES.get(shown["status"], "" if measured else "dim")), f"  {note}" if note else ""
            ),
            style="bold" if note == "recommended" else None,
        )
    return table


def _varied(result: Mapping[str, Any]) -> Iterator[RenderableType]:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for label in (plain(" ".join(result["vary"]), 40), "peak", "slowdown", "evictions"):
        table.add_column(Text(label), justify="right", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for row in result["values"]:
        table.add_row(
            f"{row['value']:,}",
            format_size(row["peak_bytes"]),
            times_as_long(row["slowdown"]),
            f"{row['evictions']:,}",
            Text.assemble(
                (row["status"], STYLES.get(row["status"], "")),
                "  largest" if row["value"] == result["largest"] else "",
            ),
            style="bold" if row["value"] == result["largest"] else None,
        )
    yield Text(f"in a budget of {_bytes(result['target_budget_bytes'])}")
    yield ""
    yield table
    if result["with_margin"]:
        margin = format_size(result["margin_budget_bytes"])
        yield ""
        if (certain := result["certain"]) is None:
            yield Text(f"certain: none that was tried works in {margin}, too")
        else:
            yield Text(f"certain: {certain:,}, which works in {margin}, too", style="bold")


def _on_host(point: Mapping[str, Any]) -> int:
    """Return the bytes of copies on the host that a budget that works needs; 0 if nothing leaves."""
    shown = point["measured"] or point["predicted"]
    found: int = shown.get("host_bytes", 0) if shown["status"] == "ok" else 0
    return found


def _needs(host_bytes: int | None) -> str:
    return f", needs {format_size_up(host_bytes)} of host memory" if host_bytes else ""


def _bytes(nbytes: int) -> str:
    return f"{format_size(nbytes)}  ({nbytes:,} bytes)"
