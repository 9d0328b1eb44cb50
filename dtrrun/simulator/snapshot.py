"""The begin of a log of `dtrrun record`: what the ledger knew then (compare `runtime.snapshot`)."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from dtrrun.ledger.ledger import Ledger
from dtrrun.ledger.record import Blank, Op, Record, Signature, inputs_of, new_record

from .standins import Content


class Operator:
    """As much of an operator as the ledger asks of it."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def new_op(name: str, cost: int, output_bytes: int, tensors: list[Any]) -> Op:
    """A recipe without the function and its arguments."""
    op = Op()
    op.func = op.kwargs = op.rng = op.held = op.outputs = None
    op.args, op.kept, op.secured, op.state, op.autocast = [], (), False, (), ()
    op.signature = Signature(Operator(name), ())
    op.signature.cost, op.signature.output_bytes = cost, output_bytes
    op.tensors, op.inputs = tensors, inputs_of(tensors)
    return op


def restore(ledger: Ledger, facts: dict[str, Any], contents: dict[int, Content]) -> None:
    """Fill the ledger and `contents` (by number) from the facts of a STATE annotation."""
    records: list[Record] = []
    for told in facts["records"]:
        record = _record(ledger, told, contents)
        records.append(record)
    ops = [_op(told, records) for told in facts["ops"]]
    for told, record in zip(facts["records"], records, strict=True):
        if told["op"] is not None:
            record.op = ops[told["op"]]
    small = [contents[number] for number in facts["small"]]
    ledger.small_constants = deque(small, ledger.small_constants.maxlen)


def _record(ledger: Ledger, told: dict[str, Any], contents: dict[int, Content]) -> Record:
    content = Content(told["bytes"])
    alive = told["storage"] is not None
    on_death = ledger.on_death if alive else _no_matter
    record = new_record(content, on_death, told["bytes"], told["age"], told["access"])
    record.cost, record.version = told["cost"], told["version"]
    record.pin, record.exposed = told["pin"], told["exposed"]
    record.superseded, record.used = told["superseded"], told["used"]
    if alive:
        contents[told["storage"]] = content
        ledger.records[record.key] = record
        ledger.grow(record.nbytes)
    else:
        record.resident = False
    return record


def _no_matter(_record: Any) -> None:
    """An old version's storage is not the ledger's concern."""


def _op(told: dict[str, Any], records: list[Record]) -> Op:
    tensors = [
        Blank(entry["blank"], None) if isinstance(entry, dict) else records[entry]
        for entry in told["tensors"]
    ]
    op = new_op(told["operator"], told["cost"], told["bytes"], tensors)
    if told["outputs"] is not None:
        op.outputs = tuple((where, weakref.ref(records[place])) for where, place in told["outputs"])
    return op
