"""Handles a dtrrun inside another one: `dtrrun dtrrun train.py`, or a script that calls dtrrun.

A process runs under one session, that of the innermost dtrrun. The outer one is notified, so that it does not
report as an error that no process ran under it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dtrrun.cli.options import Options
from dtrrun.launch.devices import resolve
from dtrrun.launch.environment import RECORDS
from dtrrun.launch.outcome import NESTED
from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import format_size

WHERE = "this dtrrun runs inside another one"


def inside_another(
    options: Options, *, limits: bool = True, environ: Mapping[str, str] = os.environ
) -> Options:
    """Return `options` adapted to an outer dtrrun, which is notified; unchanged if there is none.

    If both have a budget for the same kind of device, the smaller one applies, so that both hold, and a line
    reports which. limits: False for verbs that must measure without the outer one's budget.
    """
    outer = _told(environ)
    if outer is None:
        return options
    ours, theirs = options.settings.budget_bytes, outer.budget_bytes
    if theirs is None:
        return options
    if not limits:
        text = f"{WHERE}, whose budget of {_size(theirs)} does not apply to the runs of this one"
    elif resolve(outer.device).partition(":")[0] != options.device.partition(":")[0]:
        text = f"{WHERE}, whose budget of {_size(theirs)} is for {outer.device} and does not apply here"
    elif ours is not None and ours <= theirs:
        text = f"{WHERE}: the smaller of the two budgets applies, this one's of {_size(ours)}"
    else:
        options = replace(options, settings=replace(options.settings, budget_bytes=theirs))
        text = f"{WHERE}, whose budget of {_size(theirs)} applies"
        if ours is not None:
            text = f"{WHERE}: the smaller of the two budgets applies, the other one's of {_size(theirs)}"
    return replace(options, warnings=(*options.warnings, text))


def _told(environ: Mapping[str, str]) -> RuntimeSettings | None:
    """Return the settings of an outer dtrrun that is still running, after notifying it."""
    folder = environ.get(RECORDS)
    if not folder:
        return None
    try:
        Path(folder, NESTED).touch(0o600)
        return RuntimeSettings.from_environment(environ)
    except (OSError, ValueError, TypeError):  # it has ended, or its files were changed
        return None


def _size(nbytes: int) -> str:
    return f"{format_size(nbytes)} ({nbytes:,} bytes)"
