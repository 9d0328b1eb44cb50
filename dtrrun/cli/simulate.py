"""The verb `simulate`: recorded operator logs under budgets, by heuristic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dtrrun import values
from dtrrun.cli.profiles import Given
from dtrrun.cli.report_file import report_writer
from dtrrun.cli.sweeping import cells_of, ended, import_from_here, print_and_write, processors, read_logs, run
from dtrrun.cli.theory import read_theory, simulate_theory
from dtrrun.core.heuristics import ABLATION_NAMES
from dtrrun.launch.errors import LaunchError
from dtrrun.research.figures import FORMATS, MissingMatplotlib, draw, need_matplotlib
from dtrrun.research.planned import NAMES as PLANNERS
from dtrrun.research.planned import PlanRow, plan_cells, run_planner
from dtrrun.research.theory import THEORIES
from dtrrun.settings import OUTPUT, option
from dtrrun.simulator import sweep
from dtrrun.simulator.replay import DEALLOCATIONS
from dtrrun.sizes import parse_size
from dtrrun.values import Reader
from dtrrun.views.simulation import print_simulation

_VARIANTS = ("h_dtr", "h_dtr_eq", "h_dtr_local")
PAPER: Sequence[tuple[Sequence[str], Sequence[str], Sequence[str], bool]] = (
    (_VARIANTS, ("eager",), ("heap", "scan"), True),  # App. D.3
    (values.PAPER, ("eager",), ("heap",), False),  # Fig. 2
    (ABLATION_NAMES, ("eager",), ("heap",), False),  # App. D.1
    (("h_dtr",), DEALLOCATIONS, ("heap",), False),  # App. D.2
)
"""The paper's evaluation: heuristics, deallocations, searches, and whether accesses are counted."""

HEURISTICS = "h_dtr,h_dtr_eq,h_dtr_local,lru,size"

SCHEMA = "dtrrun.simulation/1"

USAGE = "simulate [OPTIONS]"
EPILOG = """
[bold]Examples[/bold]

dtrrun simulate step.log

dtrrun simulate logs/ --heuristic h_dtr_eq,lru --budgets 0.5,0.4,2GB --json rows.json

dtrrun simulate step.log --budgets 0.5,0.2 --host-budget 8GB --host-bandwidth 25GB/s

dtrrun simulate logs/ --paper --figures pictures/

dtrrun simulate --theory linear --figures pictures/

[bold]Exit status[/bold]: 0, all was simulated, whatever came of it; 2, usage error or a log that cannot be
read; 125, dtrrun failed, or a result could not be written; 130 after Ctrl-C, with the rows that were done.
"""

WHAT, HOW = "What to simulate", "How"


@dataclass(frozen=True)
class Simulate:
    """The options of `dtrrun simulate`.

    The meaning of `heuristic`, `budgets` and `sizes` depends on `theory`.
    """

    logs: Sequence[str] | None = option(
        "Operator logs, or folders of them.", read=values.anything, word="LOG...", argument=True
    )
    heuristic: str | None = option(
        "Heuristics as for a run; paper: those of the paper's Fig. 2; ablations: those of App. D; "
        "h_next: knows the step before; portfolio: tries many and keeps the best at each budget. "
        f"Default: {HEURISTICS}.",
        WHAT,
        read=values.anything,
        word="NAME[,NAME...]",
    )
    budgets: str | None = option(
        "Budgets: shares of the log's own peak (0.5, 50%) or sizes (2GB).",
        WHAT,
        read=values.anything,
        word="B[,B...]",
    )
    theory: str | None = option(
        "Check the paper's theorems instead of logs: count operations on the linear network of App. A, "
        "or on the graph that the adversary of App. B builds for each heuristic. Budgets are then "
        "numbers of tensors.",
        WHAT,
        read=values.choice(*THEORIES),
    )
    sizes: str | None = option(
        "With --theory: the number of layers or nodes of the network.",
        WHAT,
        read=values.anything,
        word="N[,N...]",
    )
    deallocation: Sequence[str] = option(
        "What to do when the program releases a storage: " + ", ".join(DEALLOCATIONS) + ".",
        WHAT,
        ("eager",),
        read=values.choices(*DEALLOCATIONS),
    )
    semantics: Literal["paper", "dtrrun"] = option(
        "Which runtime to simulate: that of the paper's App. C, or dtrrun's own, which needs a log of dtrrun "
        "record.",
        HOW,
        "paper",
    )
    host_budget: int | None = option(
        "How much may be copied to the host, as for a run: weights, gradients and optimizer state once "
        "nothing else can be evicted, and what takes longer to recompute. Implies --semantics dtrrun.",
        HOW,
        read=Reader("SIZE", parse_size),
    )
    host_bandwidth: int | None = option(
        "With --host-budget: how much is copied to the host in a second, or back, such as 25GB/s (default: "
        "20GB/s for a log of a GPU; for one of a CPU, 1GB/s to a file and 2GB/s back).",
        HOW,
        read=values.bandwidth,
    )
    search: Sequence[str] = option(
        "How to find the least score: scan computes all scores, as the paper does, which is slow; heap "
        "makes the same choices faster.",
        HOW,
        ("heap",),
        read=values.choices("heap", "scan"),
        word="heap|scan[,...]",
    )
    accesses: bool = option("Count storage accesses, as in the paper's App. D.3.", HOW, False)
    planners: Sequence[str] | None = option(
        f"Static planners to compare with, which know the whole log: {', '.join(PLANNERS)}.",
        WHAT,
        read=values.choices(*PLANNERS),
    )
    planner_seconds: int = option("Seconds that a planner's solver may take for one plan.", HOW, 60)
    paper: bool = option(
        "Run the paper's whole evaluation instead of the options above: its heuristics, ablations, "
        "deallocations and accesses (slow).",
        WHAT,
        False,
    )
    limit: float | None = option(
        "Treat a run as thrashing when it takes more than X times as long as the plain run (default: 2).",
        HOW,
        read=values.slowdown,
    )
    paper_ties: bool = option("Among equal scores, choose as the authors' simulator does.", HOW, True)
    seed: int = option("Seed of the random heuristic.", HOW, 0, read=values.whole_number())
    jobs: int | None = option("Number of processes (default: the number of processors).", HOW)
    json: str | None = option(
        "Write the rows as JSON; - is standard output (the tables then go to standard error).", OUTPUT
    )
    figures: str | None = option(
        "Draw the paper's figures of the results into this folder (needs matplotlib).", OUTPUT, word="FOLDER"
    )
    format: str = option("Format of the figures.", OUTPUT, "svg", read=values.choice(*FORMATS))
    quiet: bool = option("Print no tables and no progress.", OUTPUT, False)


