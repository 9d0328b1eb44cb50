"""The verb `profile`: which budgets a program works in, and what each costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from dtrrun.cli import values
from dtrrun.cli.messages import say, show_tail
from dtrrun.cli.nesting import inside_another
from dtrrun.cli.options import collect
from dtrrun.cli.parameters import flag as _flag
from dtrrun.cli.parameters import read
from dtrrun.cli.parameters import text as _text
from dtrrun.cli.profiles import SHIPPED, folders
from dtrrun.cli.report_file import report_writer, write_each
from dtrrun.cli.sweeping import import_from_here, shown
from dtrrun.launch.errors import BY_SIGNAL, FAILED, LaunchError
from dtrrun.launch.interpreter import choose
from dtrrun.launch.records import records_folder
from dtrrun.launch.signals import interrupting
from dtrrun.launch.target import resolve
from dtrrun.policy import make_heuristic
from dtrrun.profiling.result import study_result, variation_result, write_profile
from dtrrun.profiling.study import NothingToProfile, ScriptFailed, Study
from dtrrun.profiling.trial import Trial
from dtrrun.profiling.variation import Variation
from dtrrun.profiling.vary import parse_range, parse_template, with_value
from dtrrun.simulator import PORTFOLIO
from dtrrun.sizes import format_size, parse_size
from dtrrun.views.profile import Bar, print_profile

EPILOG = """
[bold]Examples[/bold]

dtrrun profile train.py --epochs 3, and then: dtrrun --profile train train.py --epochs 3

dtrrun profile --max-slowdown 1.2 --json curve.json train.py

dtrrun profile --target-budget 8GB --vary '--batch-size {}' --range 8:512 train.py

