"""Sweeps: every combination of logs, heuristics and budgets, in parallel processes.

A budget that is too small, or at which a heuristic thrashes, does not end a sweep: a lower one may work,
because which storages are evicted depends on the budget, so feasibility is not monotonic.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from dtrrun.core.foresight import WatchedStep
from dtrrun.core.host import HostMemory, expected_host

from . import PORTFOLIO
from .live import device_of, predict, watched_steps
from .log import Instruction, LogError, read_log
from .portfolio import Replayer, find
from .replay import simulate
from .schedule import read_schedule

C = TypeVar("C")
R = TypeVar("R")

RATIOS = tuple(tenths / 10 for tenths in range(10, 0, -1))
"""The budgets of the paper's Fig. 2: 1.0 to 0.1 of the log's own peak."""


@dataclass(frozen=True)
class Budget:
    """A fraction of the log's peak, or bytes."""

    ratio: float | None = None
    nbytes: int | None = None

    def of(self, peak_bytes: int) -> tuple[float, int]:
        """Return it as a fraction of `peak_bytes`, and in bytes."""
        if self.nbytes is not None:
            return (self.nbytes / peak_bytes if peak_bytes else 1.0), self.nbytes
        assert self.ratio is not None
        return self.ratio, int(peak_bytes * self.ratio)


@dataclass(frozen=True)
class Cell:
    """One replay of a sweep. `log`: the log's name in results."""

    path: str
    log: str
    heuristic: str
    budget: Budget
    deallocation: str = "eager"
    search: str = "heap"
    """Either heap or scan; scan computes every score each time, and makes the same choices."""
    limit: float = 2.0
    paper_ties: bool = True
    seed: int = 0
    count: bool = False
    """Whether to count storage accesses (App. D.3)."""
    semantics: str = "paper"
    """Either paper, or dtrrun for the behaviour of dtrrun's own runtime (logs of `dtrrun record` only)."""
    host_bytes: int | None = None
    """With dtrrun's semantics: what copies may take on the host; None: nothing leaves."""
    host_bandwidth: int | None = None
    """Bytes copied there in a second, or back; None: what a session assumes until it has measured it."""


@dataclass(frozen=True)
class Row:
    """The result of a cell. overhead: total time over plain time, None unless the status is ok.

    seconds: duration of the replay.
    """

    log: str
    heuristic: str
    deallocation: str
    search: str
    semantics: str
    budget_ratio: float
    budget_bytes: int
    status: str
    overhead: float | None
    evictions: int
    rematerializations: int
    evaluations: int
    peak_bytes: int
    accesses: int | None
    seconds: float
    settings: str
    """The heuristic; for the portfolio, the best one found."""
    copies_out: int = 0
    copies_in: int = 0
    host_peak_bytes: int = 0


OF_OUTCOME = (
    *("status", "evictions", "rematerializations", "evaluations", "peak_bytes", "accesses", "seconds"),
    *("copies_out", "copies_in", "host_peak_bytes"),
)
"""Fields of a row that are those of its replay."""


@dataclass(frozen=True)
class Facts:
    """A log's own figures: its needs without a budget, and the least possible budget (Sec. 4.2)."""

    log: str
    path: str
    operators: int
    storages: int
    plain_seconds: float
    peak_bytes: int
    constant_bytes: int
    largest_bytes: int


schedule_at, log_at = lru_cache(maxsize=4)(read_schedule), lru_cache(maxsize=4)(read_log)
"""A sweep replays each log many times: with the paper's semantics, and as dtrrun's own runtime."""


@lru_cache(maxsize=4)
def steps_at(path: str) -> Sequence[WatchedStep]:
    """Return the steps of that file, for heuristics with foresight. Cached: a portfolio tries many."""
    return watched_steps(log_at(path), path)


def read_facts(paths: Sequence[str]) -> list[Facts]:
    """Return the figures of each log.

    Logs with equal names are called by their paths. Raises LogError, OSError.
    """
    names = [log_name(path) for path in paths]
    found = []
    for path, name in zip(paths, names, strict=True):
        schedule = schedule_at(path)
        operators = sum(bool(operator.inputs or operator.cost) for operator in schedule.operators)
        if not operators:
            raise LogError(f"{path}: the log has no operator")
        found.append(
            Facts(
                name if names.count(name) == 1 else path,
                path,
                operators,
                len(schedule.nbytes),
                schedule.cost / 1e9,
                schedule.peak_bytes,
                schedule.constant_bytes,
                schedule.largest_bytes,
            )
        )
    return found


