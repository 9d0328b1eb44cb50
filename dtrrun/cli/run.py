"""The verb `run`: a program, unmodified, inside a memory budget."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import typer

from dtrrun import __version__
from dtrrun.cli.messages import to_stdout
from dtrrun.cli.nesting import inside_another
from dtrrun.cli.options import collect
from dtrrun.cli.parameters import flag as _flag
from dtrrun.cli.parameters import text as _text
from dtrrun.cli.supervise import supervise
from dtrrun.launch.interpreter import choose
from dtrrun.launch.target import resolve

EPILOG = """
[bold]Examples[/bold]

dtrrun --budget 6GB train.py --epochs 3

dtrrun --budget 50% -m mypackage.train

dtrrun --budget 2GiB --verify torchrun --nproc-per-node 2 train.py

[bold]Other verbs[/bold]: [bold]profile[/bold] finds a budget; [bold]smoke[/bold] checks a script in CI;
[bold]top[/bold] looks at runs under way; [bold]doctor[/bold] tells what dtrrun finds here;
[bold]record[/bold] and [bold]simulate[/bold], logs of operators and what becomes of them under budgets.
dtrrun profile --help.

[bold]Other places for options[/bold]: every option has an environment variable (DTRRUN_BUDGET,
DTRRUN_IGNORE_SMALL) and a key in a profile and in \\[tool.dtrrun] of pyproject.toml (budget, ignore_small).
The command line goes before the environment, that before the profile, and that before pyproject.toml.

