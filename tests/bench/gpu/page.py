"""The results as tables: on the terminal, and as sections of docs/measurements.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dtrrun.sizes import format_size
from tests.bench.gpu.cases import BY_NAME, Case
from tests.bench.gpu.children import Run
from tests.bench.section import Section

AS_CHECKPOINTING = 1.05
"""Greatest time inside the peak of per-block checkpointing, as a ratio to the latter's time."""

COMMAND = "make bench-gpu"
TIME, BITS, BATCH = (
    "15. The paper's models on a GPU",
    "24. Equal bits on a GPU",
    "25. The largest batch in 12 GB",
)
PICTURE = "pictures/gpu.svg"

TIME_TEXT = """\
The table covers the models of the paper's Fig. 4 at the prototype's sizes, and GPT-2, with PyTorch's default
settings. The time is the median of a step (forward, backward and optimizer, between two synchronizations of
the device) after the warm-up. Each row is a separate process. Ratios are to the plain runs, of which one is
before and one after the others. "Prototype" is the ratio of the paper's prototype at that share, on its
machine. dtrrun's ratio should be no more.

The shares are those that the prototype's allocated peak reached. Its budget counted allocated bytes, and was
exceeded. dtrrun's budget is what the driver reports for the whole process: context, libraries, and everything
that the allocator has reserved. So the budget of a row is its share of the plain run's *allocated* peak, plus
the overhead that the driver reports beyond the plain run's reserved memory. The guard and fragmentation have
to fit in as well, so dtrrun allocates less than the share; the column says how much. "Driver" is the most
that NVML reported, in readings every 50 ms, and must be within the budget. "(device)" means the device as a
whole, because the process could not be told apart. Plain and checkpointed runs have no limit. If the
allocator then reserves more than it needs, that is not counted against them.

"Checkpointed" is `torch.utils.checkpoint` (not reentrant) around each block. "Same peak" is dtrrun with the
checkpointed run's allocated peak as its share, and should take at most 1.05 times as long as that run. All
times include the optimizer's step, while the prototype timed only forward and backward. The Transformer's
attention is written out, as PyTorch's was at the time. Plain peaks are below the prototype's where PyTorch
keeps less for the backward pass today (a ReLU's input, in ResNet-1202), and where the published cell needs
less than the prototype's (LSTM, TreeLSTM). In U-Net, the prototype exceeded its budgets by the most, so its
shares do not follow them."""

BITS_TEXT = """\
These runs use `torch.use_deterministic_algorithms(True)`, inside the least share of the plain peak (of the
same mode) that works. "Equal" means that the losses of all steps, and all parameters and buffers at the end,
have the same bits as those of the plain run. "Plain twice" says whether two plain runs have the same bits. If
they do not, the named operators have no deterministic kernel, and equality cannot be expected. "Verified" and
"differ" are the number of storages that `--verify` compared with what was evicted, and how many of them came
back with different bits."""

BATCH_TEXT = """\
The table shows the largest size at which five steps run while the driver reports at most the budget: without
dtrrun, with PyTorch's allocator limited to the budget minus the overhead (`set_per_process_memory_fraction`),
and under dtrrun. The size is found by bisection. Each trial is a separate process, and is never retried. ≥
means that there was no time to finish the search. The paper's figures are from a card with 12 GB (Table 1).
"ms" is the median of a step at that size."""


def sections(results: dict[str, dict[str, Any]]) -> list[Section]:
    """Return the sections for which there are results."""
    makers = {"time": times, "bits": bits, "batch": batches}
    found = []
    for kind, make in makers.items():
        of_kind = [result for result in _in_order(results) if result["kind"] == kind]
        if of_kind:
            found.append(make(of_kind))
    return found


def markdown(section: Section, results: dict[str, dict[str, Any]], picture: bool) -> str:
    kind = {TIME: "time", BITS: "bits", BATCH: "batch"}[section.title]
    of_kind = [result for result in _in_order(results) if result["kind"] == kind]
    text = section.table(f"`{COMMAND}` on {machines(of_kind)}.")
    return f"{text}\n![Time over memory]({PICTURE})\n" if kind == "time" and picture else text


