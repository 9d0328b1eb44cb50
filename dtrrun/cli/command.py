"""Makes a verb's typer command from its table of options, its docstring and its examples.

A verb is a file in this folder, with a dataclass and a function: `class Smoke`, `def smoke(given, target)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, replace
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any

import typer

from dtrrun.cli.options import OPTIONS
from dtrrun.cli.profiles import Given
from dtrrun.settings import Option, rows


def of_run(*keys: str, panel: str = "") -> Any:
    """Declare a field that holds the given options of a run by key, as `collect` takes them."""
    shown = [OPTIONS[key] for key in keys]
    return field(
        default_factory=dict, metadata={"of_run": [replace(row, panel=panel or row.panel) for row in shown]}
    )


def table_of(verb: str) -> type[Any]:
    """Return the dataclass whose fields are the verb's options."""
    table: type[Any] = getattr(import_module(f"dtrrun.cli.{verb}"), verb.capitalize())
    return table


def options_of(verb: str) -> list[Option]:
    """Return the verb's options and positional words in order, including those of a run."""
    table = table_of(verb)
    own = {row.field: [row] for row in rows(table)}
    return [row for one in fields(table) for row in own.get(one.name) or one.metadata["of_run"]]


def given_to(verb: str, typed: Mapping[str, Any]) -> Any:
    """Return the verb's dataclass. typed: by key, texts, booleans for switches, None if not given.

    Raises LaunchError, which names the option, for an invalid text.
    """
    table, given = table_of(verb), {}
    for one in fields(table):
        if shared := one.metadata.get("of_run"):
            given[one.name] = {row.key: typed[row.key] for row in shared}
    for row in rows(table):
        if (value := typed[row.key]) is not None:
            where = row.short or row.names[0]
            given[row.field] = Given(value, where).read(row.read) if isinstance(value, str) else value
    return table(**given)


def command_of(verb: str) -> Any:
    """Return the verb's typer command.

    Called with words, it returns values by option key, or prints the help.
    """
    module = import_module(f"dtrrun.cli.{verb}")
    parameters = [_parameter(row) for row in options_of(verb)]

    def typed(**typed: Any) -> dict[str, Any]:
        return typed

    # Typer reads the signature and the annotations of the function.
    vars(typed)["__signature__"] = Signature(parameters)
    typed.__annotations__ = {one.name: one.annotation for one in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
    app.command(
        verb,
        help=_paragraphs(getattr(module, verb).__doc__) + getattr(module, "BELOW", ""),
        epilog=_paragraphs(module.EPILOG),
        options_metavar=module.USAGE,
        context_settings={"help_option_names": ["-h", "--help"]},
    )(typed)
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, **command.context_settings)
    command.get_help_option(context).metavar = ""  # in place of a type
    return command


def _parameter(row: Option) -> Parameter:
    shown: Any
    if row.argument:
        kind: Any = list[str] if row.word.endswith("...") else str
        shown = typer.Argument(row.default, metavar=row.word, help=row.help, show_default=False)
    else:
        kind = str if row.word else bool
        names = row.names
        if kind is bool:  # "--x/--no-x" is one name to typer
            short = [row.short] if row.short else []
            names = ["/".join(name for name in names if name not in short), *short]
        default = f" [dim]\\[default: {row.default_text}][/dim]" if row.default_text else ""
        shown = typer.Option(
            None,
            *names,
            metavar=row.word,
            rich_help_panel=row.panel or None,
            help=row.help + default,
            show_default=False,
        )
    return Parameter(row.key, Parameter.KEYWORD_ONLY, default=shown, annotation=kind)


def _paragraphs(text: str) -> str:
    """Join the lines of each paragraph: typer wraps to the terminal's width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
