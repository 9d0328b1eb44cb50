"""The verb `smoke`: does a program compute the same inside a budget? For CI."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dtrrun import values
from dtrrun.cli.command import of_run
from dtrrun.cli.github_summary import summary_writer
from dtrrun.cli.messages import if_someone_reads, say, show_tail, to_stdout
from dtrrun.cli.nesting import inside_another
from dtrrun.cli.options import collect
from dtrrun.cli.report_file import file_writer, refuse_one_path_twice, report_writer, write_each
from dtrrun.launch.errors import FAILED, LaunchError
from dtrrun.launch.interpreter import choose
from dtrrun.launch.signals import interrupting
from dtrrun.launch.target import refuse_stream, resolve
from dtrrun.profiling.room import budget_for
from dtrrun.settings import OUTPUT, RuntimeSettings, option
from dtrrun.sizes import parse_size
from dtrrun.smoke.checks import NAMES, Check, check_peak, check_run, check_slowdown, check_state, skipped
from dtrrun.smoke.junit import junit
from dtrrun.smoke.runs import Run, run_once
from dtrrun.telemetry.fields import ENOUGH_STEPS
from dtrrun.views.markdown import of_smoke
from dtrrun.views.text import plain as safe
from dtrrun.views.text import times

SCHEMA = "dtrrun.smoke/1"
FAILED_CHECK = 1
WORDS = {True: "ok", False: "FAILED", None: "skipped"}
SHARES = ("60%", "70%", "80%", "90%")
"""Without --budget: shares of the program's peak, of which the first that is enough is used."""
BY_DEFAULT = f"{SHARES[0]} or more"
SETTLING_SECONDS = 120.0  # in addition to the budget's slowdown: first imports, a busy machine
TIMES_PLAIN = 20

USAGE = "smoke [OPTIONS] [--] TARGET [ARGS]..."
EPILOG = """
[bold]Examples[/bold]

dtrrun smoke train.py --epochs 1

dtrrun smoke --budget 4GB --steps 5 --max-slowdown 1.5 --junit smoke.xml -m mypackage.train

[bold]Exit status[/bold]: 0, all checks passed; 1, one did not; 2, usage error; 125, dtrrun failed, or a
result could not be written.
"""

WHAT = "What to check"


@dataclass(frozen=True)
class Smoke:
    """The options of `dtrrun smoke`."""

    budget: str | None = option(
        "6GB, 512MB, or a share of the program's peak (by default 60%, or the first of 70%, 80% and 90% that "
        "is enough).",
        WHAT,
        read=values.amount,
    )
    steps: int = option("End each run after N optimizer steps.", WHAT, 5)
    max_slowdown: float | None = option(
        "Fail if a step in the budget takes more than X times as long as a plain one (no limit by default).",
        WHAT,
        read=values.slowdown,
    )
    seed: int = option(
        "Seed of PyTorch's, Python's and NumPy's generators in each run.",
        WHAT,
        0,
        read=values.whole_number(least=0),
    )
    timeout: int = option("Give up when the plain run takes longer than this.", WHAT, 3600, word="SECONDS")
    of_run: Mapping[str, Any] = of_run("heuristic", "device", "python", panel=WHAT)
    junit: str | None = option("Write the checks as JUnit XML.", OUTPUT)
    json: str | None = option("Write the checks as JSON; - is standard output.", OUTPUT)
    github_summary: bool = option("Add the checks to the summary of a job on GitHub Actions.", OUTPUT, False)
    quiet: bool = option("Print only the checks that fail.", OUTPUT, False)


