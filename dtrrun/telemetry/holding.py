"""What holds memory at a program's peak: the names of its classes, and what to do about each.

Shared by the message of a budget error, the table at a run's end and the web page. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dtrrun.sizes import format_size

Row = Mapping[str, Any]

PARAMETERS, GRADIENTS, STATE, BUFFERS = "parameters", "gradients", "optimizer state", "buffers"
SAVED, TEMPORARIES, KEPT = "saved for backward", "temporaries", "kept by the program"
GIVEN, BATCH = "given out", "batch"
CLASSES = (PARAMETERS, STATE, BUFFERS, GRADIENTS, BATCH, KEPT, GIVEN, SAVED, TEMPORARIES)
"""In the order of a page's layers, those that stay the longest first."""

SMALL = 0.02
"""Below this share of the peak, nothing is advised."""
ITEM, DETACH, DELETE = "container", "graph", "variable"
"""How a variable keeps memory: in a container, by the graph of earlier steps, or as itself."""
REMEDIES = {
    ITEM: "keep less of it (item(), a mean), or move it to the CPU; del what is not needed",
    DETACH: "keeps graphs of earlier steps: keep its detach() or item() instead",
    DELETE: "del {} as soon as it is not needed",
}


def class_remedy(row: Row, peak_bytes: int) -> str:
    """Return what to do about a class of memory; "" if it is small, or nothing is known to help."""
    name, nbytes, evictable = str(row["name"]), int(row["bytes"]), int(row["evictable_bytes"])
    if nbytes < SMALL * peak_bytes:
        return ""
    if name == SAVED and evictable:
        return f"evictable: {_time(row['recompute_seconds'])} a step for all (--budget); or checkpoint"
    if name == STATE:
        return "may leave for the host (--host-budget); less state; FSDP"
    if name == GRADIENTS:
        return "zero_grad() before the forward pass; --host-budget; FSDP"
    if name == PARAMETERS:
        return "fewer bits; --host-budget; FSDP"
    if name == TEMPORARIES and evictable >= nbytes / 2:
        return "evictable (--budget)"
    if name == BATCH:
        return "a smaller batch; accumulate gradients"
    if name == KEPT:
        return "see below"
    if name == GIVEN:
        return "was given to NumPy or to native code: copy it"
    return ""


def variable_remedy(row: Row) -> str:
    """Return what to do about what a variable of the program keeps."""
    return REMEDIES.get(str(row.get("how")), "").format(row.get("name"))


def _time(seconds: float) -> str:
    if seconds < 0.9995:
        return f"{max(seconds, 1e-6) * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def rows_of(holds: Row) -> Iterable[tuple[str, str, str, str]]:
    """Yield the table of classes as text: class, bytes, share, what to do; the largest first."""
    peak = int(holds["bytes"])
    for row in holds["classes"]:
        share = f"{100 * int(row['bytes']) / peak:.0f} %" if peak else "–"
        yield str(row["name"]), format_size(int(row["bytes"])), share, class_remedy(row, peak)


def as_lines(holds: Row) -> list[str]:
    """Return the table of classes and variables as plain lines, for a message."""
    rows = [("held", "bytes", "share", "what to do"), *rows_of(holds)]
    rows += [
        (f"  {row['name']} {row['place']}", format_size(int(row["bytes"])), "", variable_remedy(row))
        for row in holds["variables"]
        if int(row["bytes"]) >= SMALL * int(holds["bytes"])
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"  {name:{widths[0]}}  {size:>{widths[1]}}  {share:>{widths[2]}}  {remedy}".rstrip()
        for name, size, share, remedy in rows
    ]
