"""The verbs' options: how they look in the help, and how their text is read."""

from __future__ import annotations

from typing import Any

import typer

from dtrrun.launch.errors import LaunchError


def text(panel: str, metavar: str, help: str) -> Any:
    return typer.Option(metavar=metavar, rich_help_panel=panel, help=help)


def flag(panel: str, name: str, help: str) -> Any:
    return typer.Option(f"--{name}/--no-{name}", metavar="", rich_help_panel=panel, help=help)


def read(name: str, reader: Any, text: str) -> Any:
    """The value of the option `name`. Raises LaunchError."""
    try:
        return reader(text)
    except ValueError as error:
        raise LaunchError(f"{name}: {error}") from None
