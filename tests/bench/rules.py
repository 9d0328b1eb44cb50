"""Our rules compared with the paper's: overhead at each budget of a log."""

from functools import partial
from typing import Any

from dtrrun.simulator.portfolio import find
from dtrrun.simulator.replay import ReplayOutcome, simulate
from dtrrun.simulator.schedule import Schedule
from tests.bench.section import Section

PAPER = ("h_dtr", "h_dtr_eq", "msps")
BUDGETS = tuple(tenths / 10 for tenths in range(10, 0, -1))
WITHIN = 0.01

TEXT = f"""\
The table shows the overhead in the simulator (the paper's semantics). "Paper" is the best of
{", ".join(PAPER)} at that budget. `h_chain` and `h_next` are heuristics of dtrrun: `h_chain` does not know
the step, and `h_next` knows the step before. The portfolio tries heuristics on the recorded step and keeps
the best, in the seconds shown in the last column. `h_chain` should be within 1% of the paper's best at every
budget from 0.2 on, and should work wherever one of those does. The portfolio should be no worse than any
heuristic. – : no heuristic of that kind survives."""


def rules(logs: dict[str, Schedule], expected: dict[str, Any]) -> Section:
    headers = ["Log, budget", "Paper", "h_chain", "h_next", "Portfolio", "Its seconds"]
    section = Section("13. dtrrun's own heuristics in the simulator", TEXT, headers)
    for name, schedule in logs.items():
        for ratio in BUDGETS:
            nbytes = int(schedule.peak_bytes * ratio)
            theirs = [simulate(schedule, nbytes, heuristic) for heuristic in PAPER]
            paper = min((one.overhead for one in theirs if one.status == "ok"), default=None)
            chain, following = (simulate(schedule, nbytes, rule) for rule in ("h_chain", "h_next"))
            found = find(partial(simulate, schedule, nbytes)).outcome
            where = f"{name}, {ratio}"
            section.rows.append(
                [where, _share(paper), *map(_overhead, (chain, following, found)), f"{found.seconds:.1f}"]
            )
            if paper is None:
                continue
            if ratio >= 0.2 and (chain.status != "ok" or chain.overhead > paper * (1 + WITHIN)):
                section.missed.append(f"{where}: h_chain {_overhead(chain)}, the paper's {paper:.4f}")
            if found.status != "ok" or found.overhead > paper:
                section.missed.append(f"{where}: portfolio {_overhead(found)}, the paper's {paper:.4f}")
    return section


def _overhead(outcome: ReplayOutcome) -> str:
    return _share(outcome.overhead if outcome.status == "ok" else None)


def _share(overhead: float | None) -> str:
    return "–" if overhead is None else f"{overhead:.4f}"
