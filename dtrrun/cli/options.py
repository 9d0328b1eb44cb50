"""Every option of a run: its key, how its text is read, and where its value may come from.

The command line goes before the environment, the environment before the profile that these two name, that
before `[tool.dtrrun]` of the nearest pyproject.toml, and last comes the profile that the latter names (or
`default`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dtrrun.cli import values
from dtrrun.cli.profiles import Given, find_profile, read_profile, read_pyproject
from dtrrun.launch.devices import resolve, total_bytes
from dtrrun.launch.environment import RECORDS
from dtrrun.launch.errors import LaunchError
from dtrrun.settings import VARIABLE, RuntimeSettings
from dtrrun.sizes import parse_size

PREFIX = "DTRRUN_"
RESERVED = frozenset({VARIABLE, RECORDS, "DTRRUN_DEBUG"})  # variables that are no options

READERS: dict[str, Callable[[str], Any]] = {
    "device": values.device,
    "budget": values.anything,  # a percentage needs the device: read in `Options.of`
    "heuristic": values.heuristic,
    "deallocation": values.deallocation,
    "ignore_small": values.share,
    "sample": values.flag,
    "seed": values.whole_number(),
    "cost": values.choice("measured", "model"),
    "costs": values.costs,
    "over_budget": values.choice("error", "warn"),
    "return_memory": values.choice("auto", "always", "never"),
    "max_slowdown": values.slowdown,
    "on_thrash": values.choice("warn", "stop"),
    "on_violation": values.choice("warn", "stop"),
    "max_steps": values.whole_number(least=1),
    "verify": values.flag,
    "where": values.flag,
    "json": values.path,
    "html": values.path,
    "trace": values.path,
    "live": values.choice("auto", "always", "never"),
    "quiet": values.flag,
    "python": values.anything,
}


@dataclass(frozen=True)
class Options:
    """One run's options, read and checked; `settings` is the training process's share of them."""

    settings: RuntimeSettings
    device: str
    """The device that the budget was reckoned for: never `auto`."""
    json: str | None = None
    html: str | None = None
    trace: str | None = None
    live: str = "auto"
    quiet: bool = False
    python: str | None = None
    on_violation: str = "warn"
    """What happens where the driver shows more than the budget: `warn` or `stop`."""
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Given], warnings: Iterable[str] = ()) -> Options:
        """Read the values in `given`. Raises LaunchError that names the place of the first bad one."""
        read = {key: _read(READERS[key], value) for key, value in given.items()}
        device = resolve(read.get("device", "auto"))
        total = _read(lambda _: total_bytes(device), given.get("device", Given("", "--device")))
        warnings = list(warnings)
        if "budget" in given:
            size = read["budget_bytes"] = _read(lambda text: parse_size(text, lambda: total), given["budget"])
            if size > total:
                warnings.append(
                    f"the budget of {size:,} bytes is more than the {total:,} bytes that {device} has"
                )
        of_runtime = {field.name for field in fields(RuntimeSettings)}
        of_launcher = {field.name for field in fields(cls)} - {"device"}
        ours = {key: value for key, value in read.items() if key in of_launcher}
        settings = RuntimeSettings(**{key: value for key, value in read.items() if key in of_runtime})
        return cls(settings=settings, device=device, warnings=tuple(warnings), **ours)


def collect(
    command_line: Mapping[str, str | bool | None],
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> Options:
    """The options from all of their sources; `command_line` has `profile` and the keys of READERS."""
    typed = {
        key: Given(
            "yes" if value is True else "no" if value is False else value, f"--{key.replace('_', '-')}"
        )
        for key, value in command_line.items()
        if value is not None
    }
    exported, warnings = _environment(environ)
    project = read_pyproject(folder or Path.cwd(), (*READERS, "profile"))
    named = typed.get("profile") or exported.get("profile")
    if named:
        layers = [project, _profile(named), exported, typed]
    else:
        layers = [_profile(project.get("profile", Given("default", "the default"))), project, exported, typed]
    merged: dict[str, Given] = {}
    for layer in layers:
        merged |= layer
    merged.pop("profile", None)
    return Options.of(merged, warnings)


def _profile(named: Given | None) -> dict[str, Given]:
    if named is None:
        return {}
    try:
        path = find_profile(named.text)
    except ValueError as error:
        raise LaunchError(f"{named.where}: {error}") from None
    return read_profile(path, tuple(READERS))


def _environment(environ: Mapping[str, str]) -> tuple[dict[str, Given], list[str]]:
    """Values of our variables, and a warning for each variable that looks like ours and is not."""
    known = {PREFIX + key.upper(): key for key in (*READERS, "profile")}
    found = {known[name]: Given(text, name) for name, text in environ.items() if name in known and text}
    warnings = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known and name not in RESERVED:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            warnings.append(f"{name} is not a variable of dtrrun{hint}")
    return found, warnings


def _read(reader: Callable[[str], Any], given: Given) -> Any:
    try:
        return reader(given.text)
    except ValueError as error:
        raise LaunchError(f"{given.where}: {error}") from None
