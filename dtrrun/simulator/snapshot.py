"""Restores the ledger at the beginning of a log of `dtrrun record` (compare `runtime.observe.snapshot`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from dtrrun.bindings import graph
from dtrrun.core.dtr import DTR
from dtrrun.core.graph import Graph, Operation, Overwritten, Signature, Version, distinct
from dtrrun.core.ledger import Ledger

from .standins import new_content


class NamedOperator:
    """The part of an operator that the core needs."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


def new_signature(name: str, cost: int, output_bytes: int) -> Signature:
    signature = graph().signature(NamedOperator(name), ())
    signature.cost, signature.output_bytes = cost, output_bytes
    return signature


def restore(
    dtr: DTR,
    facts: dict[str, Any],
    enter: Callable[[int, Any, Version], None],
    content: Callable[[int], Any],
) -> None:
    """Fill the ledger from the facts of a STATE annotation.

    enter: called with the number, the stand-in and the version of each storage. content: returns the
    stand-in for a number.
    """
    ledger, versions = dtr.ledger, []
    on_death = ledger.on_death  # made anew each time
    for told in facts["records"]:
        version = _version(ledger, told, enter, on_death)
        versions.append(version)
    operations = [_op(ledger.graph, told, versions) for told in facts["ops"]]
    for told, version in zip(facts["records"], versions, strict=True):
        if told["op"] is not None:
            version.operation = operations[told["op"]]
    small = [content(number) for number in facts["small"]]
    ledger.small_constants = deque(small, ledger.small_constants.maxlen)


def _version(
    ledger: Ledger,
    told: dict[str, Any],
    enter: Callable[[int, Any, Version], None],
    on_death: Callable[[Any], None],
) -> Version:
    content = new_content(told["bytes"], told.get("device", 0))
    alive = told["storage"] is not None
    told_to = on_death if alive else _no_matter
    version = ledger.graph.new_version(content, told_to, told["bytes"], told["age"], told["access"])
    version.cost, version.mutations = told["cost"], told["version"]
    version.pin, version.escaped = told["pin"], told["exposed"]
    version.superseded, version.used = told["superseded"], told["used"]
    version.fixed, version.period = told.get("fixed", False), told.get("period", 0)
    if alive:
        enter(told["storage"], content, version)
    else:
        version.resident = False
        if told.get("copied"):
            ledger.keep_copy(version, new_content(told["bytes"]))
            ledger.use_copy(version)
    return version


def _no_matter(_record: Any) -> None:
    """An old version's storage does not concern the ledger."""


def _op(graph: Graph, told: dict[str, Any], versions: list[Version]) -> Operation:
    tensors: list[Any] = []
    for place, entry in enumerate(told["tensors"]):
        if not isinstance(entry, dict):
            tensors.append(versions[entry])
        elif (first := entry.get("first", place)) < place:
            tensors.append(tensors[first])
        else:
            tensors.append(Overwritten(entry["blank"], 0))
    signature = new_signature(told["operator"], told["cost"], told["bytes"])
    operation = graph.new_operation(None, signature, tensors, distinct(tensors))
    if told["outputs"] is not None:
        operation.outputs = [(where, versions[place]) for where, place in told["outputs"]]
    return operation
