"""The verb `report`: the page of a finished run, from its JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dtrrun.cli.report_file import file_writer
from dtrrun.launch.errors import LaunchError
from dtrrun.settings import option
from dtrrun.views.report import SCHEMA

PROFILES = "dtrrun.profile/"
FAMILY = SCHEMA.partition("/")[0]

USAGE = "report [OPTIONS]"
EPILOG = """
[bold]Examples[/bold]

dtrrun --budget 6GB --json run.json train.py

dtrrun report run.json -o report.html

dtrrun report run.json -o report.html --profile-json profile.json

[bold]Exit status[/bold]: 0; 2, usage error, or a file that is not a report of dtrrun; 125, the page could not
be written.
"""


@dataclass(frozen=True)
class Report:
    """The options of `dtrrun report`."""

    run: str | None = option(
        "The report that dtrrun --json wrote; - is standard input.", word="RUN", argument=True
    )
    output: str | None = option("Write the page here; - is standard output.", short="-o")
    profile_json: str | None = option(
        "What dtrrun profile --json wrote: the page then shows its budget curve as well."
    )


def report(given: Report, _: Sequence[str]) -> int:
    """Make a page for a browser from the JSON report of a run: a single file that needs no network.

    dtrrun --html PATH writes the same page at the end of a run.
    """
    run, output = given.run, given.output
    if run is None:
        raise LaunchError("report needs RUN, a report that dtrrun --json has written")
    if output is None:
        raise LaunchError("report needs -o PATH, the file to write the page to")
    found = read_run(run)
    profile = _profile(given.profile_json) if given.profile_json is not None else None
    from dtrrun.views.html import page  # a slow import

    with damaged(run):
        made = page(found, profile)
    with file_writer(output, "-o") as write:
        write([made])
    return 0


def read_run(path: str) -> dict[str, Any]:
    """Return the report of a run. Raises LaunchError."""
    found = _read(path)
    if str(found.get("schema", "")).rpartition("/")[0] != FAMILY:
        raise LaunchError(f"{path} is not the report of a run: its schema is not {SCHEMA}")
    if found["schema"] != SCHEMA:
        raise LaunchError(f"{path} has the format {found['schema']}; this version of dtrrun reads {SCHEMA}")
    return found


@contextmanager
def damaged(path: str) -> Iterator[None]:
    """Context: errors about values of a report become a LaunchError."""
    try:
        yield
    except KeyError as error:
        raise LaunchError(f"{path} is damaged: it has no {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise LaunchError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _profile(path: str) -> dict[str, Any]:
    found = _read(path)
    points = found.get("points")
    if not str(found.get("schema", "")).startswith(PROFILES) or not isinstance(points, list):
        raise LaunchError(f"--profile-json: {path} was not written by dtrrun profile --json")
    return found


def _read(path: str) -> dict[str, Any]:
    try:
        if path == "-":
            found = json.load(sys.stdin)
        else:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise LaunchError(f"{path} is not JSON") from None
    if not isinstance(found, dict):
        raise LaunchError(f"{path} is not a report of dtrrun")
    return found
