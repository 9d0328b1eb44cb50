"""The parts of the bench, each a set of runs of one model, to be measured in one go.

A part is a function of a case, a setting, its time limit and a callback for partial results; a result is a
dictionary for JSON. `NAME` has times, `NAME-bits` the equality of bits, `NAME-batch` the largest batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dtrrun.sizes import format_size
from tests.bench.gpu.cases import CASES, Case
from tests.bench.gpu.children import Run, Setting, run

PATIENCE = 240.0
"""Seconds that one run may take, if its part has that much left."""
LEAST = 15.0
"""Seconds; with less left, no run is started."""

BUDGET = 12_000_000_000
"""Bytes, for the largest batch: the paper's card had 12 GB."""

Result = dict[str, Any]
Keep = Callable[[Result], None]
Say = Callable[[str], None]


class Clock:
    """A part's time limit, in seconds."""

    def __init__(self, seconds: float) -> None:
        self.ends = time.monotonic() + seconds

    def patience(self) -> float:
        return min(PATIENCE, self.ends - time.monotonic())

    @property
    def over(self) -> bool:
        return self.patience() < LEAST


def names() -> list[str]:
    """Return the names of all parts, in the order in which they run."""
    batch = [f"{case.name}-batch" for case in CASES if case.largest]
    return [case.name for case in CASES] + [f"{case.name}-bits" for case in CASES] + batch


def measure_time(case: Case, setting: Setting, clock: Clock, keep: Keep, say: Say) -> Result:
    """Plain, dtrrun at each share of its peak, checkpointed by block, dtrrun at that peak, plain again."""
    result: Result = {"case": case.name, "kind": "time", "shares": [], "plain": [], "left_out": []}

    def child(what: str, **options: Any) -> Run | None:
        if clock.over:
            result["left_out"].append(what)
            say(f"{what}: left out, no time left")
            keep(result)
            return None
        found = run(setting, case.name, clock.patience(), **options)
        say(f"{what}: {_figures(found)}")
        return found

    plain = child("plain")
    if plain is None or not plain.ok:
        result["plain"] += [plain] if plain else []
        keep(result)
        return result
    result["plain"].append(plain)
    peak, overhead = _peak(setting, case, clock, plain), plain.overhead or 0
    result |= {"peak": peak, "overhead": overhead}
    keep(result)
    for share in case.shares:
        found = child(f"{share:.2f} of the peak", budget=int(share * peak) + overhead)
        if found is not None:
            result["shares"].append({"share": share, "run": found})
            keep(result)
    if case.blocks:
        found = child(f"checkpointed by {case.blocks}", checkpoint=True)
        if found is not None:
            result["checkpointed"] = found
            keep(result)
        if found is not None and found.ok:
            same = _peak(setting, case, clock, found, checkpoint=True)
            found.allocated = same
            ours = child("at the same peak", budget=same + overhead)
            if ours is not None:
                result["as_checkpointed"] = ours
                keep(result)
    again = child("plain again")
    if again is not None and again.ok:
        result["plain"].append(again)
    keep(result)
    return result


def measure_bits(case: Case, setting: Setting, clock: Clock, keep: Keep, say: Say) -> Result:
    """With deterministic algorithms: plain twice, dtrrun at the least share that works, and `--verify`."""
    result: Result = {"case": case.name, "kind": "bits", "plain": [], "tried": []}
    steps = {"deterministic": True, "steps": 2}
    short = Setting(setting.on, setting.tiny, 2, 2, setting.device)
    for _ in range(2):
        if clock.over:
            return result
        result["plain"].append(run(short, case.name, clock.patience(), **steps))
        say(f"plain, deterministic: {_figures(result['plain'][-1])}")
        keep(result)
    plain = result["plain"][0]
    if not plain.ok:
        return result
    peak = _peak(setting, case, clock, plain, **steps)
    for share in reversed(case.shares):
        if clock.over:
            return result
        budget = int(share * peak) + (plain.overhead or 0)
        found = run(short, case.name, clock.patience(), budget=budget, **steps)
        say(f"{share:.2f} of the peak, deterministic: {_figures(found)}")
        result["tried"].append({"share": share, "run": found})
        keep(result)
        if found.ok and not clock.over:
            once = Setting(setting.on, setting.tiny, 1, 1, setting.device)
            deterministic = {"deterministic": True, "steps": 1}
            verified = run(once, case.name, clock.patience(), budget=budget, verify=True, **deterministic)
            say(f"{share:.2f} of the peak, --verify: {_figures(verified)}")
            result["verified"] = verified
            keep(result)
        if found.ok:
            break
    return result


