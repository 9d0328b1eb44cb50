"""All options of a run, and the sources of their values.

In order of precedence: the command line, the environment, the profile named by either, `[tool.dtrrun]` of
the nearest pyproject.toml, and the profile named there (or `default`). `dtrrun.settings` explains how to add
an option.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dtrrun import values
from dtrrun.cli.profiles import Given, find_profile, read_profile, read_pyproject
from dtrrun.launch import interpreter
from dtrrun.launch.devices import resolve, target_build, total_bytes
from dtrrun.launch.environment import RECORDS
from dtrrun.settings import LIMITS, OUTPUT, SETUP, VARIABLE, RuntimeSettings, WarnOrStop, When, option, rows
from dtrrun.sizes import parse_size

RESERVED = frozenset({VARIABLE, RECORDS, "DTRRUN_DEBUG"})  # variables that are not options


@dataclass(frozen=True)
class Options:
    """One run's options, read and checked; `settings` is the part for the training process."""

    settings: RuntimeSettings
    device: str
    """The device for which the budget was computed: never `auto`."""
    on_violation: WarnOrStop = option(
        "What to do when the driver reports that a process uses more GPU memory than the budget: warn, or "
        "stop the run with exit status 4.",
        LIMITS,
        "warn",
    )
    live: When = option(
        "When to show a live table: auto, on a terminal; always, also as a line every few seconds where "
        "there is no terminal; never.",
        OUTPUT,
        "auto",
    )
    json: str | None = option(
        "Write a report as JSON; - is standard output, after the target's own output.", OUTPUT
    )
    html: str | None = option("Write the report as a web page: a single file that needs no network.", OUTPUT)
    trace: str | None = option(
        "Write every eviction, search, rematerialization and copy to the host as a trace for "
        "ui.perfetto.dev; a PATH that ends in .gz is compressed.",
        OUTPUT,
    )
    profile: str | None = option(
        "Read options from a YAML file: default, ci-smoke, low-memory, paper, a name in "
        "~/.config/dtrrun/profiles, or a path.",
        SETUP,
        read=values.anything,
        word="NAME|PATH",
    )
    python: str | None = option(
        "The interpreter for a script, -m or -c. By default: dtrrun's own, if dtrrun is called by its path; "
        "else that of the active environment; else python or python3. If that one has no torch, another one "
        "that has it.",
        SETUP,
    )
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Given], warnings: Iterable[str] = ()) -> Options:
        """Read the values in `given`. Raises LaunchError with the place of the first invalid one."""
        read = {OPTIONS[key].field: value.read(OPTIONS[key].read) for key, value in given.items()}
        build = None
        if read.get("device") != "cpu":
            build = target_build(lambda: interpreter.choose(read.get("python")))
        device = resolve(read.get("device", "auto"), build)
        total = given.get("device", Given("", "--device")).read(lambda _: total_bytes(device, build))
        warnings = list(warnings)
        if "budget" in given:
            size = read["budget_bytes"] = given["budget"].read(lambda text: parse_size(text, lambda: total))
            if size > total:
                warnings.append(
                    f"the budget of {size:,} bytes is more than the {total:,} bytes of "
                    + ("this machine" if device == "cpu" else device)
                )
        ours = {row.field: read.pop(row.field) for row in rows(cls) if row.field in read}
        return cls(RuntimeSettings(**read), device, warnings=tuple(warnings), **ours)


OPTIONS = {row.key: row for row in (*rows(RuntimeSettings), *rows(Options))}
"""Every option of a run by its key: the source for the command, the variables, profiles and the docs."""


def collect(
    command_line: Mapping[str, str | bool | None],
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> Options:
    """Return the options from all sources. command_line: values by key of OPTIONS, None if not given.

    Raises LaunchError with the place of the first invalid value.
    """
    typed = {
        key: Given("yes" if value is True else "no" if value is False else value, OPTIONS[key].names[0])
        for key, value in command_line.items()
        if value is not None
    }
    exported, warnings = _environment(environ)
    project = read_pyproject(folder or Path.cwd(), OPTIONS)
    named = typed.get("profile") or exported.get("profile")
    if named:
        layers = [project, _profile(named), exported, typed]
    else:
        layers = [_profile(project.get("profile", Given("default", "the default"))), project, exported, typed]
    merged: dict[str, Given] = {}
    for layer in layers:
        merged |= layer
    return Options.of(merged, warnings)


def _profile(named: Given) -> dict[str, Given]:
    return read_profile(named.read(find_profile), OPTIONS)


def _environment(environ: Mapping[str, str]) -> tuple[dict[str, Given], list[str]]:
    """Return values of our variables, and a warning for each unknown variable with our prefix."""
    known = {row.variable: key for key, row in OPTIONS.items()}
    found = {known[name]: Given(text, name) for name, text in environ.items() if name in known and text}
    warnings = []
    for name in sorted(environ):
        if name.startswith("DTRRUN_") and name not in known and name not in RESERVED:
            warnings.append(f"{name} is not a variable of dtrrun{values.meant(name, known)}")
    return found, warnings