def simulate(given: Simulate, _: Sequence[str]) -> int:
    """Replay recorded operator logs inside memory budgets, as the paper's simulator does.

    A LOG is in the format of the paper's App. C.6, as dtrrun record writes it; of a folder, all *.log and
    *.log.gz files are read. For each heuristic and budget the table shows how much longer the operators take
    than without a budget, oom if nothing was left to evict, or thrash.
    """
    json, quiet = given.json, given.quiet
    processes = given.jobs or processors()
    if given.theory is not None:
        others = {
            "a LOG": given.logs,
            "--planners": given.planners,
            "--paper": given.paper,
            "--accesses": given.accesses,
            "--deallocation": list(given.deallocation) != ["eager"],
            "--semantics": given.semantics != "paper",
            "--host-budget": given.host_budget,
            "--host-bandwidth": given.host_bandwidth,
            "--search": list(given.search) != ["heap"],
            "--no-paper-ties": not given.paper_ties,
        }
        if found := [name for name, wanted in others.items() if wanted]:
            raise LaunchError(f"--theory runs its own networks, so it cannot be combined with {found[0]}")
        networks = read_theory(given.theory, given)
        return simulate_theory(networks, processes, _folder(given.figures), given)
    if given.sizes is not None:
        raise LaunchError("--sizes needs --theory")
    if given.host_bandwidth and not given.host_budget:
        raise LaunchError("--host-bandwidth needs --host-budget")
    if given.host_budget and given.paper:
        raise LaunchError("--paper is about the paper's runtime, so it cannot be combined with --host-budget")
    if not given.logs:
        raise LaunchError("Missing argument 'LOG...' (or --theory; see dtrrun simulate --help)")
    shares = sweep.RATIOS
    if given.budgets is not None:
        shares = Given(given.budgets, "--budgets").read(values.budgets)
    wanted = [sweep.Budget(nbytes=x) if isinstance(x, int) else sweep.Budget(ratio=x) for x in shares]
    text = HEURISTICS if given.heuristic is None else given.heuristic
    heuristics = Given(text, "--heuristic").read(values.heuristics)
    parts = PAPER if given.paper else [(heuristics, given.deallocation, given.search, given.accesses)]
    options = {
        "limit": given.limit or 2.0,
        "paper_ties": given.paper_ties,
        "seed": given.seed,
        "semantics": "dtrrun" if given.host_budget else given.semantics,
        "host_bytes": given.host_budget,
        "host_bandwidth": given.host_bandwidth,
    }
    import_from_here(heuristics)
    with report_writer(json) as write:
        folder = _folder(given.figures)
        facts = read_logs(given.logs)
        cells = cells_of(facts, wanted, parts, options)
        count = len(cells)
        rows, done = run(sweep.run_cell, cells, processes, None if quiet else "simulating")
        plans: list[PlanRow] = []
        if done and given.planners:
            wanted_plans = plan_cells(facts, given.planners, wanted, given.planner_seconds)
            plans, done = run(run_planner, wanted_plans, processes, None if quiet else "planning")
            count += len(wanted_plans)
        result = {
            "schema": SCHEMA,
            "settings": options,
            "logs": [asdict(log) for log in facts],
            "rows": [asdict(row) for row in rows],
            "plans": [asdict(row) for row in plans],
        }
        unwritten = print_and_write(result, print_simulation, json, quiet, write)
    done_of_all = f"{len(rows) + len(plans)} of {count}"
    return ended(result, done, unwritten, done_of_all, draw, folder, given.format, quiet)


def _folder(path: str | None) -> Path | None:
    """Create the folder for the pictures before the work begins. Raises LaunchError."""
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
