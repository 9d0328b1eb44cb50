"""Made-up snapshots of training processes, for the tests of the views."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.driver import DriverUse
from dtrrun.telemetry.fields import COUNTERS
from dtrrun.telemetry.record import Snapshot

SETTINGS = RuntimeSettings(budget_bytes=200_000_000)
NAMES = (
    "aten.convolution",
    "aten.native_batch_norm",
    "aten.relu_",
    "aten.max_pool2d_with_indices",
    "aten.addmm",
    "aten._scaled_dot_product_flash_attention_for_cpu",
)
EVIL = "[bold red]mine[/]\x1b[2J\r\n\u202edna :smile:"


def snapshot(
    pid: int = 4711,
    rank: int | None = None,
    seconds: float = 0.0,
    tables: dict[str, Any] | None = None,
    ended: bool = False,
    alive: bool = True,
    **counters: int,
) -> Snapshot:
    """A process `seconds` after the first look: 56 evictions, 45 rematerializations, 2.5 steps a second."""
    values = dict.fromkeys(COUNTERS, 0) | {
        "budget_bytes": 200_000_000,
        "resident_bytes": 187_300_000,
        "peak_bytes": 199_800_000,
        "evictable_bytes": 120_000_000,
        "pinned_bytes": 60_000_000,
        "evicted_bytes": 340_100_000,
        "evictions": 1234 + int(56 * seconds),
        "evicted_bytes_total": 4_100_000_000,
        "rematerializations": 987 + int(45 * seconds),
        "rematerialized_bytes": 3_200_000_000,
        "steps": 42 + int(2.5 * seconds),
        "wall_ns": int(23.4e9 + seconds * 1e9),
        "operators_ns": int(15.2e9),
        "rematerialization_ns": int(4.2e9),
        "scoring_ns": int(0.4e9),
        "search_ns": int(0.06e9),
        "bookkeeping_ns": int(1.2e9),
    }
    operators = [
        {
            "name": name,
            "rematerializations": 300 - 40 * place,
            "seconds": 2.4 / (place + 1) ** 2,
            "bytes": 10**9 // (place + 1),
            "evictions": 300,
        }
        for place, name in enumerate(NAMES)
    ]
    step = {"index": 41, "operators_ns": 250e6, "rematerialization_ns": 80e6, "scoring_ns": 8e6}
    step |= {"search_ns": 1e6, "bookkeeping_ns": 20e6, "wall_ns": 400e6, "peak_bytes": 199_800_000}
    return Snapshot(
        pid=pid,
        meta={"pid": pid, "ppid": 1, "rank": rank, "argv": ["train.py"], "torch": "2.13.0", "device": "cpu"}
        | {"start": 1.0e9},
        counters=values | counters,
        tables={
            "operators": operators,
            "step": step,
            "step_slowdown": 1.8,
            "warnings": [],
            "pinned": [],
            "mismatches": [],
            "error": None,
        }
        | (tables or {}),
        ended=ended,
        status="ended" if ended else "",
        alive=alive,
        read_ns=int(seconds * 1e9),
    )


def on_gpu(snapshot: Snapshot, source: str = "nvml_pid", violations: int = 0) -> Snapshot:
    """The same process on a GPU whose driver shows 14 MB more than the tensors' peak."""
    over = 13_800_000 if violations else 0
    use = DriverUse("GPU-1a2b3c4d", 198_000_000 + over, 200_000_000 + over, source, violations, over)
    return replace(snapshot, meta=snapshot.meta | {"device": "cuda"}, driver=use)


def stream(encoding: str = "utf-8") -> io.TextIOWrapper:
    """A text stream that is not a terminal; `.buffer.getvalue()` is what was written."""
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="\n")


def written(to: io.TextIOWrapper) -> str:
    to.flush()
    return bytes(to.buffer.getvalue()).decode(to.encoding)  # type: ignore[attr-defined]


def printed(show: Callable[..., None], result: Any, width: int | None = None, encoding: str = "utf-8") -> str:
    """What a view prints of a result where there is no terminal."""
    to = stream(encoding)
    show(result, to, width=width)
    return written(to)


def without_colour(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