def smoke(given: Smoke, target: Sequence[str]) -> int:
    """Run TARGET for a few steps without and with a budget, and check that the results are the same.

    The check passes if both runs succeed, the training state (parameters, buffers, optimizers, random
    generators) has the same bits, the peak is within the budget and the slowdown within its limit. TARGET
    needs no change; its output is shown if it fails. Both runs start with the same seed; the script may set
    its own.
    """
    json, quiet = given.json, given.quiet
    if given.max_slowdown is not None and given.steps < ENOUGH_STEPS:
        raise LaunchError(f"--max-slowdown: this needs at least {ENOUGH_STEPS} --steps")
    options = inside_another(collect(given.of_run), limits=False)
    for warning in options.warnings if not quiet else ():
        say(f"warning: {warning}")
    refuse_stream(target, "smoke")
    command = resolve(target, lambda: choose(options.python))
    settings = replace(
        options.settings,
        budget_bytes=None,
        max_steps=given.steps,
        max_slowdown=None,
        verify=False,
        state=True,
        manual_seed=given.seed,
    )
    title = safe(" ".join(target), 100)
    add = summary_writer(given.github_summary)
    refuse_one_path_twice({"--json": json, "--junit": given.junit})
    with report_writer(json) as write, file_writer(given.junit, "--junit") as write_junit:
        unprinted: list[str] = []
        shown: Callable[[str], None] = (lambda line: None) if quiet else _printer(json, unprinted)
        shown(f"dtrrun smoke: {title}, {times(given.steps, 'step')}, budget {given.budget or BY_DEFAULT}")
        with interrupting():  # so that nothing is left behind
            checks, failed, budget_bytes = _check(given, settings, command, shown)
        passed = not any(check.passed is False for check in checks)
        if failed is not None:
            show_tail(failed.ended.tail)
        if not passed:
            for check in checks:
                if check.passed is False:
                    say(f"error: smoke: {check.name}: {safe(check.detail)}")
        result: dict[str, Any] = {
            "schema": SCHEMA,
            "command": list(command),
            "passed": passed,
            "budget_bytes": budget_bytes,
            "checks": [asdict(check) for check in checks],
        }
        unwritten = write_each(
            {
                "--junit": lambda: write_junit([junit(title, checks, failed.ended.tail if failed else "")]),
                "--json": lambda: write(result),
                "--github-summary": lambda: add(of_smoke(title, result["checks"], passed)),
            }
        )
    if not passed:
        return FAILED_CHECK
    return FAILED if unwritten or unprinted else 0


def _check(
    given: Smoke, settings: RuntimeSettings, command: Sequence[str], shown: Callable[[str], None]
) -> tuple[list[Check], Run | None, int | None]:
    """Run all checks. Returns them, the run that failed, if any, and the budget in bytes, if known."""
    checks: list[Check] = []

    def add(check: Check) -> bool:
        checks.append(check)
        shown(f"  {WORDS[check.passed]:<8}{check.name:<20}{safe(check.detail)}")
        return check.passed is not False

    def give_up(run: Run, why: str) -> tuple[list[Check], Run, None]:
        for check in skipped(NAMES[len(checks) :], why):
            add(check)
        return checks, run, None

    plain = run_once(replace(settings, plain=True), command, given.timeout)
    if not add(check_run(NAMES[0], plain)):
        return give_up(plain, "the plain run failed")
    patience = SETTLING_SECONDS + TIMES_PLAIN * plain.ended.seconds
    budgets = (given.budget,) if given.budget else SHARES
    counted = run_once(settings, command, patience) if "%" in budgets[0] else None
    if counted is not None and counted.error:
        add(check_run(NAMES[1], counted))
        return give_up(counted, "the run without a budget failed under dtrrun")
    for budget in budgets:
        nbytes = _bytes(budget, counted)
        other = run_once(replace(settings, budget_bytes=nbytes), command, patience)
        if not other.too_small:
            break
    check = check_run(NAMES[1], other)
    if not given.budget:
        check = replace(check, detail=_with_share(check.detail, budget, other))
    if not add(check):
        return give_up(other, "the run in the budget failed")
    add(check_state(plain, other, lambda: run_once(replace(settings, plain=True), command, patience)))
    add(check_peak(other, nbytes))
    add(check_slowdown(plain, other, given.max_slowdown))
    return checks, None, nbytes


def _bytes(budget: str, counted: Run | None) -> int:
    """Return the budget in bytes. counted: for a percentage, the run without a budget that measured the peak.

    On a GPU it is a percentage of the tensors' memory: most of a small program's peak is CUDA itself.
    """
    try:
        if counted is None:
            return parse_size(budget)
        tensors = max(counted.peak_bytes - (counted.overhead_bytes or 0), 1)
        return budget_for(parse_size(budget, lambda: tensors), counted.overhead_bytes)
    except ValueError as error:
        raise LaunchError(f"--budget: {error}") from None


def _with_share(detail: str, share: str, run: Run) -> str:
    """Add to `detail` which of the `SHARES` was used, or that none was enough."""
    if run.too_small:
        return f"even {share} of its peak is too small: it takes {run.too_small}"
    less = f" ({SHARES[place - 1]} is too small)" if (place := SHARES.index(share)) else ""
    return f"{detail}, in {share} of its peak{less}"


def _printer(json: str | None, unprinted: list[str]) -> Callable[[str], None]:
    """Return a function that prints a line. If that fails, the checks continue, and `unprinted` gets it."""

    def to_stderr(line: str) -> None:
        with if_someone_reads():
            print(line, file=sys.stderr, flush=True)

    return to_stderr if json == "-" else lambda line: unprinted.extend(write_each({line: lambda: _out(line)}))


def _out(line: str) -> None:
    with to_stdout():
        print(line)
