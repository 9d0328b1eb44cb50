"""The verb `smoke`: does a program come to the same inside a budget? For CI."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, TypeAlias

import typer

from dtrrun.cli import values
from dtrrun.cli.messages import if_someone_reads, say, show_tail, to_stdout
from dtrrun.cli.nesting import inside_another
from dtrrun.cli.options import collect
from dtrrun.cli.parameters import flag, read, text
from dtrrun.cli.report_file import file_writer, refuse_one_path_twice, report_writer, write_each
from dtrrun.launch.errors import FAILED, LaunchError
from dtrrun.launch.interpreter import choose
from dtrrun.launch.target import resolve
from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import parse_size
from dtrrun.smoke.checks import NAMES, Check, check_peak, check_run, check_slowdown, check_state, skipped
from dtrrun.smoke.junit import junit
from dtrrun.smoke.runs import Run, run_once
from dtrrun.views.text import plain as safe
from dtrrun.views.text import times

SCHEMA = "dtrrun.smoke/1"
FAILED_CHECK = 1
WORDS = {True: "ok", False: "FAILED", None: "skipped"}
SETTLING_SECONDS = 120.0  # beyond what a budget may slow a run down by: the first imports, a busy machine
TIMES_PLAIN = 20

EPILOG = """
[bold]Examples[/bold]

dtrrun smoke train.py --epochs 1

dtrrun smoke --budget 4GB --steps 5 --max-slowdown 1.5 --junit smoke.xml -m mypackage.train

