"""The verb `compare`: what changed from one run to another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from dtrrun import values
from dtrrun.cli.github_summary import summary_writer
from dtrrun.cli.messages import say, to_stdout
from dtrrun.cli.report import damaged, read_run
from dtrrun.launch.errors import LaunchError
from dtrrun.settings import option
from dtrrun.views.compare import as_markdown, growth, print_comparison

USAGE = "compare [OPTIONS]"
GREW = 1
EPILOG = """
[bold]Examples[/bold]

dtrrun compare before.json after.json

dtrrun compare --markdown --max-growth 2% main.json branch.json

[bold]Exit status[/bold]: 0; 1, the peak has grown by more than --max-growth; 2, usage error, or a file that
is not a report of dtrrun.
"""


@dataclass(frozen=True)
class Compare:
    """The options of `dtrrun compare`."""

    before: str | None = option("The report of a run, from dtrrun --json.", word="BEFORE", argument=True)
    after: str | None = option("That of a later one.", word="AFTER", argument=True)
    markdown: bool = option("Print Markdown, for a pull request.", default=False)
    github_summary: bool = option("Add it to the summary of a job on GitHub Actions.", default=False)
    max_growth: float | None = option(
        "Fail if the peak has grown by more than this share, such as 2%.", read=values.share
    )


def compare(given: Compare, _: Sequence[str]) -> int:
    """Show what changed from one run to another: the peak, the time of a step by part, evictions by operator.

    BEFORE and AFTER are reports that dtrrun --json has written. If both were made with --peak, or by dtrrun
    peak, the classes of what holds the peak are compared as well. Options that differ are listed.
    """
    if given.before is None or given.after is None:
        raise LaunchError("compare needs BEFORE and AFTER, two reports that dtrrun --json has written")
    add = summary_writer(given.github_summary)
    before, after = read_run(given.before), read_run(given.after)
    with damaged(f"{given.before} or {given.after}"):
        text, grown = as_markdown(before, after), growth(before, after)
        with to_stdout():
            if given.markdown:
                print(text, end="")
            else:
                print_comparison(before, after, sys.stdout)
    add(text)
    if given.max_growth is not None and grown > given.max_growth:
        say(f"error: the peak has grown by {100 * grown:.1f} %, more than {100 * given.max_growth:g} %")
        return GREW
    return 0