def machines(results: Iterable[dict[str, Any]]) -> str:
    """Return the machines in one line, each with its parts if there are several."""
    found: dict[str, list[str]] = {}
    for result in results:
        found.setdefault(result.get("machine", "an unknown machine"), []).append(result["case"])
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{name} ({', '.join(cases)})" for name, cases in found.items())


def times(results: list[dict[str, Any]]) -> Section:
    headers = ["Model, run", "ms", "Ratio", "Prototype", "Allocated", "Reserved", "Driver", "Budget"]
    section = Section(TIME, TIME_TEXT, headers)
    for result in results:
        case = BY_NAME[result["case"]]
        plain = [run for run in result["plain"] if run.ok]
        if not plain:
            ended = result["plain"][0].said if result["plain"] else "no time for it"
            section.rows.append([f"**{case.title}**", ended, *[""] * 6])
            section.missed.append(f"{case.title}, plain: {ended}")
            continue
        before = (sum(run.ms for run in plain) / len(plain), result["peak"])
        theirs = ""
        if case.prototype:
            theirs = f"({case.prototype.plain_ms} ms, {case.prototype.plain_peak} GB)"
        row = _row(f"**{case.title}**", plain[0], *before)
        ms = ", ".join(f"{run.ms:.0f}" for run in plain)
        section.rows.append([row[0], ms, "1", theirs, *row[4:]])
        for one in result["shares"]:
            what = f"{one['share']:.2f} of the peak"
            ratio = case.prototype_ratio(one["share"])
            section.rows.append(_row(what, one["run"], *before, ratio))
            section.missed += _missed(f"{case.title}, {what}", one["run"], before[0], ratio)
        _checkpointing(section, case, result, before)
        section.missed += [f"{case.title}, {what}: left out for lack of time" for what in result["left_out"]]
    return section


def _checkpointing(section: Section, case: Case, result: dict[str, Any], before: tuple[float, int]) -> None:
    found, ours = result.get("checkpointed"), result.get("as_checkpointed")
    if found is not None:
        section.rows.append(_row(f"checkpointed by {case.blocks}", found, *before))
        if not found.ok:
            section.missed.append(f"{case.title}, checkpointed: {found.said}")
    if found is not None and ours is not None:
        section.rows.append(_row("same peak", ours, *before))
        section.missed += _missed(f"{case.title}, same peak", ours, before[0], None)
        if ours.ok and ours.ms / found.ms > AS_CHECKPOINTING:
            over = f"{ours.ms / found.ms:.2f} of its time, should be at most {AS_CHECKPOINTING}"
            section.missed.append(f"{case.title}, at the peak of checkpointing: {over}")


def _row(what: str, run: Run, plain_ms: float, plain_peak: int, prototype: float | None = None) -> list[str]:
    theirs = "" if prototype is None else f"{prototype:.2f}"
    if not run.ok:
        return [what, run.said, "–", theirs, "", "", "", _gb(run.capped)]
    allocated = "" if run.allocated is None else f"{_gb(run.allocated)} ({run.allocated / plain_peak:.2f})"
    driver = _gb(run.driver) + (" (device)" if run.driver_source == "device" else "")
    sizes = [allocated, _gb(run.reserved), driver, _gb(run.capped)]
    return [what, f"{run.ms:.0f}", f"{run.ms / plain_ms:.2f}", theirs, *sizes]


def _missed(what: str, run: Run, plain_ms: float, prototype: float | None) -> list[str]:
    if not run.ok:
        return [f"{what}: {run.said}"]
    missed = []
    if prototype is not None and round(run.ms / plain_ms, 2) > prototype:
        missed.append(f"{what}: {run.ms / plain_ms:.2f} of the plain time, the prototype's was {prototype}")
    shown = run.allocated if run.driver is None else run.driver
    if run.capped is not None and shown is not None and shown > run.capped:
        missed.append(f"{what}: {_gb(shown)} shown, the budget was {_gb(run.capped)}")
    return missed


