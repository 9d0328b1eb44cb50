"""The verb `profile`: in which budgets a program works, and what each costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtrrun import values
from dtrrun.cli.command import of_run
from dtrrun.cli.github_summary import summary_writer
from dtrrun.cli.messages import program_failed, say
from dtrrun.cli.nesting import inside_another
from dtrrun.cli.options import collect
from dtrrun.cli.profiles import SHIPPED, Given, folders
from dtrrun.cli.report_file import check_writable, report_writer
from dtrrun.cli.sweeping import import_from_here, print_and_write
from dtrrun.core.heuristics import STEADY, make_heuristic
from dtrrun.launch.errors import BY_SIGNAL, FAILED, LaunchError
from dtrrun.launch.interpreter import choose
from dtrrun.launch.records import records_folder
from dtrrun.launch.signals import interrupting, number_of
from dtrrun.launch.target import refuse_stream, resolve
from dtrrun.profiling.result import study_result, variation_result, write_profile
from dtrrun.profiling.study import NothingToProfile, ScriptFailed, Study
from dtrrun.profiling.trial import Trial
from dtrrun.profiling.variation import Variation
from dtrrun.profiling.vary import parse_range, parse_template, with_value
from dtrrun.settings import OUTPUT, option
from dtrrun.simulator import PORTFOLIO
from dtrrun.sizes import AUTO_HOST, NO_HOST, format_size, parse_size
from dtrrun.values import Reader
from dtrrun.views.markdown import of_profile
from dtrrun.views.profile import Bar, print_profile

USAGE = "profile [OPTIONS] [--] TARGET [ARGS]..."
EPILOG = """
[bold]Examples[/bold]

dtrrun profile train.py --epochs 3, and then: dtrrun --profile train train.py --epochs 3

dtrrun profile --max-slowdown 1.2 --json curve.json train.py

dtrrun profile --target-budget 8GB --vary '--batch-size {}' --range 8:512 train.py

