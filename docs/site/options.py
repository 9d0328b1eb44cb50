"""The options as Markdown, from the tables that the command is made from: verbs, their help and examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from dtrrun.cli.command import options_of
from dtrrun.cli.main import VERBS
from dtrrun.cli.options import OPTIONS
from dtrrun.settings import Option, RuntimeSettings, rows


def commands() -> str:
    """Every verb, each under a heading of its own."""
    return "\n\n".join(_command(verb) for verb in VERBS)


def keywords() -> str:
    """What `dtrrun.budget` takes besides the budget and the device."""
    taken = [row for row in rows(RuntimeSettings) if row.field not in ("budget_bytes", "device")]
    lines = (f"| `{row.field}` | `{row.default!r}` | {_text(row.help)} |" for row in taken)
    return "\n".join(["| Keyword | Default | |", "|---|---|---|", *lines])


def _command(verb: str) -> str:
    module: Any = import_module(f"dtrrun.cli.{verb}")
    words = [row.word for row in options_of(verb) if row.argument]
    usage = " ".join(["dtrrun", module.USAGE, *words])
    parts = [f"## `dtrrun {verb}`", f"    {usage}", _text(getattr(module, verb).__doc__)]
    return "\n\n".join([*parts, *_tables(verb), _epilog(module.EPILOG)])


def _tables(verb: str) -> Iterator[str]:
    panels: dict[str, list[str]] = {}
    for row in options_of(verb):
        if not row.argument:
            default = f" Default: `{row.default_text}`." if row.default_text else ""
            variable = f" Variable: `{row.variable}`." if verb == "run" and row.key in OPTIONS else ""
            line = f"| {_names(row)} | {_text(row.help)}{default}{variable} |"
            panels.setdefault(row.panel or "Options", []).append(line)
    for panel, lines in panels.items():
        yield "\n".join([f"| {panel} | |", "|---|---|", *lines])


def _names(row: Option) -> str:
    first, *others = row.names
    names = [f"{first} {row.word}".rstrip(), *others]
    return ", ".join(f"`{name}`" for name in names).replace("|", "\\|")


def _epilog(text: str) -> str:
    """Its examples become code, one below the other."""
    written = ""
    for paragraph in _paragraphs(text):
        code = paragraph.startswith("dtrrun ")
        last = written.rpartition("\n")[2]
        written += ("\n" if code and last.startswith("    ") else "\n\n") if written else ""
        written += f"    {paragraph}" if code else _text(paragraph)
    return written


def _paragraphs(text: str) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n")]


def _text(text: str) -> str:
    """Help text, which is rich's markup, as Markdown."""
    escaped = re.sub(r"([*_|<>`])", r"\\\1", "\n\n".join(_paragraphs(text)))
    return re.sub(r"\[bold\](.*?)\[/bold\]", r"**\1**", escaped)
