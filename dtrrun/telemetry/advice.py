"""Advice for a user whose budget is too small: what is known about the least budget, and how to find it.

The least budget of one operator is known when it fails, but a later operator may need more. What training
always keeps in memory is a second lower bound, often a larger one. The error message and the views of a run
use the same words for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dtrrun.sizes import format_size_up

PARTS = {"parameters": "parameters", "gradients": "gradients", "optimizer": "the optimizer's state"}
"""The memory that training always needs: keys of the figures, and their names in messages."""

NEAR = 0.95
"""A budget that may be enough is worth mentioning if it is less than this share of the other."""

ESTIMATED = "an estimate: what has not run yet may need more"
SLOW = 1.5
"""A slowdown that is worth mentioning."""

FOR_A_COMMAND = "Try --budget {}", "`dtrrun profile` finds the least budget"
FOR_A_BLOCK = (
    'Try dtrrun.budget("{}")',
    "a budget of the sufficient_bytes that report() gives under dtrrun.budget(None) is enough",
)


class Advised(NamedTuple):
    """Budgets in bytes, 0 if unknown: 0 < least ≤ likely ≤ expected ≤ plain, as far as they are known.

    least: what one operator takes. likely: may be enough. expected: should be enough. plain: what the program
    takes without a budget, which is enough. slowdown: how many times as long as its own work a backward pass
    takes in the expected budget, as far as that is known. basis: in words, what the expected budget is for;
    "" if `plain` is known.
    """

    least: int = 0
    expected: int = 0
    likely: int = 0
    plain: int = 0
    slowdown: float = 1.0
    basis: str = ""

    @classmethod
    def of(cls, least: int, expected: int, likely: int, plain: int, slowdown: float = 1.0) -> Advised:
        """Put these in order. The plain peak is what has been measured, so the others give way."""
        if plain:
            least, expected = min(least, plain), min(expected, plain)
        expected = max(expected, least) if expected else 0
        return cls(
            least, expected, min(max(likely, least), expected) if likely else expected, plain, slowdown
        )


def advice(
    operator: str,
    advised: Advised,
    training: Mapping[str, int | None] | None,
    how: tuple[str, str] = FOR_A_COMMAND,
) -> str:
    """`at least 37 MB for aten.mm; parameters, ... need about 497 MB. Try --budget 560MB ...; ... the least`.

    training: bytes by the names in `PARTS`, None if they cannot be estimated. how: how to give a budget, and
    how to find the least one.
    """
    clauses = [f"at least {format_size_up(advised.least)}" + (f" for {operator}" if operator else "")]
    given = training or {}
    known = {part: size for part in PARTS if isinstance(size := given.get(part), int) and size > 0}
    if known and not 0 < advised.expected < sum(known.values()):  # not all of it is needed at once
        *first, last = (PARTS[part] for part in known)
        names = f"{', '.join(first)} and {last}" if first else last
        clauses.append(f"{names} need about {format_size_up(sum(known.values()))}")
        if given.get("optimizer", 0) is None:
            clauses[-1] += ", plus the optimizer's state"
    attempt, search = how
    if not advised.expected:
        begun = ". It has not computed with its parameters yet, so it is unknown how much it will need"
        return f"{'; '.join(clauses)}{begun if training else ''}; {search}"
    attempt = attempt.format(_compact(advised.expected))
    return f"{'; '.join(clauses)}. {attempt} ({_reason(advised)}); {search}"


def _reason(advised: Advised) -> str:
    """Return what the advised budget is based on."""
    reasons = []
    if advised.slowdown >= SLOW:
        reasons.append(f"a backward pass takes about {advised.slowdown:.1f} times as long there")
    if not advised.plain:
        reasons.append(advised.basis or ESTIMATED)
    elif advised.expected < advised.plain:
        reasons.append(f"without a budget it takes {_compact(advised.plain)}")
    else:
        reasons.append("what it takes without a budget")
    if advised.likely < NEAR * advised.expected:
        reasons.append(f"{_compact(advised.likely)} may be enough")
    return "; ".join(reasons)


def _compact(nbytes: int) -> str:
    return format_size_up(nbytes).replace(" ", "")


def advice_of(error: Mapping[str, Any], least_bytes: int = 0) -> str:
    """Like `advice`, from the error table of a record (docs/report.md), in which every field is
    optional."""
    least = max(least_bytes, *(bytes_of(error, name) for name in ("least_budget_bytes", "called_bytes")))
    names = "expected_bytes", "likely_bytes", "plain_bytes"
    advised = Advised.of(least, *(bytes_of(error, name) for name in names))
    training = error.get("training")
    name = str(error.get("called") or error.get("operator") or "")
    slowdown = error.get("expected_slowdown")
    advised = advised._replace(slowdown=float(slowdown) if isinstance(slowdown, (int, float)) else 1.0)
    advised = advised._replace(basis=str(error.get("basis") or ""))
    return advice(name, advised, training if isinstance(training, dict) else None)


def bytes_of(table: Mapping[str, Any], name: str) -> int:
    """Return a number of bytes; 0 if the table has none of that name."""
    size = table.get(name)
    return size if isinstance(size, int) else 0