def bits(results: list[dict[str, Any]]) -> Section:
    headers = [
        "Model",
        "Share",
        "Plain twice",
        "Losses",
        "Parameters",
        "Verified",
        "Differ",
        "Not deterministic",
    ]
    section = Section(BITS, BITS_TEXT, headers)
    for result in results:
        case = BY_NAME[result["case"]]
        plain = [run for run in result["plain"] if run.ok]
        tried = [one for one in result["tried"] if one["run"].ok]
        for one in result["tried"]:
            if not one["run"].ok:
                section.missed.append(f"{case.title}, {one['share']:.2f} of the peak: {one['run'].said}")
        if len(plain) < 2 or not tried:
            ended = next((run.said for run in result["plain"] if not run.ok), "not measured")
            section.rows.append([case.title, ended, *[""] * 6])
            section.missed.append(f"{case.title}: {ended}")
            continue
        run, twice = tried[0]["run"], _same(*plain)
        losses, parameters = run.losses == plain[0].losses, run.parameters == plain[0].parameters
        checked, verified = result.get("verified"), {}
        if checked is not None and checked.ok:
            verified = checked.report.get("verify", {})
        lacking = sorted({name for one in (*plain, run) for name in one.no_deterministic_kernel})
        section.rows.append(
            [
                case.title,
                f"{tried[0]['share']:.2f}",
                "equal" if twice else "differ",
                "equal" if losses else "differ",
                "equal" if parameters else "differ",
                str(verified.get("storages", "–")),
                str(verified.get("mismatches", "–")),
                ", ".join(lacking) or "–",
            ]
        )
        if not all(abs(float.fromhex(loss)) < float("inf") for loss in plain[0].losses):
            section.missed.append(f"{case.title}: the losses are not finite, their equality says nothing")
        if not (losses and parameters):
            section.missed.append(f"{case.title}: other bits" + ("" if twice else ", in plain runs too"))
        if not run.report.get("evictions"):
            section.missed.append(f"{case.title}: nothing was evicted")
        if verified.get("mismatches", 1):
            named = ", ".join(str(one.get("operator")) for one in verified.get("operators", ()))
            section.missed.append(f"{case.title}: --verify: {named or 'did not end well'}")
    return section


def _same(first: Run, second: Run) -> bool:
    return first.losses == second.losses and first.parameters == second.parameters


def batches(results: list[dict[str, Any]]) -> Section:
    headers = ["Model", "Size", "Plain", "ms", "dtrrun", "ms", "Driver", "Times", "The paper's"]
    section = Section(BATCH, BATCH_TEXT, headers)
    for result in results:
        case = BY_NAME[result["case"]]
        search = case.largest
        assert search is not None
        plain, plain_run = _best(result, "plain")
        ours, our_run = _best(result, "dtrrun")
        row = [case.title.partition(" (")[0], search.parameter.replace("_size", "")]
        least = {kind: "≥ " if kind in result.get("incomplete", ()) else "" for kind in ("plain", "dtrrun")}
        row += [least["plain"] + _or_dash(plain), f"{plain_run.ms:.0f}" if plain_run else "–"]
        row += [least["dtrrun"] + _or_dash(ours), f"{our_run.ms:.0f}" if our_run else "–"]
        row += [_gb(our_run.driver) if our_run else ""]
        row += [f"{ours / plain:.2f}" if plain and ours else "–"]
        row += [f"{search.paper_plain} to {search.paper_dtr} ({search.paper_ms} ms)"]
        section.rows.append(row)
        if not ours or not plain or ours <= plain:
            section.missed.append(f"{case.title}: no larger than plain")
        shown = our_run.driver if our_run else None
        if shown is not None and shown > result["budget"]:
            section.missed.append(f"{case.title}: {_gb(shown)} shown, the budget was {_gb(result['budget'])}")
    return section


def _best(result: dict[str, Any], kind: str) -> tuple[int | None, Run | None]:
    size = result.get(f"{kind}_largest")
    runs = [one["run"] for one in result[kind] if one["size"] == size and one["run"].ok]
    return size, runs[-1] if runs else None


def _in_order(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [result for name in BY_NAME for result in results.values() if result["case"] == name]


def _gb(size: int | None) -> str:
    return "" if size is None else format_size(size)


def _or_dash(size: int | None) -> str:
    return "–" if size is None else str(size)
