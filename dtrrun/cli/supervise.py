"""One run from the announcement to the report: what the user sees around the target."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from dtrrun.cli.messages import as_line, if_someone_reads, say
from dtrrun.cli.options import Options
from dtrrun.cli.report_file import file_writer, refuse_one_path_twice, report_writer, write_each
from dtrrun.launch.environment import child_environment
from dtrrun.launch.errors import FAILED
from dtrrun.launch.outcome import explained, judge, read_marks
from dtrrun.launch.process import run
from dtrrun.launch.pty import Terminal
from dtrrun.launch.ranks import Ranks
from dtrrun.launch.records import records_folder
from dtrrun.launch.signals import die_of
from dtrrun.launch.timeline import Timeline
from dtrrun.monitor.sampler import Sampler
from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import format_size
from dtrrun.telemetry.events import read_events
from dtrrun.telemetry.record import Snapshot, read_all
from dtrrun.telemetry.run import announce
from dtrrun.views.final import print_final
from dtrrun.views.live import LiveLines, LiveTable, live_view
from dtrrun.views.report import build_report
from dtrrun.views.trace import chrome_trace, compressed

TICK_SECONDS = 0.1


Finish = Callable[[int, Sequence[Snapshot]], int]
"""Given the exit status and the records of the processes, returns our exit status."""

Show = Callable[[dict[str, Any], TextIO], None]
"""Prints the report of a run."""


def supervise(
    options: Options,
    command: Sequence[str],
    finish: Finish = lambda status, _: status,
    show: Show = print_final,
    wants: Callable[[dict[str, Any]], bool] = lambda _: True,
) -> int:
    """Run `command` under `options`, with all output around it, and return the exit status.

    That is the status from `judge`, or 125 if that is 0 and results could not be written; `finish`, called
    last, may change it. If a signal ended the target, this does not return: the same signal ends us.

    show: prints the report. wants: whether a report is to be shown and written.
    """
    refuse_one_path_twice({"--json": options.json, "--html": options.html, "--trace": options.trace})
    with (
        report_writer(options.json) as write_report,
        file_writer(options.html, "--html") as write_html,
        file_writer(options.trace, "--trace") as write_trace,
        records_folder() as folder,
    ):
        wants_trace = options.trace is not None
        settings = replace(options.settings, record_dir=folder, trace_events=wants_trace)
        if not options.settings.quiet:
            _announce(options, command)
        announce(folder, command, time.time())
        view = None if options.settings.quiet else live_view(settings, sys.stderr, options.live)
        said: deque[str] = deque()  # filled by the sampler's thread while the view uses the terminal
        tell = say if view is None else said.append
        started = time.monotonic()
        with (
            _timeline(options, folder) as timeline,
            _sampler(settings, options, tell) as sampler,
            Ranks(folder, tell),
        ):
            returncode = _run(settings, command, view, sampler, said)
        elapsed = time.monotonic() - started

        marks = read_marks(Path(folder))
        snapshots, stopped = explained(read_all(folder), marks), None
        if sampler is not None:
            snapshots, stopped = list(sampler.shown(snapshots)), sampler.stopped
        outcome = judge(returncode, snapshots, marks, stopped)
        seen = timeline.values(snapshots) if timeline is not None else None
        report = build_report(snapshots, settings, outcome.exit_status, command, elapsed, seen)
        wanted = wants(report)
        if snapshots and wanted and not options.settings.quiet:
            with if_someone_reads():
                show(report, sys.stderr)
        if outcome.error:
            say(f"error: {outcome.error}")
        elif outcome.note and not options.settings.quiet:
            say(outcome.note)

        def html() -> None:
            from dtrrun.views.html import page  # a slow import

            write_html([page(report)])

        def trace() -> None:
            if options.trace is None or timeline is None:
                return
            about = {name: report[name] for name in ("command", "budget_bytes", "settings")}
            ours = {snapshot.pid for snapshot in snapshots}  # some processes turned out to be helpers
            found = (events for events in read_events(folder) if events.pid in ours)
            pieces = chrome_trace(found, snapshots, timeline.started_ns, about, seen)
            write_trace(compressed(pieces) if options.trace.endswith(".gz") else pieces)

        results: dict[str, Callable[[], object]] = {"--json": lambda: write_report(report)}
        results |= {"--html": html} if options.html is not None else {}
        results |= {"--trace": trace} if options.trace is not None else {}
        unwritten = write_each(results) if wanted else []
    status = finish(outcome.exit_status or (FAILED if unwritten else 0), snapshots)
    if outcome.signal is not None:
        die_of(outcome.signal)
    return status


def _sampler(
    settings: RuntimeSettings, options: Options, tell: Callable[[str], None]
) -> AbstractContextManager[Sampler | None]:
    """Return the sampler that queries the driver; a null context on the CPU."""
    if not options.device.startswith("cuda"):
        return nullcontext()
    notice = (lambda _: None) if settings.quiet else tell
    return Sampler(str(settings.record_dir), settings.budget_bytes, options.on_violation, notice, tell)


def _timeline(options: Options, folder: str) -> AbstractContextManager[Timeline | None]:
    """Return the timeline of the run; a null context if no output needs it."""
    wanted = options.json, options.html, options.trace
    return nullcontext() if wanted == (None, None, None) else Timeline(folder)


def _run(
    settings: RuntimeSettings,
    command: Sequence[str],
    view: LiveTable | LiveLines | None,
    sampler: Sampler | None,
    said: deque[str],
) -> int:
    environment = child_environment(settings)
    started = sampler.started if sampler is not None else None
    sys.stdout.flush()
    if view is None:
        return run(command, environment, started=started)
    with closing(view), Terminal(view.write, lambda: view.rows) as terminal:
        newest = 0.0

        def attend() -> None:
            nonlocal newest
            terminal.pump(TICK_SECONDS)  # returns at once while the script writes
            if time.monotonic() - newest >= TICK_SECONDS:
                newest = time.monotonic()
                snapshots = read_all(str(settings.record_dir))
                with if_someone_reads():
                    while said:
                        view.note(as_line(said.popleft()))
                    view.update(sampler.shown(snapshots) if sampler is not None else snapshots)

        view.start()
        returncode = run(command, environment, terminal.child_fds(), attend, started)
        terminal.drain()
    while said:
        say(said.popleft())
    return returncode


def _announce(options: Options, command: Sequence[str]) -> None:
    """Print the resolved options, in bytes: a mistyped budget shows here, not after an hour."""
    for warning in options.warnings:
        say(f"warning: {warning}")
    budget = options.settings.budget_bytes
    if budget is None:
        late = any(word == "--budget" or word.startswith("--budget=") for word in command)
        hint = " (a --budget after the target is passed to it; dtrrun's goes before it)" if late else ""
        say(f"no budget: memory is only counted, on {options.device}{hint}")
    else:
        size = f"{format_size(budget)} ({budget:,} bytes)"
        say(f"budget {size} on {options.device}, heuristic {options.settings.heuristic}")
