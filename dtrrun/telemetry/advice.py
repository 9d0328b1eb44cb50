"""Advice for a user whose budget is too small: what is known about the least budget, and how to find it.

The least budget of one operator is known when it fails, but a later operator may need more. What training
always keeps in memory is a second lower bound, often a larger one. The error message and the views of a run
use the same words for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrrun.sizes import format_size_up

PARTS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "the optimizer's state"}
"""The memory that training always needs: keys of the figures, and their names in messages."""

FOR_A_COMMAND = "Try --budget {}", "`dtrrun profile` finds the least budget"
FOR_A_BLOCK = (
    'Try dtrrun.budget("{}")',
    "a budget of the sufficient_bytes that report() gives under dtrrun.budget(None) is enough",
)


def advice(
    operator: str,
    least_bytes: int,
    training: Mapping[str, int | None] | None,
    expected_bytes: int = 0,
    how: tuple[str, str] = FOR_A_COMMAND,
) -> str:
    """`at least 37 MB for aten.mm; parameters, ... need about 497 MB. Try --budget 560MB ...; ... the least`.

    training: bytes by the names in `PARTS`, None if they cannot be estimated. expected_bytes: the budget
    expected to be enough, 0 if unknown. how: how to give a budget, and how to find the least one.
    """
    clauses = [f"at least {format_size_up(least_bytes)}" + (f" for {operator}" if operator else "")]
    given = training or {}
    known = {part: size for part in PARTS if isinstance(size := given.get(part), int) and size > 0}
    if known:
        *first, last = (PARTS[part] for part in known)
        names = f"{', '.join(first)} and {last}" if first else last
        clauses.append(f"{names} need about {format_size_up(sum(known.values()))}")
        if given.get("optimizer", 0) is None:
            clauses[-1] += ", plus the optimizer's state"
    attempt, search = how
    if not expected_bytes:
        begun = ". It has not computed with its parameters yet, so it is unknown how much it will need"
        return f"{'; '.join(clauses)}{begun if training else ''}; {search}"
    attempt = attempt.format(format_size_up(expected_bytes).replace(" ", ""))
    return f"{'; '.join(clauses)}. {attempt} (what has not run yet may need more); {search}"


def advice_of(error: Mapping[str, Any], least_bytes: int = 0) -> str:
    """Like `advice`, from the error table of a record (docs/report.md), in which every field is
    optional."""
    sizes = (least_bytes, error.get("least_budget_bytes"), error.get("called_bytes"))
    least = max(size for size in sizes if isinstance(size, int))
    training, expected = error.get("training"), error.get("expected_bytes")
    name = str(error.get("called") or error.get("operator") or "")
    return advice(
        name,
        least,
        training if isinstance(training, dict) else None,
        expected if isinstance(expected, int) else 0,
    )
