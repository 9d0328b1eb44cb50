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
[bold]top[/bold] shows the runs in progress; [bold]doctor[/bold] checks this machine; [bold]report[/bold]
makes a page from the JSON of a run; [bold]record[/bold] writes down the operators of a step, and
[bold]simulate[/bold] replays them under other budgets. Each has its own help: dtrrun profile --help.

[bold]Other places for options[/bold]: every option has an environment variable (DTRRUN_BUDGET,
DTRRUN_IGNORE_SMALL) and a key in a profile and in \\[tool.dtrrun] of pyproject.toml (budget, ignore_small).
The command line takes precedence over the environment, that over the profile, and that over pyproject.toml.

[bold]Exit status[/bold]: the target's own, or: 2, wrong usage; 3, --verify found a difference; 4,
--on-violation stop ended the run; 125, dtrrun failed, a report could not be written, or no process of the
target imported torch; 126, the target cannot be executed; 127, it was not found; 128 + n, it was ended by
signal n.
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
    "--version",
    callback=_show_version,
    is_eager=True,
    rich_help_panel=_SETUP,
    help="Show the version and exit.",
)


def run(
    ctx: typer.Context,
    budget: Annotated[
        _Text,
        _text(
            _BUDGET,
            "SIZE",
            "The most memory that tensors may take: 6GB (10^9), 6GiB (2^30), 512MB, or 50% of the device's "
            "memory. Without a budget, memory is counted and nothing is evicted.",
        ),
    ] = None,
    device: Annotated[_Text, _text(_BUDGET, "DEVICE", "auto (default), cpu, cuda or cuda:N.")] = None,
    over_budget: Annotated[
        _Text,
        _text(
            _BUDGET,
            "error|warn",
            "What to do when nothing is left to evict: raise an out-of-memory error in the script (default), "
            "or warn and go over the budget.",
        ),
    ] = None,
    return_memory: Annotated[
        _Text,
        _text(
            _BUDGET,
            "auto|always|never",
            "On the CPU, when to return the memory of evicted tensors to the system: when it comes to half "
            "of the budget (auto, the default), an eighth of it (always; slower), or never. When the machine "
            "runs short of memory, auto returns as much as always.",
        ),
    ] = None,
    heuristic: Annotated[
        _Text,
        _text(
            _POLICY,
            "NAME",
            "Which storage is evicted first: h_dtr_eq (default), h_chain, h_next, h_dtr, h_dtr_local, lru, "
            "size, msps, random, e_star; one of the paper's App. D, such as h'(s=no,m=yes,c=eqclass); or a "
            "function of your own, module:function.",
        ),
    ] = None,
    deallocation: Annotated[
        _Text,
        _text(
            _POLICY,
            "eager",
            "What to do when the program releases a storage: evict it (eager). The paper's other policies, "
            "banish and ignore, exist in the simulator only.",
        ),
    ] = None,
    ignore_small: Annotated[
        _Text,
        _text(_POLICY, "SHARE", "Evict storages smaller than this share of the mean size, such as 1%, last."),
    ] = None,
    sample: Annotated[
        _Flag, _flag(_POLICY, "sample", "Search a random sample of √n of the n storages instead of all.")
    ] = None,
    seed: Annotated[
        _Text, _text(_POLICY, "N", "Seed of the random heuristic and of --sample (default: 0).")
    ] = None,
    cost: Annotated[
        _Text,
        _text(
            _POLICY,
            "measured|model",
            "Cost of an operator: its measured time (default), or a fixed model, so that every run evicts "
            "alike.",
        ),
    ] = None,
    costs: Annotated[
        _Text, _text(_POLICY, "PATH", "Read operator costs from a file that dtrrun profile has written.")
    ] = None,
    max_slowdown: Annotated[
        _Text,
        _text(
            _LIMITS, "X", "Treat a step as thrashing when it takes more than X times as long as its own work."
        ),
    ] = None,
    on_thrash: Annotated[
        _Text,
        _text(
            _LIMITS, "warn|stop", "What to do about a step that thrashes: warn (default), or stop the script."
        ),
    ] = None,
    on_violation: Annotated[
        _Text,
        _text(
            _LIMITS,
            "warn|stop",
            "What to do when the driver shows more than the budget for a process on its GPU: warn (default), "
            "or stop the run with exit status 4.",
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
            "Show from which module and line recomputed operators were called (slower).",
        ),
    ] = None,
    live: Annotated[
        _Text,
        _text(
            _OUTPUT,
            "auto|always|never",
            "Show a live table on a terminal (auto, the default); always: where there is no terminal, a line "
            "every few seconds.",
        ),
    ] = None,
    json: Annotated[
        _Text,
        _text(
            _OUTPUT, "PATH", "Write a report as JSON; - is standard output, after all that the target wrote."
        ),
    ] = None,
    html: Annotated[
        _Text,
        _text(
            _OUTPUT, "PATH", "Write the report as a page for a browser: a single file that needs no network."
        ),
    ] = None,
    trace: Annotated[
        _Text,
        _text(
            _OUTPUT,
            "PATH",
            "Write every eviction, search and rematerialization as a trace for ui.perfetto.dev; a PATH that "
            "ends in .gz is compressed.",
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
            "The interpreter for a script, -m or -c. By default: dtrrun's own if dtrrun is called by its "
            "path; else that of the active environment; else python3 if it has torch.",
        ),
    ] = None,
    version: Annotated[bool, _VERSION] = False,
) -> int:
    """Run TARGET, an unmodified PyTorch program, inside a memory budget.

    Tensors are evicted when memory runs short and recomputed when they are needed; the results are the same
    to the last bit. TARGET is a script, [bold]-m[/bold] module, [bold]-c[/bold] code, or any command
    that starts Python, such as torchrun. The options of dtrrun end where TARGET begins; the rest is TARGET's.
    """
    given = {key: value for key, value in ctx.params.items() if key not in ("version", "help")}
    options = inside_another(collect(given))
    return supervise(options, resolve(ctx.obj, lambda: choose(options.python)))
