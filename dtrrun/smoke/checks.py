"""The checks that compare two runs, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dtrrun.sizes import format_size
from dtrrun.smoke.runs import Run
from dtrrun.telemetry.fields import ENOUGH_STEPS
from dtrrun.telemetry.state import State

NAMED = 3  # maximum number of differences named


@dataclass(frozen=True)
class Check:
    """passed: None if the check was impossible. seconds: duration of its run."""

    name: str
    passed: bool | None
    detail: str
    seconds: float = 0.0


DOES_NOT_REPEAT = "two plain runs differ, too: the program itself does not repeat"
NAMES = ("plain run", "run in the budget", "training state", "peak", "slowdown")


def skipped(names: Sequence[str], why: str) -> list[Check]:
    return [Check(name, None, why) for name in names]


def check_run(name: str, run: Run) -> Check:
    """Check that the run succeeded and made at least one step."""
    seconds = run.ended.seconds
    if run.error:
        return Check(name, False, run.error, seconds)
    if not run.steps:
        return Check(name, False, "the script made no optimizer step", seconds)
    detail = f"{run.steps} {'step' if run.steps == 1 else 'steps'} in {seconds:.1f} s"
    if run.count("evictions"):
        detail += f", {run.count('evictions'):,} evictions"
    return Check(name, True, detail, seconds)


def check_state(plain: Run, other: Run, again: Callable[[], Run] | None = None) -> Check:
    """Check that parameters, buffers, optimizers and the random generator ended with the same bits.

    again: makes another plain run, to find out whether the program's results repeat at all.
    """
    name = NAMES[2]
    if len(plain.states) != len(other.states):
        counts = f"{len(plain.states)} training processes, {len(other.states)} in the budget"
        return Check(name, False, f"plain run: {counts}")
    for one, two in zip(plain.states, other.states, strict=True):
        if one["step"] != two["step"]:
            return Check(
                name, False, f"the plain run made {one['step']} steps, the run in the budget {two['step']}"
            )
        if differing := differences(one, two):
            shown = ", ".join(differing[:NAMED])
            more = f" and {len(differing) - NAMED} others" if len(differing) > NAMED else ""
            details = [f"{len(differing)} of {len(one['digests'])} differ: {shown}{more}"]
            details += map("it warned: {}".format, other.warnings[:1])
            if again is not None and check_state(plain, again()).passed is False:
                details.append(DOES_NOT_REPEAT)
            return Check(name, False, "; ".join(details))
    count = sum(len(state["digests"]) for state in plain.states)
    return Check(name, True, f"{count:,} tensors and values, the same bits")


def differences(one: State, two: State) -> list[str]:
    """Return the names whose bits differ, or that only one of the two states has."""
    names = dict.fromkeys([*one["digests"], *two["digests"]])
    return [name for name in names if one["digests"].get(name) != two["digests"].get(name)]


def check_peak(run: Run, budget_bytes: int) -> Check:
    peak, budget = run.peak_bytes, format_size(budget_bytes)
    within = peak <= budget_bytes and not run.count("over_budget")
    return Check(NAMES[3], within, f"{format_size(peak)} of {budget}")


def check_slowdown(plain: Run, other: Run, most: float | None) -> Check:
    """Compare the median steps, without the first. most: None for no limit."""
    before, after = plain.step_seconds, other.step_seconds
    if not before or after is None or min(plain.steps, other.steps) < ENOUGH_STEPS:
        return Check(NAMES[4], None, f"not measured: this needs at least {ENOUGH_STEPS} steps")
    found = after / before
    limit = "" if most is None else f", at most {most:g}"
    return Check(NAMES[4], most is None or found <= most, f"{found:.2f}{limit}")