[bold]Exit status[/bold]: 0, a budget was found; 3, none was; the target's own, where it fails without a
budget; 2, wrong usage; 125, dtrrun failed; 130 after Ctrl-C, with what was known by then.
"""
COMMAND: dict[str, Any] = {
    "options_metavar": "profile [OPTIONS] [--] TARGET [ARGS]...",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
NOTHING = 3
MOST_STEPS = 32
HEURISTICS = "h_dtr_eq,h_chain"

_Text: TypeAlias = str | None
_WHAT, _HOW, _OUTPUT = "What to find", "How", "Output"


def profile(
    ctx: typer.Context,
    max_slowdown: Annotated[
        _Text, _text(_WHAT, "X", "Recommend the least budget within X times the plain time.")
    ] = None,
    target_budget: Annotated[
        _Text, _text(_WHAT, "SIZE", "With --vary and --range: the budget that the value has to fit into.")
    ] = None,
    vary: Annotated[
        _Text,
        _text(
            _WHAT,
            "'OPTION {}'",
            "Find the largest value of this option of TARGET's own that fits into the budget.",
        ),
    ] = None,
    range: Annotated[_Text, _text(_WHAT, "LOW:HIGH", "The whole numbers to try for that option.")] = None,
    steps: Annotated[str, _text(_HOW, "N", "How many optimizer steps each run makes.")] = "3",
    heuristic: Annotated[str, _text(_HOW, "NAME[,NAME...]", "The heuristics to choose from.")] = HEURISTICS,
    checks: Annotated[
        str, _text(_HOW, "N", "How many budgets of the curve to check by a real run, besides the minimum.")
    ] = "4",
    limit: Annotated[
        str,
        _text(
            _HOW, "X", "Treat a step as thrashing when it takes more than X times as long as its own work."
        ),
    ] = "3",
    python: Annotated[_Text, _text(_HOW, "PATH", "The interpreter for a script, -m or -c.")] = None,
    device: Annotated[_Text, _text(_HOW, "DEVICE", "auto (default), cpu, cuda or cuda:N.")] = None,
    name: Annotated[
        _Text,
        _text(_OUTPUT, "NAME", "Name of the profile, for dtrrun --profile NAME (default: the script's)."),
    ] = None,
    output: Annotated[
        _Text,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH.yaml",
            rich_help_panel=_OUTPUT,
            help="Write the profile to this path instead.",
        ),
    ] = None,
    json: Annotated[
        _Text,
        _text(
            _OUTPUT,
            "PATH",
            "Write the figures as JSON; - is standard output (the table then goes to standard error).",
        ),
    ] = None,
    quiet: Annotated[bool, _flag(_OUTPUT, "quiet", "Print nothing but errors.")] = False,
) -> int:
    """Find the least budget in which TARGET works, what each budget costs, and which one to recommend.

    TARGET runs for a few steps without a budget while its operators are recorded. From the recording, the
    behaviour under many budgets and heuristics is predicted, and checked by short real runs. The result is
    written to a profile: the budget, the heuristic that does best with it, and the operators' costs.
    """
    words: Sequence[str] = ctx.obj
    if list(words[:1]) == ["-"]:
        raise LaunchError("profile runs its target several times: it cannot be read from standard input")
    options = inside_another(collect({"python": python, "device": device}), limits=False)
    settings = replace(
        options.settings,
        budget_bytes=None,
        cost="measured",
        costs=None,
        over_budget="error",
        max_slowdown=None,
        on_thrash="warn",
        verify=False,
        max_steps=read("--steps", values.whole_number(least=1), steps),
    )
    bound = read("--limit", values.slowdown, limit)
    wanted = read("--max-slowdown", values.slowdown, max_slowdown) if max_slowdown else None
    if (settings.max_steps or 0) > MOST_STEPS:
        raise LaunchError(f"--steps: {steps} is more than {MOST_STEPS}")
    given = (target_budget, vary, range)
    if any(given) and not all(given):
        raise LaunchError("--target-budget, --vary and --range go together")
    names = _heuristics(heuristic)
    command = resolve(words, lambda: choose(options.python))
    for warning in options.warnings if not quiet else ():
        say(f"warning: {warning}")
    if target_budget and vary and range:
        if output or name:
            raise LaunchError("--vary finds a value, not a profile: -o and --name do not go with it")
        low, high = read("--range", parse_range, range)
        variation = Variation(
            command,
            replace(settings, budget_bytes=read("--target-budget", parse_size, target_budget)),
            read("--vary", parse_template, vary),
            low,
            high,
            wanted or bound,
        )
        return _vary(variation, words, json, quiet)
    path = _path(output, name, words)
    checked = read("--checks", values.whole_number(least=1), checks)
    with records_folder() as folder:
        study = Study(
            command, settings, Path(folder), settings.max_steps or 1, names, max(bound, wanted or 0)
        )
        study.checks, study.max_slowdown = checked, wanted
        return _study(study, words, path, output, json, quiet)


def _heuristics(text: str) -> list[str]:
    names: list[str] = read("--heuristic", values.heuristics, text)
    if PORTFOLIO in names:
        raise LaunchError(f"--heuristic: {PORTFOLIO} tries rules on a log, and does not go with profile")
    import_from_here(names)
    for name in names:
        if read("--heuristic", make_heuristic, name).foresight:
            raise LaunchError(f"--heuristic: {name} learns from the first steps; short runs do not show it")
    return names


def _study(
    study: Study, words: Sequence[str], path: Path, output: str | None, json: str | None, quiet: bool
) -> int:
    with report_writer(json) as write:
        number, trouble = 0, ""
        try:
            number = _run(study, quiet)
        except NothingToProfile as error:
            trouble = str(error)
        except ScriptFailed as failed:
            return _script_failed(failed.trial)
        result = study_result(study, words)
        if study.recommended is not None:
            result["run"] = ["dtrrun", "--profile", _named(path, output), *words]
            result["run_minimum"] = _at_minimum(result, _named(path, output), words)
        results: dict[str, Callable[[], object]] = {
            "standard output": lambda: shown(result, print_profile, json, quiet or study.plain is None),
            "--json": lambda: write(result),
        }
        if study.recommended is not None:
            results[str(path)] = lambda: write_profile(path, study, words)
        unwritten = write_each(results)
    if study.recommended is not None and not quiet and str(path) not in unwritten:
        say(f"wrote {path}")
    if number:
        return _interrupted(number)
    if study.recommended is None:
        say(f"nothing to recommend: {trouble or _why(study)}")
        return NOTHING
    if not study.complete:
        say("this took long enough: some budgets were not run")
    return FAILED if unwritten else 0


def _at_minimum(result: dict[str, Any], name: str, words: Sequence[str]) -> list[str] | None:
    """The command for the minimum, which was found with a heuristic and costs; None: it is recommended."""
    minimum = result["minimum_bytes"]
    if minimum in (None, result["recommended_bytes"]) or result["minimum_heuristic"] is None:
        return None
    options = ["--budget", f"{minimum}B", "--heuristic", result["minimum_heuristic"]]
    return ["dtrrun", "--profile", name, *options, *words]


def _why(study: Study) -> str:
    if study.minimum is None:
        return "no budget below the peak worked"
    if study.max_slowdown is not None:
        return f"no budget keeps within {study.max_slowdown:g} times the plain time"
    return "no budget is worth its time"


def _vary(variation: Variation, words: Sequence[str], json: str | None, quiet: bool) -> int:
    budget: Any = variation.settings.budget_bytes
    with report_writer(json) as write:
        try:
            number = _run(variation, quiet)
        except ScriptFailed as failed:
            return _script_failed(failed.trial)
        result = variation_result(variation, words)
        if variation.best is not None:
            target = with_value(words, variation.template, variation.best)
            result["run"] = ["dtrrun", "--budget", f"{budget}B", *target]
        unwritten = write_each(
            {
                "standard output": lambda: shown(result, print_profile, json, quiet),
                "--json": lambda: write(result),
            }
        )
    if number:
        return _interrupted(number)
    if variation.best is None:
        say(f"not even {variation.low} fits into {format_size(budget)}")
        return NOTHING
    return FAILED if unwritten else 0


def _run(search: Study | Variation, quiet: bool) -> int:
    """Run it behind a progress bar; the signal that ended it before its time, or 0. Raises as its `run`."""

    def attend(one: Study | Variation) -> None:
        bar.update(one.now, one.seconds, one.left)

    search.attend = attend
    with Bar(sys.stderr, quiet=quiet) as bar, interrupting() as came:
        try:
            search.run()
        except KeyboardInterrupt:
            return came[-1]
    return 0


def _interrupted(number: int) -> int:
    say("interrupted: what was known by then is kept")
    return BY_SIGNAL + number


def _script_failed(trial: Trial) -> int:
    """Its own words, and its own exit status."""
    show_tail(trial.tail)
    status = trial.returncode if trial.returncode >= 0 else BY_SIGNAL - trial.returncode
    above = ": see above" if trial.tail else ""
    say(f"error: the program fails in a run that is to be measured (exit status {status}){above}")
    return status or FAILED


def _path(output: str | None, name: str | None, words: Sequence[str]) -> Path:
    """Where the profile goes. Raises LaunchError."""
    if output is not None:
        path = Path(output).expanduser().absolute()
        if name is not None:
            raise LaunchError("-o and --name are two names for one profile")
        if path.suffix not in (".yaml", ".yml"):
            raise LaunchError(f"-o: {output}: a profile's name ends in .yaml")
        if not path.parent.is_dir():
            raise LaunchError(f"-o: {path.parent} is not a folder")
        return path
    name = _name_of(words) if name is None else name
    if not name or "/" in name or name.startswith(".") or not name.isprintable():
        raise LaunchError(f"--name: {name!r} is not a valid name for a profile")
    if (SHIPPED / f"{name}.yaml").exists():
        raise LaunchError(f"{name} is a profile of dtrrun's own: say --name NAME")
    return folders()[0] / f"{name}.yaml"


def _name_of(words: Sequence[str]) -> str:
    """The script's or module's, without the end `.py`."""
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