[bold]Exit status[/bold]: 0, a budget was found; 3, none was; the target's own, where it fails without a
budget; 2, usage error; 125, dtrrun failed; 130 after Ctrl-C, with the results so far.
"""
NOTHING = 3
NONE = "no budget below the peak worked"
MOST_STEPS = 32
WHAT, HOW = "What to find", "How"


@dataclass(frozen=True)
class Profile:
    """The options of `dtrrun profile`."""

    max_slowdown: float | None = option(
        "Recommend the least budget within X times the plain time.", WHAT, read=values.slowdown
    )
    target_budget: int | None = option(
        "With --vary and --range: the budget that the value has to fit into.",
        WHAT,
        read=Reader("SIZE", parse_size),
    )
    vary: list[str] | None = option(
        "Find the largest value of this option of TARGET that fits into the budget.",
        WHAT,
        read=Reader("'OPTION {}'", parse_template),
    )
    range: tuple[int, int] | None = option(
        "The whole numbers to try for that option.", WHAT, read=Reader("LOW:HIGH", parse_range)
    )
    steps: int = option("How many optimizer steps each run makes.", HOW, 5)
    heuristic: Sequence[str] = option(
        "The heuristics to choose from.", HOW, ("h_dtr_eq", "h_chain", STEADY), read=values.heuristics
    )
    checks: int = option(
        "How many budgets of the curve to check by a real run, besides the minimum.",
        HOW,
        4,
    )
    limit: float = option(
        "Treat a step as thrashing when it takes more than X times as long as its own work.",
        HOW,
        3.0,
        read=values.slowdown,
    )
    of_run: Mapping[str, Any] = of_run("python", "device", "host_budget", panel=HOW)
    name: str | None = option(
        "Name of the profile, for dtrrun --profile NAME (default: the script's name).",
        OUTPUT,
        read=values.anything,
        word="NAME",
    )
    output: str | None = option(
        "Write the profile to this path instead.", OUTPUT, word="PATH.yaml", short="-o"
    )
    json: str | None = option(
        "Write the figures as JSON; - is standard output (the table then goes to standard error).", OUTPUT
    )
    github_summary: bool = option("Add the tables to the summary of a job on GitHub Actions.", OUTPUT, False)
    quiet: bool = option("Print nothing but errors.", OUTPUT, False)


def profile(given: Profile, target: Sequence[str]) -> int:
    """Find the least budget in which TARGET works, what each budget costs, and which one to recommend.

    TARGET runs for a few steps without a budget while its operators are recorded. From the recording, the
    behaviour under many budgets and heuristics is predicted, and checked by short real runs. The result is
    written to a profile: the budget, the heuristic that does best with it, and the operators' costs.
    """
    refuse_stream(target, "profile")
    if given.steps > MOST_STEPS:
        raise LaunchError(f"--steps: {given.steps} is more than {MOST_STEPS}")
    together = (given.target_budget, given.vary, given.range)
    if any(together) and not all(together):
        raise LaunchError("--target-budget, --vary and --range must be given together")
    _check_heuristics(given.heuristic)
    options = inside_another(collect(given.of_run), limits=False)
    settings = replace(
        options.settings,
        budget_bytes=given.target_budget,
        cost="measured",
        costs=None,
        over_budget="error",
        max_slowdown=None,
        on_thrash="warn",
        verify=False,
        max_steps=given.steps,
    )
    command = resolve(target, lambda: choose(options.python))
    for warning in options.warnings if not given.quiet else ():
        say(f"warning: {warning}")
    if given.vary and given.range:
        if given.output or given.name:
            raise LaunchError("--vary writes no profile, so it cannot be combined with -o or --name")
        bound = given.max_slowdown or given.limit
        return _vary(Variation(command, settings, given.vary, *given.range, bound), target, given)
    path = _path(given, target)
    check_writable(path)
    with records_folder() as folder:
        bound = max(given.limit, given.max_slowdown or 0)
        study = Study(command, settings, Path(folder), given.steps, given.heuristic, bound)
        study.checks, study.max_slowdown = given.checks, given.max_slowdown
        return _study(study, target, path, given)


def _check_heuristics(names: Sequence[str]) -> None:
    if PORTFOLIO in names:
        raise LaunchError(
            f"--heuristic: {PORTFOLIO} compares heuristics on a log: use it with dtrrun simulate"
        )
    import_from_here(names)
    for name in names:
        if Given(name, "--heuristic").read(make_heuristic).foresight:
            raise LaunchError(
                f"--heuristic: {name} learns from the first steps, and profile's runs are too short to show "
                "that"
            )


def _study(study: Study, words: Sequence[str], path: Path, given: Profile) -> int:
    json, quiet, name = given.json, given.quiet, _named(path, given.output)
    add = summary_writer(given.github_summary)
    with report_writer(json) as write:
        number, trouble = 0, ""
        try:
            number = _run(study, quiet)
        except NothingToProfile as error:
            trouble = str(error)
        except ScriptFailed as failed:
            return _script_failed(failed.trial, "in a run without a budget")
        result = study_result(study, words)
        if study.recommended is not None:
            result["run"] = ["dtrrun", "--profile", name, *words]
            result["run_minimum"] = _at_minimum(result, name, words)
        more: dict[str, Callable[[], object]] = {"--github-summary": lambda: add(of_profile(result))}
        if study.recommended is not None:
            more[str(path)] = lambda: write_profile(path, study, words)
        silent = quiet or study.plain is None
        unwritten = print_and_write(result, print_profile, json, silent, write, more)
    if study.recommended is not None and not quiet and str(path) not in unwritten:
        say(f"wrote {path}")
    if number:
        return _interrupted(number)
    if study.recommended is None:
        say(f"nothing to recommend: {trouble or _why(study)}")
        return NOTHING
    if not study.complete:
        say("the time limit was reached, so some budgets were predicted but not run")
    return FAILED if unwritten else 0


def _at_minimum(result: dict[str, Any], name: str, words: Sequence[str]) -> list[str] | None:
    """Return the command for the minimum budget, with its heuristic; None if unknown or recommended."""
    minimum = result["minimum_bytes"]
    if minimum in (None, result["recommended_bytes"]) or result["minimum_heuristic"] is None:
        return None
    options = ["--budget", f"{minimum}B", "--heuristic", result["minimum_heuristic"]]
    return ["dtrrun", "--profile", name, *options, *words]


def _why(study: Study) -> str:
    if study.minimum is None:
        tried = [
            f"{100 * budget / study.peak:.3g} % ({point.trial.status})"
            for budget, point in sorted(study.points.items(), reverse=True)
            if point.trial is not None
        ]
        if not tried:
            return "the time limit was reached before a budget could be tried"
        what = "above each budget that worked, a larger one failed" if any(study.worked.values()) else NONE
        return f"{what}; tried: {', '.join(tried)}"
    if study.max_slowdown is not None:
        return f"every budget that works takes more than {study.max_slowdown:g} times the plain time"
    return "no budget below the peak is worth the time that it costs"


def _vary(variation: Variation, words: Sequence[str], given: Profile) -> int:
    budget: Any = variation.settings.budget_bytes
    json, quiet = given.json, given.quiet
    add = summary_writer(given.github_summary)
    with report_writer(json) as write:
        try:
            number = _run(variation, quiet)
        except ScriptFailed as failed:
            return _script_failed(failed.trial, f"with {variation.low} inside {format_size(budget)}")
        result = variation_result(variation, words)
        if variation.best is not None:
            target = with_value(words, variation.template, variation.certain or variation.best)
            host = variation.settings.host_budget
            options = [] if host in (AUTO_HOST, NO_HOST) else ["--host-budget", host]
            result["run"] = ["dtrrun", "--budget", f"{budget}B", *options, *target]
        summary = {"--github-summary": lambda: add(of_profile(result))}
        unwritten = print_and_write(result, print_profile, json, quiet, write, summary)
    if number:
        return _interrupted(number)
    if variation.best is None:
        say(f"not even {variation.low} fits into {format_size(budget)}")
        return NOTHING
    return FAILED if unwritten else 0


def _run(search: Study | Variation, quiet: bool) -> int:
    """Run `search` with a progress bar. Returns the signal that interrupted it, or 0. Raises as its `run`."""

    def attend(one: Study | Variation) -> None:
        bar.update(one.now, one.seconds, one.left)
        if came:  # Python dropped the exception
            raise KeyboardInterrupt(came[-1])

    search.attend = attend
    try:
        with Bar(sys.stderr, quiet=quiet) as bar, interrupting() as came:
            search.run()
    except KeyboardInterrupt as interrupt:  # possibly after the search was done
        return number_of(interrupt)
    return 0


def _interrupted(number: int) -> int:
    say("interrupted: the results so far are kept")
    return BY_SIGNAL + number


def _script_failed(trial: Trial, where: str) -> int:
    """Say which run has failed. Returns the program's exit status, or another one if that is 0."""
    status = trial.exit_status
    what = f"failed {where} (exit status {status})" if status else f"made no optimizer step {where}"
    program_failed(what, trial.tail, trial.absent)
    return status or (FAILED if trial.absent else NOTHING)


