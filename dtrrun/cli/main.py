"""The command `dtrrun`: which verb is meant, which words are its options, and how errors are shown.

Our options stop at the first word that is none. A verb is one of VERBS, each a file of this folder; where the
first such word is no verb, the verb is `run` and the word begins the target.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import typer

from dtrrun.cli.messages import discard, say, to_stdout
from dtrrun.launch.errors import FAILED, NOT_FOUND, LaunchError

VERBS = ("run", "record", "profile", "simulate", "smoke", "top", "report", "doctor")
HELP = {"-h", "--help"}
TARGETS = ("-m", "-c")  # these begin a target of Python's, although they look like options

# The root of typer's usage errors: click's, which newer versions of typer carry inside themselves.
ParseError: type[Any] = typer.BadParameter.mro()[2]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line `arguments` (those of the process by default) and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`2>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends
    try:
        status = _main(words)
    except LaunchError as error:
        say(f"error: {error}{_verb_meant(words) if error.exit_status == NOT_FOUND else ''}")
        status = error.exit_status
    except ParseError as error:
        say(f"error: {error.format_message()} (see {_help_for(error)})")
        status = error.exit_code
    except KeyboardInterrupt:
        status = 130
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        discard(1)  # rich, which prints the help, ends the command with 1 where its reader has left
        status = 0
    except Exception as error:
        if os.environ.get("DTRRUN_DEBUG"):
            raise
        say(f"error: {type(error).__name__}: {error} (DTRRUN_DEBUG=1 shows where)")
        status = FAILED
    sys.exit(_flushed(status))


def _flushed(status: int) -> int:
    """The exit status when all that was printed has been written; one line where it cannot be."""
    try:
        with to_stdout():
            return status
    except LaunchError as error:
        say(f"error: {error}")
        return status or error.exit_status


def _main(words: list[str]) -> int:
    verb = "run"
    command = command_of(verb)
    ours, target = split(words, command)
    if target and target[0] in VERBS and words[len(ours)] != "--":
        verb = target[0]
        command = command_of(verb)
        if any(param.param_type_name == "argument" for param in command.params):
            more, target = target[1:], []  # it has words of its own, and its options may stand among them
        else:
            more, target = split(target[1:], command)
        ours += more
    # What is printed before the verb begins is its help. The verbs see to their own output.
    with to_stdout() if HELP.intersection(ours) else nullcontext():
        # The target goes past typer, which would check that its words are valid text.
        status = command.main(args=ours, prog_name="dtrrun", standalone_mode=False, obj=target)
    return status if isinstance(status, int) else 0


def _help_for(error: Any) -> str:
    """Where more is told about what was wrong with the words."""
    context = getattr(error, "ctx", None)
    verb = context.command.name if context is not None else "run"
    text = "dtrrun --help" if verb == "run" else f"dtrrun {verb} --help"
    option = getattr(error, "option_name", None)
    if option is not None and re.fullmatch("-[a-zA-Z]", option):
        text += f"; for an option of Python, write: dtrrun python {option} ..."
    return text


def _verb_meant(words: list[str]) -> str:
    ours, target = split(words, command_of("run"))
    if len(ours) < len(words) and words[len(ours)] != "--" and target[0] not in VERBS:
        for verb in get_close_matches(target[0], VERBS, n=1, cutoff=0.75):
            return f"; did you mean the verb {verb}?"
    return ""


def split(words: Sequence[str], command: Any) -> tuple[list[str], list[str]]:
    """The options at the head of `words`, and the rest without the `--` that may stand between."""
    flags = {name: param.is_flag for param in command.params for name in (*param.opts, *param.secondary_opts)}
    place = 0
    while place < len(words):
        word = words[place]
        if word == "--":
            return list(words[:place]), list(words[place + 1 :])
        if not word.startswith("-") or word == "-" or (word.startswith(TARGETS) and word[1] != "-"):
            break
        place += 1 if flags.get(word, True) else 2
    return list(words[:place]), list(words[place:])


def command_of(verb: str) -> Any:
    """The verb's command object, from the function of its name in the file of its name."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    module = import_module(f"dtrrun.cli.{verb}")
    function = getattr(module, verb)
    help, epilog = _paragraphs(function.__doc__), _paragraphs(module.EPILOG)
    app.command(**module.COMMAND, help=help, epilog=epilog)(function)
    return typer.main.get_command(app)


def _paragraphs(text: str) -> str:
    """`text` without the line ends inside its paragraphs: typer breaks lines to the terminal's width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
