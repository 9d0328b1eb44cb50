"""Costs of operators, from the log of a plain run, for predictions and later runs."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from dtrrun.simulator.log import START, Annotate, Call, Instruction, LogError, Mutate
from dtrrun.telemetry.private import open_private

FORMAT = 1
"""Format of the file, which `dtrrun.runtime.costs` describes and reads."""

Costs = dict[str, tuple[int, int]]
"""By a signature's identity: ns, and bytes that it allocates."""


def costs_of(log: Iterable[Instruction]) -> Costs:
    """Return what the run knew of each signature at its end."""
    found: Costs = {}
    for one in log:
        if isinstance(one, (Call, Mutate)) and one.facts and "signature" in one.facts:
            found[one.facts["signature"]] = (
                one.cost,
                int(one.facts["again" if "again" in one.facts else "bytes"]),
            )
    return found


def settled(log: Sequence[Instruction], costs: Costs) -> list[Instruction]:
    """Return the log as if the run had known these costs from the beginning."""
    return [_settled(one, costs) for one in log]


def _settled(one: Instruction, costs: Costs) -> Instruction:
    if not (isinstance(one, (Call, Mutate)) and one.facts and one.facts.get("signature") in costs):
        return one
    cost, nbytes = costs[one.facts["signature"]]
    facts = {name: value for name, value in one.facts.items() if name != "again"} | {"bytes": nbytes}
    return one._replace(cost=cost, facts=facts)


def write_costs(path: Path, log: Sequence[Instruction], costs: Costs) -> None:
    """Write the file, readable only by its owner. Raises OSError, LogError."""
    head = log[0] if log else None
    if not (isinstance(head, Annotate) and head.text == START and head.facts):
        raise LogError("the log does not say what it was recorded with")
    content = {
        "format": FORMAT,
        "torch": head.facts["torch"],
        "device": head.facts["device"],
        "signatures": {name: [cost, nbytes, 0] for name, (cost, nbytes) in sorted(costs.items())},
    }
    part = path.with_name(f".{os.getpid()}-{path.name}")
    raw = open_private(part, "wb")
    try:
        with raw, gzip.GzipFile("", "wb", 9, raw, 0) as file:
            file.write(json.dumps(content, separators=(",", ":")).encode())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