[bold]Exit status[/bold]: the target's own. Or 2 usage; 3 --verify found a difference; 4 --on-violation
stop ended it; 125 dtrrun failed, or no process of the target imported torch; 126 cannot be executed; 127 not
found; 128 + n ended by signal n.
"""
COMMAND: dict[str, Any] = {
    "options_metavar": "[OPTIONS] [run] [--] TARGET [ARGS]...",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


def _show_version(wanted: bool) -> None:
    if wanted:
        with to_stdout():
            print(f"dtrrun {__version__}")
        raise typer.Exit


_Text: TypeAlias = str | None
_Flag: TypeAlias = bool | None
_BUDGET, _POLICY, _LIMITS = "Budget", "What to evict", "Limits and checks"
_OUTPUT, _SETUP = "Output", "Set-up"
_VERSION: Any = typer.Option(
    "--version", callback=_show_version, is_eager=True, rich_help_panel=_SETUP, help="Show it."
)


def run(
    ctx: typer.Context,
    budget: Annotated[
        _Text,
        _text(
            _BUDGET,
            "SIZE",
            "The most tensor memory to hold: 6GB (10^9), 6GiB (2^30), 512MB, or 50% of the device's memory."
            " Without a budget, memory is counted and nothing is evicted.",
        ),
    ] = None,
    device: Annotated[_Text, _text(_BUDGET, "DEVICE", "auto (default), cpu, cuda or cuda:N.")] = None,
    over_budget: Annotated[
        _Text,
        _text(
            _BUDGET,
            "error|warn",
            "When nothing is left to evict: an out-of-memory error in the script (default), or a warning, "
            "and go over.",
        ),
    ] = None,
    return_memory: Annotated[
        _Text,
        _text(
            _BUDGET,
            "auto|always|never",
            "On the CPU, return the pages of evicted tensors to the system: when the machine is short of "
            "memory (auto, the default), always (slower), or never.",
        ),
    ] = None,
    heuristic: Annotated[
        _Text,
        _text(
            _POLICY,
            "NAME",
            "Which storage goes first: h_dtr_eq (default), h_chain, h_next, h_dtr, h_dtr_local, lru, size, "
            "msps, random, e_star; one of the paper's App. D, such as h'(s=no,m=yes,c=eqclass); or your own "
            "function, module:function.",
        ),
    ] = None,
    deallocation: Annotated[
        _Text,
        _text(
            _POLICY,
            "eager",
            "When the program lets go of a storage: evict it (eager). The paper's others, banish and ignore, "
            "exist in the simulator only.",
        ),
    ] = None,
    ignore_small: Annotated[
        _Text, _text(_POLICY, "SHARE", "Never evict storages below this share of the mean size, such as 1%.")
    ] = None,
    sample: Annotated[
        _Flag, _flag(_POLICY, "sample", "Search a sample of √n of the n storages, not all.")
    ] = None,
    seed: Annotated[
        _Text, _text(_POLICY, "N", "Of the random heuristic and of sampling (default 0).")
    ] = None,
    cost: Annotated[
        _Text,
        _text(
            _POLICY,
            "measured|model",
            "An operator's cost: its time (default), or a fixed model, for evictions that are alike in "
            "every run.",
        ),
    ] = None,
    costs: Annotated[
        _Text, _text(_POLICY, "PATH", "Costs that are known before: a file that dtrrun profile has made.")
    ] = None,
    max_slowdown: Annotated[
        _Text, _text(_LIMITS, "X", "A step is thrashing when it takes more than X times its own work.")
    ] = None,
    on_thrash: Annotated[_Text, _text(_LIMITS, "warn|stop", "What to do then (default: warn).")] = None,
    on_violation: Annotated[
        _Text,
        _text(
            _LIMITS,
            "warn|stop",
            "When the driver shows more than the budget for a process on its GPU: a warning (default), or "
            "the run's end, with exit status 4.",
        ),
    ] = None,
    max_steps: Annotated[
        _Text, _text(_LIMITS, "N", "End the script after N optimizer steps, with exit status 0.")
    ] = None,
    verify: Annotated[
        _Flag,
        _flag(
            _LIMITS,
            "verify",
            "Compare each rematerialized storage with what was evicted; exit status 3 on a difference.",
        ),
    ] = None,
    where: Annotated[
        _Flag,
        _flag(
            _OUTPUT,
            "where",
            "Tell from which module and line the recomputed operators were called; takes longer.",
        ),
    ] = None,
    live: Annotated[
        _Text,
        _text(
            _OUTPUT,
            "auto|always|never",
            "A live table on a terminal (auto, the default); always: elsewhere too, a line every few "
            "seconds.",
        ),
    ] = None,
    json: Annotated[
        _Text,
        _text(_OUTPUT, "PATH", "Write a report; - is standard output, after all that the target wrote."),
    ] = None,
    html: Annotated[
        _Text,
        _text(_OUTPUT, "PATH", "Write the report as a page for a browser: one file, which needs no network."),
    ] = None,
    trace: Annotated[
        _Text,
        _text(
            _OUTPUT,
            "PATH",
            "Write every eviction, search and rematerialization as a trace for ui.perfetto.dev; compressed "
            "where it ends in .gz.",
        ),
    ] = None,
    quiet: Annotated[_Flag, _flag(_OUTPUT, "quiet", "Print nothing but errors.")] = None,
    profile: Annotated[
        _Text,
        _text(
            _SETUP,
            "NAME|PATH",
            "Options from a YAML file: default, ci-smoke, low-memory, paper, a name in "
            "~/.config/dtrrun/profiles, or a path.",
        ),
    ] = None,
    python: Annotated[
        _Text,
        _text(
            _SETUP,
            "PATH",
            "The interpreter for a script, -m or -c. By default dtrrun's own, where dtrrun is called by its"
            " path; else that of the active environment; else python3 where it has torch.",
        ),
    ] = None,
    version: Annotated[bool, _VERSION] = False,
) -> int:
    """Run TARGET, a PyTorch program that needs no change, inside a memory budget.

    Storages are evicted when memory runs short, and computed again when they are needed: the results are the
    same to the last bit. TARGET is a script, [bold]-m[/bold] module, [bold]-c[/bold] code, or any command
    that starts Python, such as torchrun. The options of dtrrun end where TARGET begins; the rest is TARGET's.
    """
    given = {key: value for key, value in ctx.params.items() if key not in ("version", "help")}
    options = inside_another(collect(given))
    return supervise(options, resolve(ctx.obj, lambda: choose(options.python)))
