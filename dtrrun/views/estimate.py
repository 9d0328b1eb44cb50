"""What a program takes on a GPU that is not here, as a table for a terminal (`dtrrun estimate`)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, TextIO

from rich.text import Text

from dtrrun.sizes import format_size
from dtrrun.views.panels import console_for, facts_table, heading, print_to
from dtrrun.views.text import duration, for_encoding, plain, times

STYLES = {"fits": "green", "tight": "yellow", "budget": "yellow", "no": "red"}


def print_estimate(result: Mapping[str, Any], stream: TextIO, *, width: int | None = None) -> None:
    """Write a `result` (docs/estimate.md) to `stream`; in colour only on a terminal."""
    console = console_for(stream, width)
    print_to(stream, console, heading("dtrrun estimate"), facts_table(rows_of(result), "fold"))
    if words := result.get("run"):
        stream.write(for_encoding(f"\n{plain(shlex.join(words), 2000)}\n", stream.encoding))
    stream.flush()


def rows_of(result: Mapping[str, Any]) -> dict[str, str | Text]:
    """Return the table by label."""
    room, needs = result["gpu_bytes"], result["needs_bytes"]
    workspaces = result["allocated_bytes"] - result["tensors_bytes"]
    rest = result["segments_bytes"] - result["allocated_bytes"]
    parts = [f"{format_size(result['tensors_bytes'])} tensors"]
    parts += [f"{format_size(workspaces)} workspaces"] if workspaces else []
    parts += [f"{format_size(rest)} unused parts of segments"]
    parts += [f"about {format_size(result['context_bytes'])} CUDA itself"]
    rows: dict[str, str | Text] = {
        "GPU": f"{plain(result['gpu'], 40)}: {format_size(room)} for programs",
        "needs": f"{format_size(needs)}: {', '.join(parts)}",
        "": Text(_verdict(result), style=STYLES[result["verdict"]]),
        "stays": f"{format_size(result['state_bytes'])} between steps",
    }
    if (least := result["least_budget_bytes"]) is not None:
        slower = _slower(result["least_slowdown"])
        rows["least budget"] = f"about {format_size(least)} without the host's memory, {slower}"
    else:
        rows["least budget"] = "none below what it takes without one"
    within = 100 * (result["step_within"] - 1)
    like = "" if result["priced_as"] == result["gpu"] else f" on an {plain(result['priced_as'], 40)}"
    rows["a step"] = f"about {duration(result['step_seconds'])}{like}, ± {within:.0f} %"
    rows["seen"] = times(result["steps"], "step")
    for place, note in enumerate(result["notes"]):
        rows["but" if not place else f"but {place + 1}"] = plain(note, 200)
    return rows


def _verdict(result: Mapping[str, Any]) -> str:
    room, needs, verdict = result["gpu_bytes"], result["needs_bytes"], result["verdict"]
    if verdict == "fits":
        return f"It fits, with {format_size(room - needs)} to spare."
    if verdict == "tight":
        return "It may fit: the allocator has to give back what it does not use, and may find no room."
    over = f"It does not fit: {format_size(needs - room)} too much."
    if verdict == "budget":
        leaves = f", if {format_size(host)} leave for the host" if (host := result["host_bytes"]) else ""
        return f"{over} With dtrrun it does{leaves}: {_slower(result['slowdown'])}."
    return f"{over} Nor does it with dtrrun."


def _slower(slowdown: float) -> str:
    """Say how much longer a step takes."""
    if slowdown < 1.005:
        return "a step takes as long"
    return f"a step takes {slowdown:.2f} times as long, or more"