def log_name(path: str) -> str:
    """Return a log's name in results: `lstm` for `folder/lstm.log.gz`."""
    return Path(path).name.removesuffix(".gz").removesuffix(".log")


def cells(
    logs: Sequence[Facts],
    heuristics: Sequence[str],
    budgets: Sequence[Budget],
    deallocations: Sequence[str] = ("eager",),
    searches: Sequence[str] = ("heap",),
    **options: Any,
) -> list[Cell]:
    """Return every combination, log by log. options: those of `Cell`."""
    return [
        Cell(log.path, log.log, heuristic, budget, deallocation, search, **options)
        for log, heuristic, deallocation, search, budget in product(
            logs, heuristics, deallocations, searches, budgets
        )
    ]


def run_cell(cell: Cell) -> Row:
    """Run one cell. Raises LogError, OSError, and ValueError for an unknown heuristic or deallocation."""
    peak_bytes = peak_of(cell.path, cell.semantics)
    ratio, nbytes = cell.budget.of(peak_bytes)
    settings = cell.heuristic
    replay = _replayer(cell, nbytes)
    if cell.heuristic == PORTFOLIO:
        found = find(replay, limit=cell.limit)
        settings, outcome = found.heuristic, found.outcome
    else:
        outcome = replay(cell.heuristic, limit=cell.limit)
    return Row(
        **{name: getattr(cell, name) for name in ("log", "heuristic", "deallocation", "search", "semantics")},
        budget_ratio=ratio,
        budget_bytes=nbytes,
        overhead=outcome.overhead if outcome.status == "ok" else None,
        settings=settings,
        **{name: getattr(outcome, name) for name in OF_OUTCOME},
    )


@lru_cache(maxsize=16)
def peak_of(path: str, semantics: str) -> int:
    """Return the peak bytes without a budget; budgets may be fractions of it."""
    if semantics == "dtrrun":
        return predict(log_at(path), None, name=path).peak_bytes
    return schedule_at(path).peak_bytes


def _replayer(cell: Cell, nbytes: int) -> Replayer:
    if cell.semantics == "dtrrun":
        if (cell.deallocation, cell.search, cell.count) != ("eager", "heap", False):
            raise ValueError("--semantics dtrrun works only with eager deallocation and the heap search")
        steps, log = partial(steps_at, cell.path), log_at(cell.path)
        return partial(
            predict, log, nbytes, host=_host(cell, log), watched=steps, name=cell.path, seed=cell.seed
        )
    return partial(
        simulate,
        schedule_at(cell.path),
        nbytes,
        deallocation=cell.deallocation,
        paper_ties=cell.paper_ties,
        scan=cell.search == "scan",
        seed=cell.seed,
        count=cell.count and cell.heuristic != PORTFOLIO,
    )


def _host(cell: Cell, log: Sequence[Instruction]) -> HostMemory | None:
    if cell.host_bytes is None:
        return None
    if cell.host_bandwidth is None:
        return expected_host(cell.host_bytes, device_of(log, cell.path))
    ns = 1e9 / cell.host_bandwidth  # for each byte
    return HostMemory(cell.host_bytes, ns, ns)


def run_all(run: Callable[[C], R], wanted: Sequence[C], jobs: int) -> Generator[tuple[int, R], None, None]:
    """Yield the results of `run` with their indices as they complete: in order if `jobs` is 1.

    Closing the generator cancels the remaining work.
    """
    if jobs <= 1 or len(wanted) <= 1:
        for index, cell in enumerate(wanted):
            yield index, run(cell)
        return
    # Fresh interpreters, since a fork would copy locks held by threads, for instance a progress bar's.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(min(jobs, len(wanted)), context, _quiet) as executor:
        try:
            indices = {executor.submit(run, cell): index for index, cell in enumerate(wanted)}
            for future in as_completed(indices):
                yield indices[future], future.result()
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            ours = set(multiprocessing.active_children()) - others
            for process in ours:
                process.terminate()
            for process in ours:
                process.join()
            raise


def _quiet() -> None:
    """In a worker: ignore Ctrl-C, which the terminal sends to all processes; the parent handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
