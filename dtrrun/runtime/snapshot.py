"""The ledger at the begin of a recorded step: what there is, and the recipes that reach back beyond it."""

from __future__ import annotations

from typing import Any

import torch

from dtrrun.ledger.record import Blank, Op, Record
from dtrrun.runtime import storage as memory
from dtrrun.runtime.ledger import Ledger
from dtrrun.runtime.step_log import FORMAT, Facts


def head(ledger: Ledger, step: int, last: int, cost: str) -> Facts:
    return {
        "format": FORMAT,
        "step": step,
        "last": last,
        "cost": cost,
        "torch": torch.__version__,
        "device": ledger.device_type,
        "refill_copies": memory.REFILL_COPIES,
        "clock": ledger.clock,
        "age": ledger.age,
        "step_age": ledger.step_age,
    }


def state(ledger: Ledger, numbers: dict[int, int]) -> Facts:
    """Records and operators refer to each other by their places.

    Those of the storages come first, in the ledger's order; then old versions that a recipe reads.
    """
    records: list[Record] = list(ledger.records.values())
    alive = len(records)
    ops: list[Op] = []
    makers: list[Record] = []
    places: dict[int, int] = {id(record): place for place, record in enumerate(records)}
    op_places: dict[int, int] = {}
    for record in records:  # grows meanwhile
        op = record.op
        if op is None or id(op) in op_places:
            continue
        op_places[id(op)] = len(ops)
        ops.append(op)
        makers.append(record)
        for source in (*op.inputs, *op.records(record)):
            if id(source) not in places:
                places[id(source)] = len(records)
                records.append(source)
    return {
        "records": [
            {
                "storage": numbers[record.key] if place < alive else None,
                "bytes": record.nbytes,
                "cost": record.cost,
                "access": record.last_access,
                "age": record.age,
                "version": record.version,
                "pin": record.pin,
                "exposed": record.exposed and not ledger.foreign.trusts(record),
                "superseded": record.superseded,
                "used": record.used,
                "op": None if record.op is None else op_places[id(record.op)],
            }
            for place, record in enumerate(records)
        ],
        "ops": [_told(op, maker, places) for op, maker in zip(ops, makers, strict=True)],
        "small": [numbers[id(storage)] for storage in ledger.small_constants if id(storage) in numbers],
    }


def _told(op: Op, maker: Record, places: dict[int, int]) -> dict[str, Any]:
    outputs = None
    if op.outputs is not None:
        outputs = [
            [where, places[id(record)]]
            for where, reference in op.outputs
            if (record := reference()) is not None
        ]
    return {
        "operator": op.signature.operator.name,
        "cost": op.signature.cost,
        "bytes": op.signature.output_bytes,
        "tensors": [
            {"blank": entry.nbytes} if type(entry) is Blank else places[id(entry)] for entry in op.tensors
        ],
        "outputs": outputs,
        "maker": places[id(maker)],
    }