def measure_batch(
    case: Case, setting: Setting, clock: Clock, keep: Keep, say: Say, budget: int = BUDGET
) -> Result:
    """Find the largest size inside `budget` by the driver's figure: plainly, and under dtrrun."""
    search = case.largest
    assert search is not None
    result: Result = {"case": case.name, "kind": "batch", "budget": budget, "plain": [], "dtrrun": []}
    result["incomplete"] = []
    short = Setting(setting.on, setting.tiny, 2, 3, setting.device)
    sizes = range(search.unit, 16 * search.paper_dtr + 1, search.unit)
    if search.parameter == "depth":
        sizes = range(1, 16)
    least = run(short, case.name, clock.patience(), size=search.size | {search.parameter: sizes[0]})
    result["overhead"] = least.overhead or 0
    say(f"{search.parameter} {sizes[0]}, to see the overhead: {_figures(least)}")
    for kind, first in (("plain", search.paper_plain), ("dtrrun", search.paper_dtr)):

        def fits(size: int, kind: str = kind) -> bool | None:
            if clock.over:
                result["incomplete"].append(kind)
                say(f"{kind}: no time left")
                return None
            options: dict[str, Any] = {"size": search.size | {search.parameter: size}}
            if kind == "dtrrun":
                options["budget"] = budget
            elif setting.on == "cuda":
                options["cap"] = budget - result["overhead"]
            else:  # nothing limits a plain run on the CPU: its peak is counted
                options["counted"] = True
            found = run(short, case.name, min(90.0, clock.patience()), **options)
            say(f"{kind}, {search.parameter} {size}: {_figures(found)}")
            result[kind].append({"size": size, "run": found})
            keep(result)
            return found.ok and (kind == "dtrrun" or (found.driver or found.allocated or 0) <= budget)

        result[f"{kind}_largest"] = largest(sizes, first, fits)
        keep(result)
    return result


def largest(sizes: Sequence[int], first: int, fits: Callable[[int], bool | None]) -> int | None:
    """Return the largest of the ordered `sizes` that fits, if fitting is monotonic; None: not even the least.

    Search from `first` in doubling strides until one fits and one does not, then by bisection. If `fits`
    stops answering (None), return the largest known to fit.
    """
    low, high = -1, len(sizes)
    place = max((i for i, size in enumerate(sizes) if size <= first), default=0)
    stride = max(1, place // 4)
    while high - low > 1:
        answer = fits(sizes[place])
        if answer is None:
            break
        low, high = (place, high) if answer else (low, place)
        if high < len(sizes) and low >= 0:
            place = (low + high) // 2
        else:
            place = min(low + stride, len(sizes) - 1) if low >= 0 else max(high - stride, 0)
            stride *= 2
    return sizes[low] if low >= 0 else None


MEASURES = {"time": measure_time, "bits": measure_bits, "batch": measure_batch}


def _peak(setting: Setting, case: Case, clock: Clock, found: Run, **options: Any) -> int:
    """Return the peak bytes of tensors, by PyTorch's allocator, or on the CPU as dtrrun counts them."""
    if found.allocated is None:
        counted = run(setting, case.name, clock.patience(), counted=True, **options)
        if not counted.ok:
            raise RuntimeError(f"{case.name} without a budget: {counted.said}")
        found.allocated = counted.allocated
    assert found.allocated is not None
    return found.allocated


def _figures(found: Run) -> str:
    """Return a run in a few words, for the progress on the terminal."""
    if not found.ok:
        return f"{found.said} after {found.seconds:.0f} s"
    sizes = {"allocated": found.allocated, "reserved": found.reserved, "driver": found.driver}
    shown = [f"{name} {format_size(size)}" for name, size in sizes.items() if size is not None]
    shown += [f"{found.flushes} flushes of the cache"] if found.flushes else []
    return ", ".join([f"{found.ms:.0f} ms a step", *shown, f"{found.seconds:.0f} s in all"])