[bold]Exit status[/bold]: 0, all checks passed; 1, one did not; 2, wrong usage; 125, dtrrun failed, or a
result could not be written.
"""
COMMAND: dict[str, Any] = {
    "options_metavar": "smoke [OPTIONS] [--] TARGET [ARGS]...",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
_Text: TypeAlias = str | None
_WHAT, _OUTPUT = "What to check", "Output"


def smoke(
    ctx: typer.Context,
    budget: Annotated[str, text(_WHAT, "SIZE", "6GB, 512MB, or a share of the plain run's peak.")] = "60%",
    steps: Annotated[str, text(_WHAT, "N", "End each run after N optimizer steps.")] = "3",
    max_slowdown: Annotated[
        _Text,
        text(
            _WHAT,
            "X",
            "Fail if a step in the budget takes more than X times as long as a plain one (no limit by "
            "default).",
        ),
    ] = None,
    seed: Annotated[
        str, text(_WHAT, "N", "Seed of PyTorch's, Python's and NumPy's generators in each run.")
    ] = "0",
    heuristic: Annotated[_Text, text(_WHAT, "NAME", "As for a run.")] = None,
    device: Annotated[_Text, text(_WHAT, "DEVICE", "As for a run.")] = None,
    timeout: Annotated[
        str, text(_WHAT, "SECONDS", "Give up when the plain run takes longer than this.")
    ] = "3600",
    junit_path: Annotated[
        _Text,
        typer.Option(
            "--junit", metavar="PATH", rich_help_panel=_OUTPUT, help="Write the checks as JUnit XML."
        ),
    ] = None,
    json: Annotated[_Text, text(_OUTPUT, "PATH", "Write the checks as JSON; - is standard output.")] = None,
    quiet: Annotated[bool, flag(_OUTPUT, "quiet", "Print only the checks that fail.")] = False,
    python: Annotated[_Text, text(_WHAT, "PATH", "The interpreter for a script, -m or -c.")] = None,
) -> int:
    """Run TARGET for a few steps without and with a budget, and check that the results are the same.

    The check passes if both runs succeed, the training state (parameters, buffers, optimizers, random
    generators) has the same bits, the peak is within the budget and the slowdown within its limit. TARGET
    needs no change; its output is shown if it fails. Both runs start with the same seed; the script may set
    its own.
    """
    count = values.whole_number(least=1)
    wanted = read("--steps", count, steps)
    most = None if max_slowdown is None else read("--max-slowdown", values.slowdown, max_slowdown)
    patience = float(read("--timeout", count, timeout))
    read("--budget", lambda size: parse_size(size, lambda: 1 << 40), budget)
    options = collect({"heuristic": heuristic, "device": device, "python": python})
    options = inside_another(options, limits=False)
    for warning in options.warnings if not quiet else ():
        say(f"warning: {warning}")
    command = resolve(ctx.obj, lambda: choose(options.python))
    settings = replace(
        options.settings,
        budget_bytes=None,
        max_steps=wanted,
        max_slowdown=None,
        verify=False,
        state=True,
        manual_seed=read("--seed", values.whole_number(least=0), seed),
    )
    title = safe(" ".join(ctx.obj), 100)
    refuse_one_path_twice({"--json": json, "--junit": junit_path})
    with report_writer(json) as write, file_writer(junit_path, "--junit") as write_junit:
        unprinted: list[str] = []
        shown: Callable[[str], None] = (lambda line: None) if quiet else _printer(json, unprinted)
        shown(f"dtrrun smoke: {title}, {times(wanted, 'step')}, budget {budget}")
        checks, failed, budget_bytes = _check(settings, command, budget, most, patience, shown)
        passed = not any(check.passed is False for check in checks)
        if failed is not None:
            show_tail(failed.ended.tail)
        if not passed:
            for check in checks:
                if check.passed is False:
                    say(f"error: smoke: {check.name}: {safe(check.detail)}")
        result = {
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
            }
        )
    if not passed:
        return FAILED_CHECK
    return FAILED if unwritten or unprinted else 0


def _check(
    settings: RuntimeSettings,
    command: Sequence[str],
    budget: str,
    most: float | None,
    patience: float,
    shown: Callable[[str], None],
) -> tuple[list[Check], Run | None, int | None]:
    """All checks; the run that failed, if one did; the budget in bytes, where it came to that."""
    checks: list[Check] = []

    def add(check: Check) -> bool:
        checks.append(check)
        shown(f"  {WORDS[check.passed]:<8}{check.name:<20}{safe(check.detail)}")
        return check.passed is not False

    def give_up(run: Run, why: str) -> tuple[list[Check], Run, None]:
        for check in skipped(NAMES[len(checks) :], why):
            add(check)
        return checks, run, None

    plain = run_once(replace(settings, plain=True), command, patience)
    if not add(check_run(NAMES[0], plain)):
        return give_up(plain, "the plain run failed")
    patience = SETTLING_SECONDS + TIMES_PLAIN * plain.ended.seconds
    nbytes, counted = _bytes(budget, lambda: run_once(settings, command, patience))
    if counted is not None and counted.error:
        add(check_run(NAMES[1], counted))
        return give_up(counted, "the run without a budget failed under dtrrun")
    other = run_once(replace(settings, budget_bytes=nbytes), command, patience)
    if not add(check_run(NAMES[1], other)):
        return give_up(other, "the run in the budget failed")
    add(check_state(plain, other))
    add(check_peak(other, nbytes))
    add(check_slowdown(plain, other, most))
    return checks, None, nbytes


def _bytes(budget: str, count: Callable[[], Run]) -> tuple[int, Run | None]:
    """The budget in bytes; of a share, of the peak of a run without one, which comes with it."""
    counted: Run | None = None

    def peak() -> int:
        nonlocal counted
        counted = count()
        return max(counted.peak_bytes, 1)

    try:
        return parse_size(budget, peak), counted
    except ValueError as error:
        if counted is not None and counted.error:
            return 1, counted
        raise LaunchError(f"--budget: {error}") from None


def _printer(json: str | None, unprinted: list[str]) -> Callable[[str], None]:
    """The lines are for people: where they cannot be written the checks go on, and `unprinted` has them."""

    def to_stderr(line: str) -> None:
        with if_someone_reads():
            print(line, file=sys.stderr, flush=True)

    return to_stderr if json == "-" else lambda line: unprinted.extend(write_each({line: lambda: _out(line)}))


def _out(line: str) -> None:
    with to_stdout():
        print(line)
