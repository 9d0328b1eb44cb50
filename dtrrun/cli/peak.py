"""The verb `peak`: what holds a program's memory when it takes the most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtrrun.cli.command import of_run
from dtrrun.cli.messages import say
from dtrrun.cli.nesting import inside_another
from dtrrun.cli.options import Options, collect
from dtrrun.cli.supervise import supervise
from dtrrun.launch.errors import FAILED
from dtrrun.launch.interpreter import choose
from dtrrun.launch.target import resolve
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.record import Snapshot
from dtrrun.views.holding import print_peak

USAGE = "peak [OPTIONS] [--] TARGET [ARGS]..."
EPILOG = """
[bold]Examples[/bold]

dtrrun peak train.py --epochs 3

dtrrun peak --html peak.html -m mypackage.train

dtrrun peak --budget 8GB train.py    (where the program does not fit)

[bold]Exit status[/bold]: the target's own, or 125 if its peak was not seen; 2, usage error.
"""

AGAIN = "the program came to its peak only once: running it again, to look at that moment"
UNFIT = (
    "the program failed before its peak was seen; if it does not fit, run it inside a budget meanwhile, as "
    "with dtrrun peak --budget 90% train.py"
)


@dataclass(frozen=True)
class Peak:
    """The options of `dtrrun peak`."""

    of_run: Mapping[str, Any] = of_run("budget", "json", "html", "device", "quiet", "python", panel="Options")


def peak(given: Peak, target: Sequence[str]) -> int:
    """Run TARGET for two or three steps, and show what holds its memory when it takes the most.

    That is: parameters, gradients, optimizer state, what is saved for the backward pass, and what variables
    keep; by module and line, with what recomputing it takes and what can be done about it. The program is
    ended after that. It runs without a budget, unless one is given, in which case evicted memory counts as
    well. A program without an optimizer runs to its end, twice.
    """
    options = inside_another(collect(given.of_run), limits=False)
    ours = replace(
        options.settings, peak=True, peak_only=True, verify=False, max_slowdown=None, max_steps=None
    )
    command = resolve(target, lambda: choose(options.python))
    return _look(replace(options, settings=ours), command)


def _look(options: Options, command: Sequence[str]) -> int:
    """Run the program, and again if its peak came only once. Returns the exit status."""
    seen, most_bytes = False, 0  # whether it is known what holds the peak; the peak, if that is known

    def wants(report: dict[str, Any]) -> bool:
        nonlocal seen
        seen = report["holds"] is not None
        return seen

    def finish(status: int, left: Sequence[Snapshot]) -> int:
        nonlocal most_bytes
        told = [one.values("holds") or {} for one in left]
        most_bytes = max((int(one.get("most_bytes") or 0) for one in told), default=0)
        return status

    def run(settings: RuntimeSettings) -> int:
        return supervise(replace(options, settings=settings), command, finish, print_peak, wants)

    status = run(options.settings)
    if status == 0 and not seen and most_bytes:
        if not options.settings.quiet:
            say(AGAIN)
        status = run(replace(options.settings, peak_bytes=most_bytes))
    if status and not seen and most_bytes:
        say(UNFIT)
    if seen or status:
        return status
    say("error: the peak was not seen: the program did not take as much memory again")
    return FAILED
