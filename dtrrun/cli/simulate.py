"""The verb `simulate`: recorded operator logs under budgets, by heuristic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from dtrrun.cli import values
from dtrrun.cli.parameters import flag as _flag
from dtrrun.cli.parameters import read
from dtrrun.cli.parameters import text as _text
from dtrrun.cli.report_file import report_writer, write_each
from dtrrun.cli.sweeping import cells_of, ended, import_from_here, processors, read_logs, run, shown
from dtrrun.cli.theory import read_theory, simulate_theory
from dtrrun.launch.errors import LaunchError
from dtrrun.policy import ABLATION_NAMES
from dtrrun.simulator import sweep
from dtrrun.simulator.figures import FORMATS, MissingMatplotlib, draw, need_matplotlib
from dtrrun.simulator.planned import NAMES as PLANNERS
from dtrrun.simulator.planned import PlanRow, plan_cells, run_planner
from dtrrun.simulator.simulate import REPLAYS
from dtrrun.simulator.theory import THEORIES
from dtrrun.views.simulation import print_simulation

_VARIANTS = ("h_dtr", "h_dtr_eq", "h_dtr_local")
PAPER: Sequence[tuple[Sequence[str], Sequence[str], Sequence[str], bool]] = (
    (_VARIANTS, ("eager",), ("heap", "scan"), True),  # App. D.3
    (values.PAPER, ("eager",), ("heap",), False),  # Fig. 2
    (ABLATION_NAMES, ("eager",), ("heap",), False),  # App. D.1
    (("h_dtr",), tuple(REPLAYS), ("heap",), False),  # App. D.2
)
"""The paper's evaluation: heuristics, deallocations, searches, and whether accesses are counted."""

HEURISTICS = "h_dtr,h_dtr_eq,h_dtr_local,lru,size"

SCHEMA = "dtrrun.simulation/1"

