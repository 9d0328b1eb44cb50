"""Random programs compute under dtrrun what they compute without it, bit for bit.

    pytest tests/programs                                  110 programs, always the same ones
    PROGRAMS=2500 PROGRAMS_SEED=1 pytest tests/programs    others; another seed is another share of the work

A failure is shrunk and printed; `compare(program, conditions)` of `running.py` runs it again.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings

from dtrrun.core.mutation import Mutation
from dtrrun.runtime import rng
from tests.programs import drawing
from tests.programs.amount import NUMBER, search, seeded
from tests.programs.language import STEPS, Program, World
from tests.programs.running import Conditions, compare, plain, settle


def run_both(program: Program, conditions: Conditions, tally: Counter[str]) -> None:
    """Run with everything evicted at every moment, and inside a share of the peak."""
    expected = plain(program)
    least = None
    counted = conditions._replace(share=None, counted=True, careful=False)
    for one in (conditions._replace(share=None), conditions, *[counted] * (len(program) % 3 == 0)):
        note(f"compare({program!r}, {one!r})")
        report = compare(program, one, expected, least)
        kind = (
            "counted"
            if one.counted
            else "stress"
            if one.share is None
            else "over"
            if report["error"]
            else "budget"
        )
        tally[kind] += 1
        tally[f"{kind} evicted"] += report["evictions"] > 0
        tally[f"{kind} rematerialized"] += report["rematerializations"] > 0
        least = least or report["peak_bytes"]
    settle()


def test_random_programs() -> None:
    tally: Counter[str] = Counter()

    @search(NUMBER)
    @given(drawing.programs, drawing.conditions)
    def same_bits(program: Program, conditions: Conditions) -> None:
        run_both(program, conditions, tally)

    seeded(same_bits)()
    print(dict(tally))
    if NUMBER >= 100:
        check_that_it_bites(tally)


def check_that_it_bites(tally: Counter[str]) -> None:
    """Check that most runs have something to recompute."""
    assert tally["stress"] >= 0.9 * NUMBER
    assert tally["stress rematerialized"] >= 0.8 * tally["stress"], f"too little was evicted: {tally}"
    assert tally["budget rematerialized"] >= 0.25 * tally["budget"], f"too little was evicted: {tally}"
    assert tally["budget"] >= 0.4 * tally["stress"], f"too few budgets suffice: {tally}"
    assert tally["over"] >= 0.05 * tally["stress"], f"too few budgets do not: {tally}"


BREAKS: dict[str, tuple[object, str, object]] = {
    "random state": (
        rng.replaying,
        "__enter__",
        lambda context: context.extend((one, one.get_state()) for one, _ in context._captured),
    ),
    "handed out": (Mutation, "written_outside", lambda self, version, why, escapes: None),
}
"""Parts of the Python runtime, and what replaces them. `tests/mutants` breaks those in C++."""


@pytest.mark.parametrize("part", BREAKS)
def test_what_is_broken_is_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead = BREAKS[part]
    monkeypatch.setattr(owner, name, instead, raising=owner is not Mutation)  # its methods are in C++

    @settings(
        max_examples=300,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(drawing.programs, drawing.conditions)
    def same_bits(program: Program, conditions: Conditions) -> None:
        compare(program, conditions._replace(share=None))
        settle()

    with pytest.raises((AssertionError, RuntimeError)):
        same_bits()


@pytest.mark.parametrize("name", STEPS)
def test_every_step_works_for_each_of_its_arguments(name: str) -> None:
    """No step is always refused by PyTorch: such steps would test nothing."""
    _, domains = STEPS[name]
    for place, domain in enumerate(domains):
        for value in () if domain is drawing.Body else domain:
            arguments = [(() if other is drawing.Body else other[0]) for other in domains]
            arguments[place] = value
            assert works(name, arguments), (name, arguments)


def works(name: str, arguments: list[object]) -> bool:
    """Return whether a step succeeds in at least one of several worlds."""
    before: tuple[Program, ...] = (
        (),
        (("leaf", 0, "tensor"), ("unary", 0, "sin"), ("hold_twice", 0)),
        (("make", "complex", (16, 16)), ("train", 1, "linear", "sgd"), ("numpy", 0, "change")),
        (("drop", 0), ("make", "complex", (16, 16)), ("view", 0, "conj")),
        (("leaf", 0, "tensor"), ("chain", 0, 2, False), ("backward", 0, True)),
        (("make", "randn", (16, 16)),),
        (("make", "complex", (16, 16)),),
        (("leaf", 0, "tensor"),),
    )
    for steps in before:
        w = World()
        w.run((*steps, (name, *arguments)))
        if not w.seen or not str(w.seen[-1]).startswith(f"{name}: "):
            return True
    return False
