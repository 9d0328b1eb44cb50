"""The ledger at the beginning of a recorded step: its versions, and recipes that reach further back."""

from __future__ import annotations

from typing import Any

import torch

from dtrrun.core.dtr import DTR
from dtrrun.core.graph import Operation, Overwritten, Version
from dtrrun.runtime.cost_model import rates_of
from dtrrun.runtime.observe.step_log import FORMAT, Facts


def head(dtr: DTR, step: int, last: int, cost: str) -> Facts:
    ledger = dtr.ledger
    facts: Facts = {
        "format": FORMAT,
        "step": step,
        "last": last,
        "cost": cost,
        "torch": torch.__version__,
        "device": ledger.device_type,
        "clock": ledger.clock,
        "age": ledger.age,
        "step_age": ledger.step_age,
        "former_step_age": dtr.history.former_step_age,
        "step_work": ledger.step_work,
        "former_work": dtr.history.former_work,
        "work_so_far": ledger.clock - ledger.recomputed_cost - ledger.step_began,
    }
    if cost == "model":
        facts["rates"] = rates_of(ledger.device_type)[:2]
    if ledger.budget_bytes is not None and ledger.host is not None and ledger.host_costs is not None:
        host = ledger.host
        facts["host"] = [host["most_bytes"], *ledger.host_costs, ledger.results_leave, host["overlaps"]]
        facts["constants_leave"] = ledger.constants_leave
    return facts


def state(dtr: DTR, numbers: dict[int, int]) -> Facts:
    """Return versions and operations, which refer to each other by index.

    The storages' current versions come first, in the ledger's order, then old versions that recipes read.
    """
    ledger, trusts = dtr.ledger, dtr.recipes.foreign.trusts
    versions: list[Version] = list(ledger.versions.values())
    alive = len(versions)
    operations: list[Operation] = []
    makers: list[Version] = []
    places: dict[int, int] = {id(version): place for place, version in enumerate(versions)}
    op_places: dict[int, int] = {}
    for version in versions:  # grows during the loop
        operation = version.operation
        if operation is None or id(operation) in op_places:
            continue
        op_places[id(operation)] = len(operations)
        operations.append(operation)
        makers.append(version)
        for source in (*operation.inputs, *operation.versions(version)):
            if id(source) not in places:
                places[id(source)] = len(versions)
                versions.append(source)
    return {
        "records": [
            {
                "storage": numbers[version.key] if place < alive else None,
                "bytes": version.nbytes,
                "cost": version.cost,
                "access": version.last_access,
                "age": version.age,
                "version": version.mutations,
                "pin": version.pin,
                "exposed": version.escaped and not trusts(version),
                "superseded": version.superseded,
                "used": version.used,
                "fixed": version.fixed or (version.escaped and trusts(version)),
                "period": version.period,
                "copied": version.operation is None and version.scratch is not None,
                **({"device": version.device} if version.device else {}),
                "op": None if version.operation is None else op_places[id(version.operation)],
            }
            for place, version in enumerate(versions)
        ],
        "ops": [_told(operation, maker, places) for operation, maker in zip(operations, makers, strict=True)],
        "small": [numbers[key] for key in map(ledger.key_of, ledger.small_constants) if key in numbers],
    }


def _told(operation: Operation, maker: Version, places: dict[int, int]) -> dict[str, Any]:
    outputs = None
    if operation.outputs is not None:
        outputs = [[where, places[id(version)]] for where, version in operation.made(maker)]
    return {
        "operator": operation.signature.operator.name,
        "cost": operation.signature.cost,
        "bytes": operation.signature.output_bytes,
        # Several tensors may be over one overwritten memory, which is identified by the first one's place.
        "tensors": [
            {"blank": entry.nbytes, "first": [*map(id, operation.tensors)].index(id(entry))}
            if type(entry) is Overwritten
            else places[id(entry)]
            for entry in operation.tensors
        ],
        "outputs": outputs,
        "maker": places[id(maker)],
    }