EPILOG = """
[bold]Examples[/bold]

dtrrun simulate step.log

dtrrun simulate logs/ --heuristic h_dtr_eq,lru --budgets 0.5,0.4,2GB --json rows.json

dtrrun simulate logs/ --paper --figures pictures/

dtrrun simulate --theory linear --figures pictures/

[bold]Exit status[/bold]: 0, all was simulated, whatever came of it; 2, wrong usage or a log that cannot be
read; 125, dtrrun failed, or a result could not be written; 130 after Ctrl-C, with the rows that were done.
"""
COMMAND: dict[str, Any] = {
    "options_metavar": "simulate [OPTIONS]",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

_WHAT, _HOW, _OUTPUT = "What to simulate", "How", "Output"
_Text: TypeAlias = str | None


def simulate(
    logs: Annotated[
        list[str] | None, typer.Argument(metavar="LOG...", help="Operator logs, or folders of them.")
    ] = None,
    heuristic: Annotated[
        _Text,
        _text(
            _WHAT,
            "NAME[,NAME...]",
            "Heuristics as for a run; paper: those of the paper's Fig. 2; ablations: those of App. D; "
            "h_next: knows the step before; portfolio: tries many and keeps the best at each budget. "
            f"Default: {HEURISTICS}.",
        ),
    ] = None,
    budgets: Annotated[
        _Text, _text(_WHAT, "B[,B...]", "Budgets: shares of the log's own peak (0.5, 50%) or sizes (2GB).")
    ] = None,
    theory: Annotated[
        _Text,
        _text(
            _WHAT,
            "|".join(THEORIES),
            "Check the paper's theorems instead of logs: count operations on the linear network of App. A, "
            "or on the graph that the adversary of App. B builds for each heuristic. Budgets are then "
            "numbers of tensors.",
        ),
    ] = None,
    sizes: Annotated[
        _Text, _text(_WHAT, "N[,N...]", "With --theory: the number of layers or nodes of the network.")
    ] = None,
    deallocation: Annotated[
        str,
        _text(
            _WHAT,
            "NAME[,NAME...]",
            "What to do when the program releases a storage: " + ", ".join(REPLAYS) + ".",
        ),
    ] = "eager",
    semantics: Annotated[
        str,
        _text(
            _HOW,
            "paper|dtrrun",
            "Which runtime to simulate: that of the paper's App. C (default), or dtrrun's own, which needs a "
            "log of dtrrun record.",
        ),
    ] = "paper",
    search: Annotated[
        str,
        _text(
            _HOW,
            "heap|scan[,...]",
            "How to find the least score: scan computes all scores, as the paper does, which is slow; heap "
            "makes the same choices.",
        ),
    ] = "heap",
    accesses: Annotated[
        bool, _flag(_HOW, "accesses", "Count storage accesses, as in the paper's App. D.3.")
    ] = False,
    planners: Annotated[
        _Text,
        _text(
            _WHAT,
            "NAME[,NAME...]",
            f"Static planners to compare with, which know the whole log: {', '.join(PLANNERS)}.",
        ),
    ] = None,
    planner_seconds: Annotated[
        str, _text(_HOW, "N", "Seconds that a planner's solver may take for one plan.")
    ] = "60",
    paper: Annotated[
        bool,
        _flag(
            _WHAT,
            "paper",
            "Run the paper's whole evaluation instead of the options above: its heuristics, ablations, "
            "deallocations and accesses (slow).",
        ),
    ] = False,
    limit: Annotated[
        _Text,
        _text(
            _HOW,
            "X",
            "Treat a run as thrashing when it takes more than X times as long as the plain run (default: 2).",
        ),
    ] = None,
    paper_ties: Annotated[
        bool,
        _flag(_HOW, "paper-ties", "Among equal scores, choose as the authors' simulator does."),
    ] = True,
    seed: Annotated[str, _text(_HOW, "N", "Seed of the random heuristic.")] = "0",
    jobs: Annotated[
        _Text, _text(_HOW, "N", "Number of processes (default: the number of processors).")
    ] = None,
    json: Annotated[
        _Text,
        _text(
            _OUTPUT,
            "PATH",
            "Write the rows as JSON; - is standard output (the tables then go to standard error).",
        ),
    ] = None,
    figures: Annotated[
        _Text,
        _text(
            _OUTPUT, "FOLDER", "Draw the paper's figures of the results into this folder (needs matplotlib)."
        ),
    ] = None,
    format: Annotated[str, _text(_OUTPUT, "|".join(FORMATS), "Format of the figures.")] = "svg",
    quiet: Annotated[bool, _flag(_OUTPUT, "quiet", "Print no tables and no progress.")] = False,
) -> int:
    """Replay recorded operator logs inside memory budgets, as the paper's simulator does.

    A LOG is in the format of the paper's App. C.6, as dtrrun record writes it; of a folder, all *.log and
    *.log.gz files are read. For each heuristic and budget the table shows how much longer the operators take
    than without a budget, oom if nothing was left to evict, or thrash.
    """
    processes = read("--jobs", values.whole_number(least=1), jobs) if jobs else processors()
    format = read("--format", values.choice(*FORMATS), format)
    if theory is not None:
        others = {
            "a LOG": logs,
            "--planners": planners,
            "--paper": paper,
            "--accesses": accesses,
            "--deallocation": deallocation != "eager",
            "--semantics": semantics != "paper",
            "--search": search != "heap",
            "--no-paper-ties": not paper_ties,
        }
        if found := [name for name, given in others.items() if given]:
            raise LaunchError(f"--theory runs networks of its own: {found[0]} does not go with it")
        wanted_theory = read_theory(theory, heuristic, sizes, budgets, limit, seed)
        return simulate_theory(wanted_theory, processes, json, _folder(figures), format, quiet)
    if sizes is not None:
        raise LaunchError("--sizes goes with --theory alone")
    if not logs:
        raise LaunchError("Missing argument 'LOG...' (or --theory; see dtrrun simulate --help)")
    shares = sweep.RATIOS if budgets is None else read("--budgets", values.budgets, budgets)
    wanted = [sweep.Budget(nbytes=x) if isinstance(x, int) else sweep.Budget(ratio=x) for x in shares]
    heuristics = read("--heuristic", values.heuristics, HEURISTICS if heuristic is None else heuristic)
    deallocations = read("--deallocation", values.choices(*REPLAYS), deallocation)
    searches = read("--search", values.choices("heap", "scan"), search)
    parts = PAPER if paper else [(heuristics, deallocations, searches, accesses)]
    options = {
        "limit": read("--limit", values.slowdown, "2.0" if limit is None else limit),
        "paper_ties": paper_ties,
        "seed": read("--seed", values.whole_number(), seed),
        "semantics": read("--semantics", values.choice("paper", "dtrrun"), semantics),
    }
    names = read("--planners", values.choices(*PLANNERS), planners) if planners else []
    seconds = read("--planner-seconds", values.whole_number(least=1), planner_seconds)
    import_from_here(heuristics)
    with report_writer(json) as write:
        folder = _folder(figures)
        facts = read_logs(logs)
        cells = cells_of(facts, wanted, parts, options)
        count = len(cells)
        rows, done = run(sweep.run_cell, cells, processes, None if quiet else "simulating")
        plans: list[PlanRow] = []
        if done and names:
            wanted_plans = plan_cells(facts, names, wanted, seconds)
            plans, done = run(run_planner, wanted_plans, processes, None if quiet else "planning")
            count += len(wanted_plans)
        result = {
            "schema": SCHEMA,
            "settings": options,
            "logs": [asdict(log) for log in facts],
            "rows": [asdict(row) for row in rows],
            "plans": [asdict(row) for row in plans],
        }
        unwritten = write_each(
            {
                "standard output": lambda: shown(result, print_simulation, json, quiet),
                "--json": lambda: write(result),
            }
        )
    done_of_all = f"{len(rows) + len(plans)} of {count}"
    return ended(result, done, unwritten, done_of_all, draw, folder, format, quiet)


def _folder(path: str | None) -> Path | None:
    """Where the pictures go: found to be possible before the work, not after. Raises LaunchError."""
    if path is None:
        return None
    try:
        need_matplotlib()
        Path(path).mkdir(parents=True, exist_ok=True)
    except MissingMatplotlib as error:
        raise LaunchError(f"--figures: {error}") from None
    except FileExistsError:
        raise LaunchError(f"--figures: {path} is a file, not a folder") from None
    except OSError as error:
        raise LaunchError(f"--figures: {path}: {error.strerror}") from None
    return Path(path)
