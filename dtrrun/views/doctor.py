"""Prints the report of `dtrrun doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dtrrun.sizes import format_size
from dtrrun.views.panels import columns_table, console_for, facts_table, fitting, print_to
from dtrrun.views.text import SOURCE, plain, times

WIDTHS = ((40, 60), (40, 12), (20, 12), (20, 0))
"""Of a device's name and UUID, the widest first. CUDA_VISIBLE_DEVICES takes a UUID's first digits, too."""

LEVELS = {"problem": "bold red", "advice": "yellow", "note": "dim"}


def print_doctor(report: dict[str, Any], stream: TextIO, *, width: int | None = None) -> None:
    """Write the report's tables and findings to `stream`; in colour only on a terminal."""
    console = console_for(stream, width)
    print_to(stream, console, *_sections(report, console.width))


def _sections(report: dict[str, Any], width: int) -> Iterator[RenderableType]:
    yield _facts(report)
    if report["devices"]:
        yield ""
        yield fitting(width, *(_devices(report, *widths) for widths in WIDTHS))
    yield ""
    for finding in report["findings"]:
        label = Text(finding["level"], style=LEVELS[finding["level"]])
        yield Text.assemble(label, "  ", plain(finding["text"], 400))
        yield Padding(Text(f"→ {plain(finding['do'], 400)}"), (0, 0, 0, 2))
    problems = sum(finding["level"] == "problem" for finding in report["findings"])
    if problems:
        yield Text(f"A run on {report['device']} cannot work: {times(problems, 'problem')}.", style="red")
    else:
        yield Text(f"A run on {report['device']} can work.", style="green")


def _facts(report: dict[str, Any]) -> Table:
    torch, driver = report["torch"], report["driver"]
    where = [name for name, true in (("WSL", report["wsl"]), ("container", report["container"])) if true]
    rows = {
        "dtrrun": report["dtrrun"],
        "system": ", ".join([report["system"], *where]),
        "driver": f"NVML does not answer: {driver['error']}"
        if driver["error"]
        else f"{driver['driver']}, NVML {driver['nvml']}, for CUDA {driver['cuda']}",
        "Python": f"{torch.get('python', '?')}  {torch.get('executable') or report['interpreter']}",
        "PyTorch": torch.get("error") or f"{torch['torch']}, {_built(torch)}",
    }
    if "native" in torch:
        rows["native"] = _native(torch["native"])
    if "backend" in torch:
        rows["allocator"] = f"{torch['backend']}, {format_size(torch['reserved_bytes'])} reserved by a test"
    if report["source"]:
        shown = format_size(report["shown_bytes"])
        rows["source"] = f"{report['source']} ({SOURCE[report['source']]}): {shown} for that test"
    for name, value in report["environment"].items():
        rows[name] = repr(value)
    return facts_table({label: plain(value, 400) for label, value in rows.items()}, "fold")


def _built(torch: dict[str, Any]) -> str:
    if torch["hip"]:
        return f"for ROCm {torch['hip']}"
    if not torch["cuda"]:
        return "for the CPU"
    return f"for CUDA {torch['cuda']}, which is {'' if torch['available'] else 'not '}available"


def _native(native: dict[str, Any]) -> str:
    if native["why"]:
        return "not available"
    if native["shipped"]:
        return f"included: {native['path']}"
    if native["built"]:
        return f"built: {native['path']}"
    return f"not built yet: the first run compiles it with {native['compiler']} (once, about a minute)"


def _devices(report: dict[str, Any], name_width: int, digits: int) -> Table:
    """Return one line per device, with CUDA's number and the first `digits` characters of the UUID."""
    uuids = ["UUID"] if digits else []
    table = columns_table("cuda", "GPU", "memory", "in use", "processes", "name", *uuids)
    for column in table.columns[5:]:
        column.justify = "left"
    table.columns[5].max_width, table.columns[5].no_wrap = name_width, False
    for device in report["devices"]:
        uuid, listed = device["uuid"], device["processes"]
        number = report["visible"].index(uuid) if uuid in report["visible"] else None
        name = f"{device['name']} (MIG mode)" if device["mig"] else device["name"]
        table.add_row(
            "–" if number is None else str(number),
            str(device["index"]),
            *(_size(device[which]) for which in ("total_bytes", "used_bytes")),
            "?" if listed is None else str(listed),
            Text(plain(name, 40)),
            *(Text(plain(uuid, 60)[:digits]) for _ in uuids),
        )
    return table


def _size(size: int | None) -> str:
    return "?" if size is None else format_size(size)
