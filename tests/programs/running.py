"""Runs a drawn program plain and under dtrrun, and compares everything it holds, bit for bit.

A session covers part of the program: what was made before is older than the session, and the rest runs on
tensors that the session has left behind. After each step inside, the session's own data must be consistent.
"""

from __future__ import annotations

import gc
import random
from tempfile import gettempdir
from typing import Any, NamedTuple

import torch

import dtrrun
from tests.care import budget
from tests.conformance.programs import assert_same, bits, let_copies_overlap
from tests.programs import invariants, steps_autograd, steps_mutation, steps_python, steps_tensors  # noqa: F401
from tests.programs.language import HELD, Program, World

COMPOUND = ("train", "optimize", "backward_again", "handle_module", "change_leaf")
"""These may write to one tensor more than once: after an error it may have any intermediate value."""


class Conditions(NamedTuple):
    """How a program is run under dtrrun.

    share: None for a budget of one byte that may be exceeded (all is evicted at every moment); else how
    far the budget lies from the peak of such a run (0) towards the program's own (1). first, left_out: steps
    that run before the session begins, and after it has ended. careful: as in `tests.care.budget`. turns:
    heuristics that alternate, one for each step. host: whether constants leave, too; in every second
    program, copies are made ahead as for a GPU. counted: whether the first half of the steps has no budget,
    or an ample one, and is only counted, as far as its operators have run before.
    """

    share: float | None = None
    heuristic: str = "h_dtr_eq"
    first: int = 0
    left_out: int = 0
    careful: bool = True
    turns: tuple[str, ...] = ()
    host: bool = False
    counted: bool = False


STRESS = Conditions()
AMPLE = 1 << 40


def plain(program: Program) -> list[Any]:
    w = World()
    w.run(program)
    return w.state()


def peak_bytes(program: Program, budget_bytes: int | None) -> int:
    with dtrrun.budget(budget_bytes, over_budget="evict", cost="model") as session:
        w = World()
        w.run(program)
        return int(session.report()["peak_bytes"])


def budget_of(program: Program, share: float | None, least_bytes: int | None) -> int:
    if share is None:
        return 1
    least = peak_bytes(program, 1) if least_bytes is None else least_bytes
    return max(1, int(least + share * (peak_bytes(program, None) - least)))


def compare(
    program: Program,
    conditions: Conditions = STRESS,
    expected: list[Any] | None = None,
    least_bytes: int | None = None,
) -> dict[str, Any]:
    """Run under dtrrun and compare with a plain run; return the session's report."""
    expected = plain(program) if expected is None else expected
    budget_bytes = budget_of(program, conditions.share, least_bytes)
    done = first = min(conditions.first, len(program))
    split = max(len(program) - conditions.left_out, first)
    w = World()
    w.run(program[:first])
    weight = torch.zeros(1, requires_grad=True)
    counted = range(first, (first + split) // 2 if conditions.counted else first)
    with budget(
        (AMPLE if conditions.host else None) if counted else budget_bytes,
        careful=conditions.careful,
        over_budget="evict" if conditions.share is None else "error",
        heuristic=conditions.heuristic,
        verify=not counted,  # which has to see all operators
        cost="model",  # decisions do not depend on the machine: failures are reproducible
        host_budget=f"1GB:{gettempdir()}" if conditions.host else "none",
    ) as session:
        if conditions.host:
            if len(program) % 2:
                let_copies_overlap(session)
            session.ledger.least_copy_bytes = 1
            session.ledger.results_leave = len(program) % 3  # never, where that is cheaper, always
            session.ledger.let_constants_leave()
        if len(program) % 3:  # it trains: then gradients are not searched for in other ways
            torch.optim.SGD([weight])
        if counted:
            generators = torch.get_rng_state(), random.getstate()
            World().run(program[first:split])
            torch.set_rng_state(generators[0])
            random.setstate(generators[1])
            session.interposer.count_only()
            assert session.ledger.counting
        try:
            for done in range(first, split):
                if counted and done == counted.stop:
                    session.set_budget(budget_bytes)
                w.run(program[done : done + 1], lambda: invariants.check(session))
                if conditions.turns:
                    session.change_heuristic(conditions.turns[done % len(conditions.turns)])
                    invariants.check(session)
            done = split
            if split == len(program):
                assert_same(expected, w.state(), "inside of the session")
        except dtrrun.BudgetError:
            session.set_budget(None)
            if done < split:
                check_survivors(program, done, w)
                w.run(program[done + 1 :], lambda: invariants.check(session))
            expected, split = w.state(), len(program)
        invariants.check(session)
        generators = torch.get_rng_state(), random.getstate()
        report = session.report()
        ledger = session.ledger
        report["decisions"] = getattr(ledger, "decisions", 0), getattr(ledger, "digest", 0)
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    assert session.report()["mismatches"] == [], session.report()["mismatches"]
    if conditions.share is not None and not (report["error"] or report["over_budget"]):
        assert report["peak_bytes"] <= budget_bytes, "more than the budget, and not a word"
    assert not any("could not be brought back" in text for text in session.warnings), session.warnings
    w.run(program[split:])
    assert_same(expected, w.state(), "after the session's end")
    return report


def check_survivors(program: Program, failed: int, w: World) -> None:
    """Check that after BudgetError in a step, each tensor is as before the step or as it would be after."""
    name = program[failed][0]
    if name in ("within", "in_thread"):
        return
    twin = World()
    twin.run(program[:failed])
    del twin.tensors[:-HELD]
    before = [bits([x]) for x in twin.tensors]
    twin.run(program[failed : failed + 1])
    after = [bits([x]) for x in twin.tensors[: len(before)]]
    for place, x in enumerate(w.tensors[: len(before)]):
        if name in COMPOUND and before[place] != after[place]:
            continue
        found = bits([x])
        if found != after[place]:
            assert_same(before[place], found, f"tensor {place} after BudgetError in step {failed} ({name})")


def settle() -> None:
    """Collect the cycles that the last program has left; later collections can skip what stays."""
    gc.collect()
    gc.freeze()
