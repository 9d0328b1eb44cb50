"""Decisions where rematerializations have to be given up, handled as usual and with care."""

from __future__ import annotations

from typing import Any

from tests.programs.language import Program
from tests.programs.running import Conditions, compare

COUNTS = (
    "evictions",
    "evicted_bytes_total",
    "rematerializations",
    "rematerialized_bytes",
    "peak_bytes",
    "over_budget",
)
GIVEN_UP: Program = (
    ("drop", 0),
    ("drop", 0),
    ("higher", 0, "hessian_vector"),
    ("drop", 1),
    ("unary", 0, "sin"),
    ("change_module", "linear", "eval"),
    ("within", "saved_twice", (("higher", 0, "grad"),)),
    ("unary", 0, "sin"),
)
"""With hardly more than the memory it needs, operations waiting for their inputs are given up many times."""


def decisions(report: dict[str, Any]) -> dict[str, Any]:
    if report["error"]:  # while it is handled, its traceback keeps what Python frames refer to
        return {"error": report["error"]["operator"]}
    return {name: report[name] for name in (*COUNTS, "decisions")}


def test_decisions_are_the_same_where_operations_are_given_up() -> None:
    """An operation that no longer waits does not count as a reader of what it would have made."""
    least = decisions(compare(GIVEN_UP, Conditions(share=None, careful=False)))["peak_bytes"]
    for share in (-0.4, -0.3, -0.2):
        conditions = Conditions(share=share, careful=False)
        native = decisions(compare(GIVEN_UP, conditions, None, least))
        with_care = conditions._replace(careful=True)
        assert decisions(compare(GIVEN_UP, with_care, None, least)) == native
        assert native["rematerializations"] > 0
