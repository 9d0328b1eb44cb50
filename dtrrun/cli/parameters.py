"""How the verbs' options look: each with its panel in the help, its metavar and its help."""

from __future__ import annotations

from typing import Any

import typer


def text(panel: str, metavar: str, help: str) -> Any:
    return typer.Option(metavar=metavar, rich_help_panel=panel, help=help)


def flag(panel: str, name: str, help: str) -> Any:
    return typer.Option(f"--{name}/--no-{name}", metavar="", rich_help_panel=panel, help=help)
