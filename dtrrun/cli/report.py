"""The verb `report`: the table and the page of finished runs, from their JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrrun import values
from dtrrun.cli.messages import to_stdout
from dtrrun.cli.report_file import file_writer, refuse_one_path_twice, report_writer
from dtrrun.launch.errors import LaunchError
from dtrrun.settings import option
from dtrrun.views.final import print_final
from dtrrun.views.merge import merge, names_of
from dtrrun.views.report import SCHEMA

PROFILES = "dtrrun.profile/"
FAMILY = SCHEMA.partition("/")[0]

USAGE = "report [OPTIONS]"
EPILOG = """
[bold]Examples[/bold]

dtrrun --budget 6GB --json run.json train.py

dtrrun report run.json -o report.html

dtrrun report run.json -o report.html --profile-json profile.json

dtrrun report node0.json node1.json

dtrrun report run-*/

[bold]Exit status[/bold]: 0; 2, usage error, or a file that is not a report of dtrrun; 125, a file could not
be written.
"""


@dataclass(frozen=True)
class Report:
    """The options of `dtrrun report`."""

    runs: tuple[str, ...] = option(
        "Reports that dtrrun --json wrote, of one run or of the nodes of one, or folders with such reports; "
        "- is standard input.",
        read=values.anything,
        default=(),
        word="RUN...",
        argument=True,
    )
    output: str | None = option(
        "Write a page for a browser here, in place of the table; - is standard output.", short="-o"
    )
    json: str | None = option("Write the report of all of them here; - is standard output.")
    profile_json: str | None = option(
        "What dtrrun profile --json wrote: the page then shows its budget curve as well."
    )


def report(given: Report, _: Sequence[str]) -> int:
    """Show the final table of a run once more, or make a page for a browser: a single file without network.

    Several reports become one: those of the nodes on which torchrun has started a run, or of the ranks that
    were started one by one. Peaks are the largest, counts are sums, and processes are listed by rank. dtrrun
    --html PATH writes the page at the end of a run.
    """
    if not given.runs:
        raise LaunchError("report needs RUN, a report that dtrrun --json has written")
    if given.profile_json is not None and given.output is None:
        raise LaunchError("--profile-json needs -o PATH, the file to write the page to")
    refuse_one_path_twice({"-o": given.output, "--json": given.json})
    reports = {path: one for run in given.runs for path, one in _reports(run).items()}
    found = dict(zip(names_of([*reports]), reports.values(), strict=True))
    profile = _profile(given.profile_json) if given.profile_json is not None else None
    with damaged(" or ".join(given.runs)):
        whole = merge(found) if len(found) > 1 else next(iter(found.values()))
        page = _page(whole, profile) if given.output is not None else None
        if page is None and given.json is None:
            with to_stdout():
                print_final(whole, sys.stdout)
    if page is not None:
        with file_writer(given.output, "-o") as write:
            write([page])
    with report_writer(given.json) as write_report:
        write_report(whole)
    return 0


def _reports(run: str) -> dict[str, dict[str, Any]]:
    """Return the report in a file, or those in a folder, by their paths. Raises LaunchError."""
    if not Path(run).is_dir():
        return {run: read_run(run)}
    files = {str(path): _read(str(path)) for path in sorted(Path(run).glob("*.json"))}
    found = {path: read_run(path) for path, one in files.items() if _is_of_a_run(one)}
    if not found:
        raise LaunchError(f"no file *.json in {run} is the report of a run")
    return found


def _is_of_a_run(found: dict[str, Any]) -> bool:
    return str(found.get("schema", "")).rpartition("/")[0] == FAMILY


def _page(report: dict[str, Any], profile: dict[str, Any] | None) -> bytes:
    from dtrrun.views.html import page  # a slow import

    return page(report, profile)


def read_run(path: str) -> dict[str, Any]:
    """Return the report of a run. Raises LaunchError."""
    found = _read(path)
    if not _is_of_a_run(found):
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