def _path(given: Profile, words: Sequence[str]) -> Path:
    """Return the path of the profile. Raises LaunchError."""
    output, name = given.output, given.name
    if output is not None:
        path = Path(output).expanduser().absolute()
        if name is not None:
            raise LaunchError("-o and --name cannot be combined: each of them names the profile")
        if path.suffix not in (".yaml", ".yml"):
            raise LaunchError(f"-o: {output}: a profile's name ends in .yaml")
        if not path.parent.is_dir():
            raise LaunchError(f"-o: {path.parent} is not a folder")
        return path
    name = _name_of(words) if name is None else name
    if not name or "/" in name or name.startswith(".") or not name.isprintable():
        raise LaunchError(f"--name: {name!r} is not a valid name for a profile")
    if (SHIPPED / f"{name}.yaml").exists():
        raise LaunchError(
            f"{name} is the name of a profile that comes with dtrrun: choose another with --name"
        )
    return folders()[0] / f"{name}.yaml"


def _name_of(words: Sequence[str]) -> str:
    """Return the script's or module's name, without `.py`."""
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words):
            return words[place + 1]
        if word.endswith(".py"):
            return Path(word).stem
    return "program"


def _named(path: Path, output: str | None) -> str:
    if output is None:
        return path.stem
    return output if "/" in output else f"./{output}"
