"""The verbs of `dtrrun` as Markdown: their help, their options, their examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dtrrun.cli.main import VERBS, command_of


def commands() -> str:
    """Every verb, each under a heading of its own."""
    return "\n\n".join(_command(verb) for verb in VERBS)


def options(verb: str) -> Iterator[Any]:
    """The verb's options, as click has them, without those that all programs have."""
    for param in command_of(verb).params:
        if param.param_type_name == "option" and param.name not in ("help", "version"):
            yield param


def _command(verb: str) -> str:
    command = command_of(verb)
    usage = command.options_metavar.removeprefix(f"{verb} ")
    words = "dtrrun" if verb == "run" else f"dtrrun {verb}"
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    usage = " ".join([words, usage, *(param.metavar or param.name.upper() for param in arguments)])
    parts = [
        f"## `dtrrun {verb}`",
        f"    {usage}",
        _text(command.help),
        *_tables(verb),
        _epilog(command.epilog),
    ]
    return "\n\n".join(parts)


def _tables(verb: str) -> Iterator[str]:
    panels: dict[str, list[str]] = {}
    for param in options(verb):
        row = f"| {_names(param)} | {_text(param.help or '')} |"
        panels.setdefault(getattr(param, "rich_help_panel", None) or "Options", []).append(row)
    for panel, rows in panels.items():
        yield "\n".join([f"| {panel} | |", "|---|---|", *rows])


def _names(param: Any) -> str:
    names = [*param.opts, *param.secondary_opts]
    value = "" if param.is_flag or not param.metavar else f" {param.metavar}"
    long = sorted(names, key=lambda name: not name.startswith("--"))
    return ", ".join(f"`{name}{value if place == 0 else ''}`" for place, name in enumerate(long)).replace(
        "|", "\\|"
    )


def _epilog(text: str) -> str:
    """Its examples become code, one below the other."""
    written = ""
    for paragraph in text.split("\n\n"):
        code = paragraph.startswith("dtrrun ")
        last = written.rpartition("\n")[2]
        written += ("\n" if code and last.startswith("    ") else "\n\n") if written else ""
        written += f"    {paragraph}" if code else _text(paragraph)
    return written


def _text(text: str) -> str:
    """Help text, which is rich's markup, as Markdown."""
    escaped = re.sub(r"([*_|<>`])", r"\\\1", text.strip())
    return re.sub(r"\[bold\](.*?)\[/bold\]", r"**\1**", escaped)
