"""Decisions depend neither on whether C++ or Python runs an operator again, nor on observers."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, note

from dtrrun.core.ledger import Ledger
from dtrrun.core.observer import Observer
from dtrrun.runtime.dispatch.callbacks import Reasons
from tests.programs import drawing
from tests.programs.amount import NUMBER, search, seeded
from tests.programs.language import Program
from tests.programs.running import Conditions, compare, plain, settle

COUNTS = (
    "evictions",
    "evicted_bytes_total",
    "rematerializations",
    "rematerialized_bytes",
    "peak_bytes",
    "over_budget",
)
HEURISTICS = (
    "h_dtr_eq",
    "h_chain",
    "random",
    "h_chain(c=ancestors,s=.2,next=1,released=alike)",
    "h_dtr_eq",
    "h_chain(c=e_star,s=.6,next=.5,released=first)",
)
TURNS = ("h_chain", "h_dtr_eq", "h_dtr_eq", "lru", "h_chain(c=e_star,s=.6,next=0,released=alike)")

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


def careful(patch: pytest.MonkeyPatch) -> None:
    begin = Reasons.__init__

    def begin_carefully(reasons: Reasons, *args: Any) -> None:
        begin(reasons, *args)
        reasons.add("a test")

    patch.setattr(Reasons, "__init__", begin_carefully)


def observed(patch: pytest.MonkeyPatch) -> None:
    begin = Ledger.__init__

    def begin_observed(ledger: Ledger, *args: object, **named: object) -> None:
        begin(ledger, *args, **named)  # type: ignore[arg-type]
        ledger.observers.append(Observer())

    patch.setattr(Ledger, "__init__", begin_observed)


def both(
    monkeypatch: pytest.MonkeyPatch,
    otherwise: Callable[[pytest.MonkeyPatch], None],
    program: Program,
    conditions: Conditions,
    expected: list[Any] | None = None,
    least: int | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the decisions of a session, and those of one that `otherwise` has changed."""
    native = decisions(compare(program, conditions, expected, least))
    with monkeypatch.context() as patch:
        otherwise(patch)
        return native, decisions(compare(program, conditions, expected, least))


@pytest.mark.parametrize(("otherwise", "part"), [(careful, 3), (observed, 6)])
def test_decisions_are_the_same(
    monkeypatch: pytest.MonkeyPatch, otherwise: Callable[[pytest.MonkeyPatch], None], part: int
) -> None:
    tally: Counter[str] = Counter()

    @search(max(NUMBER // part, 1))
    @given(drawing.programs, drawing.conditions)
    def same(program: Program, conditions: Conditions) -> None:
        expected = plain(program)
        least = None
        for share in (None, conditions.share, 0.3):
            heuristic = HEURISTICS[len(program) % len(HEURISTICS)]
            turns = TURNS if heuristic == "random" or share == 0.3 else ()
            one = conditions._replace(share=share, careful=False, heuristic=heuristic, turns=turns)
            note(f"compare({program!r}, {one!r})")
            native, other = both(monkeypatch, otherwise, program, one, expected, least)
            assert native == other
            least = native.get("peak_bytes") if least is None else least
            tally["compared"] += 1
            tally["errors"] += "error" in native
            tally["rematerialized"] += native.get("rematerializations", 0) > 0
            settle()

    gc.disable()  # when it frees cycles depends on how many objects have been made
    try:
        seeded(same)()
    finally:
        gc.enable()
    print(dict(tally))
    assert tally["rematerialized"] > tally["compared"] / 4


def test_decisions_are_the_same_where_operations_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that no longer waits does not count as a reader of what it would have made."""
    least = decisions(compare(GIVEN_UP, Conditions(share=None, careful=False)))["peak_bytes"]
    for share in (-0.4, -0.3, -0.2):
        conditions = Conditions(share=share, careful=False)
        native, other = both(monkeypatch, careful, GIVEN_UP, conditions, None, least)
        assert native == other
        assert native["rematerializations"] > 0
