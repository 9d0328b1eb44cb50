"""Memory really goes back to the machine: the resident set follows the budget."""

from tests.bench.runs import TINY, inside_once, plain_once, share
from tests.bench.section import Section

SHARES = (70, 50, 40)
TOLERANCE = 0.15
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Makes glibc give back each freed block of 128 KiB or more; by default it moves that limit upwards."""

TEXT = f"""\
The peak of the resident set (`VmHWM`) above that of the same script on a tiny batch, in MB. "As is" is what
the machine sees by default: the allocator of the C library keeps pieces that were freed, plainly as well as
inside a budget. With `MALLOC_MMAP_THRESHOLD_={AT_ONCE["MALLOC_MMAP_THRESHOLD_"]}` it gives them back at once
(and costs time: each block is mapped afresh); then the resident set must fall with the budget. It counts as
missed if its share of the plain figure is more than {TOLERANCE * 100:.0f} points over the budget's share of
the peak; scratch memory inside operators is no tensor's."""


def above(runs: list, base: int) -> list[float | None]:
    """Peaks above the tiny batch's in MB, None for a run that did not end well."""
    return [(run.capture["resident_peak_bytes"] - base) / 1e6 if run.capture else None for run in runs]


def cell(megabytes: float | None, whole: float) -> str:
    return "infeasible" if megabytes is None else f"{megabytes:.0f} ({megabytes / whole:.0%})"


def measure(quick: bool) -> Section:
    shares = (50,) if quick else SHARES
    arguments = ["--steps", "4"]
    headers = ["Example", "Plain, as is", "50 %, as is", "Plain", *map("{} %".format, shares)]
    section = Section("2. Resident set", TEXT, headers)
    for example, tiny in TINY.items():
        peak = inside_once(None, example, *arguments).report["peak_bytes"]
        row = [example]
        for variables, percents in (({}, (50,)), (AT_ONCE, shares)):
            base = plain_once(example, *tiny, "--steps", "3", **variables).capture["resident_peak_bytes"]
            runs = [plain_once(example, *arguments, **variables)]
            for percent in percents:
                runs.append(inside_once(share(percent, peak), example, *arguments, **variables))
            whole, *parts = above(runs, base)
            row += [f"{whole:.0f}", *(cell(part, whole) for part in parts)]
        section.rows.append(row)
        for percent, part in zip(shares, parts, strict=True):
            if part is not None and part / whole > percent / 100 + TOLERANCE:
                section.missed.append(f"{example} at {percent} %: {part / whole:.0%} of the plain figure")
    return section
