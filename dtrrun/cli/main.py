"""The command `dtrrun`: determines the verb and its options, and reports errors.

Our options end at the first word that is not one. A verb is one of VERBS, each a file in this folder; if that
word is not a verb, the verb is `run` and the word begins the target.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import typer

from dtrrun.cli.command import command_of, given_to, options_of
from dtrrun.cli.messages import discard, if_someone_reads, say, to_stdout
from dtrrun.launch.errors import BY_SIGNAL, FAILED, NOT_FOUND, USAGE, LaunchError
from dtrrun.launch.signals import number_of
from dtrrun.monitor.nvml import use_pynvml
from dtrrun.sizes import parse_size

VERBS = (
    *("run", "peak", "estimate", "record", "profile", "simulate", "smoke", "top", "report", "compare"),
    "doctor",
)
HELP = {"-h", "--help"}
BEGIN = (
    "nothing to run: give a script, -m module, -c code or a command, as in",
    "  dtrrun --budget 6GB train.py --epochs 3    (inside 6 GB)",
    "  dtrrun peak train.py                       (what holds the memory?)",
    "  dtrrun profile train.py                    (find a budget)",
    "  dtrrun doctor                              (check this machine)",
    "dtrrun --help shows all options and verbs",
)
"""Printed by `dtrrun` without arguments."""
TARGETS = ("-m", "-c")  # these begin a Python target, although they look like options

# Typer does not export the base class of its usage errors.
UsageError: Any = typer.BadParameter.__base__


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line `arguments` (by default those of the process) and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    use_pynvml()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`2>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
    try:
        status = _main(words)
    except LaunchError as error:
        say(f"error: {error}{_meant(words) if error.exit_status == NOT_FOUND else ''}")
        status = error.exit_status
    except KeyboardInterrupt as interrupt:
        status = BY_SIGNAL + number_of(interrupt)
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        discard(1)  # rich, which prints the help, exits with 1 if its reader has closed the pipe
        status = 0
    except Exception as error:
        from dtrrun.extensions.building import CannotBuild  # imported here, since it takes some ms

        if isinstance(error, CannotBuild):  # of the simulator's core
            say(f"error: {error}")
        elif os.environ.get("DTRRUN_DEBUG"):
            raise
        else:
            say(f"error: {type(error).__name__}: {error} (DTRRUN_DEBUG=1 shows where)")
        status = FAILED
    sys.exit(_flushed(status))


def _flushed(status: int) -> int:
    """Flush standard output and return the exit status; print one line if that fails."""
    try:
        with to_stdout():
            return status
    except LaunchError as error:
        say(f"error: {error}")
        return status or error.exit_status


def _main(words: list[str]) -> int:
    if shell := os.environ.get("_DTRRUN_COMPLETE"):
        from dtrrun.cli.completion import answer

        with to_stdout():
            print(*answer(words, shell), sep="\n")
        return 0
    if not words:
        with if_someone_reads():
            print(*(f"dtrrun: {line}" for line in BEGIN), sep="\n", file=sys.stderr, flush=True)
        return USAGE
    verb, ours, target = understand(_asking(words))
    # Only the help is printed before the verb begins. The verbs handle their own output.
    with to_stdout() if HELP.intersection(ours) else nullcontext():
        typed = parse(verb, ours)
    if typed is None:
        return 0
    status: int = getattr(import_module(f"dtrrun.cli.{verb}"), verb)(given_to(verb, typed), target)
    return status


def _asking(words: list[str]) -> list[str]:
    """Return the words, with `--help` in place of the word `help`, unless that is a command or a file."""
    if words[0] != "help" or shutil.which("help") or os.path.exists("help"):
        return words
    return [*[word for word in words[1:2] if word in VERBS], "--help"]


def understand(words: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the verb, its own words, and the target's without the preceding `--`."""
    verb = "run"
    ours, target = split(words, verb)
    if target and target[0] in VERBS and words[len(ours)] != "--":
        verb = target[0]
        if any(row.argument for row in options_of(verb)):
            more, target = target[1:], []  # its options may follow other words
        else:
            more, target = split(target[1:], verb)
        ours += more
    return verb, ours, target


def split(words: Sequence[str], verb: str) -> tuple[list[str], list[str]]:
    """Split `words` into the verb's leading options, and the rest without a `--` in between."""
    with_value = {name for row in options_of(verb) if row.word for name in row.names}
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--":
            return list(words[:place]), list(words[place + 1 :])
        if not word.startswith("-") or word == "-" or (word.startswith(TARGETS) and word[1] != "-"):
            break
        place += 2 if word in with_value else 1
    return list(words[:place]), list(words[place:])


def parse(verb: str, words: Sequence[str]) -> dict[str, Any] | None:
    """Return the values in `words`, by the verb's option keys; None if its help was shown.

    Raises LaunchError.

    The target is not included, because typer would check that its words are valid text.
    """
    try:
        typed = command_of(verb).main(args=list(words), prog_name="dtrrun", standalone_mode=False)
    except UsageError as error:
        more = "dtrrun --help" if verb == "run" else f"dtrrun {verb} --help"
        option = getattr(error, "option_name", None)
        if option is not None and re.fullmatch("-[a-zA-Z]", option):
            more += f"; for an option of Python, write: dtrrun python {option} ..."
        raise LaunchError(f"{error.format_message()} (see {more})") from None
    return typed if isinstance(typed, dict) else None


def _meant(words: list[str]) -> str:
    """Return what else the target's name may have been meant to be: a verb, or a size."""
    ours, target = split(words, "run")
    if len(ours) < len(words) and words[len(ours)] != "--" and target[0] not in VERBS:
        for verb in get_close_matches(target[0], VERBS, n=1, cutoff=0.75):
            return f"; did you mean the verb {verb}?"
        with suppress(ValueError):
            parse_size(target[0], lambda: 1 << 40)
            return f"; did you mean --budget {target[0]}?"
    return ""
