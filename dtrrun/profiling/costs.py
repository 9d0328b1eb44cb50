"""Writes the operator costs measured in a plain run, for later runs to read (`--costs`)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrrun.core.host import HostMemory
from dtrrun.simulator.costs import Costs
from dtrrun.simulator.log import START, Annotate, Instruction, LogError
from dtrrun.telemetry.private import replacing

FORMAT = 1
"""Version of the file format, which `dtrrun.runtime.costs` describes and reads."""


def write_costs(path: Path, log: Sequence[Instruction], costs: Costs, host: HostMemory | None = None) -> None:
    """Write the file, readable only by its owner. Raises OSError, LogError."""
    head = log[0] if log else None
    if not (isinstance(head, Annotate) and head.text == START and head.facts):
        raise LogError("the log does not say what it was recorded with")
    content: dict[str, Any] = {
        "format": FORMAT,
        "torch": head.facts["torch"],
        "device": head.facts["device"],
        "signatures": {name: [cost, nbytes, 0] for name, (cost, nbytes) in sorted(costs.items())},
    }
    if host is not None:
        content["host"] = [host.ns_out, host.ns_in]
    with replacing(path) as raw, gzip.GzipFile("", "wb", 9, raw, 0) as file:
        file.write(json.dumps(content, separators=(",", ":")).encode())
