"""Costs of operators, from the log of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .log import Call, Instruction, Mutate

Costs = dict[str, tuple[int, int]]
"""Maps a signature's identity to its cost in ns and the bytes that it allocates."""


def costs_of(log: Iterable[Instruction]) -> Costs:
    """Return the cost and bytes that the run knew for each signature at its end."""
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
