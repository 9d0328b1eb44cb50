"""The extension for notebooks: after `%load_ext dtrrun`, `%%dtrrun --budget 6GB` runs a cell inside a budget.

IPython is not needed before it loads this file, and not imported by it: all that is asked of it is the shell
that it passes.
"""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
import time
import traceback
from typing import Any, NoReturn

import dtrrun
from dtrrun.settings import RuntimeSettings, rows
from dtrrun.sizes import as_bytes
from dtrrun.telemetry.fields import COUNTERS
from dtrrun.telemetry.record import Snapshot, this_process
from dtrrun.views.final import print_final
from dtrrun.views.report import build_report

MAGIC = "dtrrun"
LEFT_OUT = {"max_steps", "on_thrash", "remember"}
"""Options that end the process, or belong to a command that is run again."""
IN_LINE = "{text}\nThe cell was at: {line}"


def load(shell: Any) -> None:
    """Add `%%dtrrun` to a notebook. shell: IPython's `InteractiveShell`."""

    def in_budget(line: str, cell: str) -> Any:
        """Run the cell inside a memory budget, and show what that has cost."""
        return run(shell, line, cell)

    shell.register_magic_function(in_budget, "cell", MAGIC)


def run(shell: Any, line: str, cell: str) -> Any:
    """Run a cell with the options in `line`. Returns the value of its last line, unless that ends with `;`.

    Raises what the cell raises. A BudgetError has lost its traceback, which would keep half a step in memory.
    """
    parser = _parser()
    try:
        options = vars(parser.parse_args(shlex.split(line)))
        size = as_bytes(options.pop("budget_bytes"))
        given = {name: value for name, value in options.items() if value is not None}
        RuntimeSettings.of(budget_bytes=size, **given)
    except SystemExit:  # --help
        return None
    except ValueError as error:
        parser.error(str(error))
    source = shell.transform_cell(cell)
    name = shell.compile.cache(source, shell.execution_count)
    tree = shell.transform_ast(shell.compile.ast_parse(source, filename=name))
    report, started = {}, time.perf_counter()
    try:
        with dtrrun.budget(size, **given) as session:
            try:
                value = _execute(shell, tree, name)
            finally:
                report = _report(session, ["%%dtrrun", *shlex.split(line)], time.perf_counter() - started)
        return None if cell.rstrip().endswith(";") else value
    except dtrrun.BudgetError as error:
        lines = [entry.line for entry in traceback.extract_tb(error.__traceback__) if entry.filename == name]
        text = IN_LINE.format(text=error, line=lines[-1]) if lines else str(error)
        traceback.clear_frames(error.__traceback__)
    finally:
        if report:
            print_final(report, sys.stdout)
    raise dtrrun.BudgetError(text)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise the error that a notebook shows without a traceback."""
        wrong: Any = getattr(sys.modules.get("IPython.core.error"), "UsageError", ValueError)
        raise wrong(f"%%{MAGIC}: {message}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=f"%%{MAGIC}", description="Run a cell inside a memory budget.")
    for row in rows(RuntimeSettings):
        if row.field in LEFT_OUT:
            continue
        said = row.help.replace("%", "%%")
        if row.word:
            parser.add_argument(row.names[0], dest=row.field, metavar=row.word, help=said)
        else:
            parser.add_argument(
                row.names[0], dest=row.field, action=argparse.BooleanOptionalAction, help=said
            )
    return parser


def _execute(shell: Any, tree: ast.Module, name: str) -> Any:
    """Run the statements of a cell in its namespace. Returns the value of the last one, if it has one."""
    *body, last = tree.body or [ast.Pass(lineno=1, col_offset=0)]
    if not isinstance(last, ast.Expr):
        body.append(last)
    exec(shell.compile(ast.Module(body, []), name, "exec"), shell.user_ns)
    if isinstance(last, ast.Expr):
        return eval(shell.compile(ast.Expression(last.value), name, "eval"), shell.user_ns)
    return None


def _report(session: Any, command: list[str], seconds: float) -> dict[str, Any]:
    """Return the report of a cell, as of the run of a command."""
    import torch

    found = session.report()
    counters = {name: found[name] for name in COUNTERS} | {"operators": session.ledger.age}
    meta = this_process() | {"torch": torch.__version__, "device": session.ledger.device_type}
    snapshot = Snapshot(meta["pid"], meta, counters, found, ended=True, status="ended")
    return build_report([snapshot], session.settings, 0, command, seconds)
