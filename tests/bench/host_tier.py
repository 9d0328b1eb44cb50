"""A host tier beside recomputation: how much faster that is, and in how much less it works."""

import tempfile

from tests.bench.runs import TINY, Run, difference, inside, inside_once, plain_once, share
from tests.bench.section import Section

TITLE = "29. With a file"
EXAMPLES = ("transformer", "unet", "vae", "unrolled_gan", "treelstm", "lstm", "resnet", "densenet", "amp")
QUICK = ("transformer", "vae")
SHARES = (70, 50, 40, 30)
STEP = 5
"""Percent of the plain peak between budgets that are tried."""
STOP = {"DTRRUN_MAX_SLOWDOWN": "20", "DTRRUN_ON_THRASH": "stop"}
ARGUMENTS = ("--steps", "6")
WORSE = 1.05

TEXT = f"""\
Each cell of a share of the plain peak has the time of a step in multiples of a plain run's: by recomputation
alone (`--host-budget none`), and where 8 GB may leave for a file on this machine's disk, which the system's
cache mostly absorbs. `–`: the budget is too small, or a step would take more than 20 times its own work. A
time is the least of a run's last four steps, since other programs ran on this machine meanwhile; one run
each. *Least*: the least budget that works, to within {STEP} % of the peak, without and with the file, and the
time of a step there with it. *Resident*: the peak of the resident set above that of the same script on a tiny
batch, plainly and in that least budget; it is below where weights and state have left, too. A different bit,
or a step that takes more than {WORSE} times as long only because of the file, counts as missed."""


def measure(quick: bool) -> Section:
    headers = ["Example", "Plain peak", *(f"{percent} %" for percent in SHARES), "Least", "Resident"]
    section = Section(TITLE, TEXT, headers)
    for example in QUICK if quick else EXAMPLES:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            section.rows.append(row(example, f"8GB:{folder}", section.missed))
    return section


def row(example: str, file: str, missed: list[str]) -> list[str]:
    plain = plain_once(example, *ARGUMENTS)
    peak = inside_once(None, example, *ARGUMENTS).report["peak_bytes"]
    cells = [example, f"{peak / 1e6:.0f} MB"]
    works = {"none": 100, file: 100}

    def tried(percent: int, host: str) -> Run | None:
        found = inside(share(percent, peak), example, *ARGUMENTS, DTRRUN_HOST_BUDGET=host, **STOP)
        if found.exit_code:
            return None
        works[host] = min(works[host], percent)
        if told := difference(plain, found):
            missed.append(f"{example} at {percent} %, {host}: {told}")
        return found

    for percent in SHARES:
        alone, both = (tried(percent, host) for host in works)
        times = [quickest(one) / quickest(plain) if one else None for one in (alone, both)]
        cells.append(", ".join("–" if one is None else f"{one:.2f}" for one in times))
        if times[0] and (times[1] is None or times[1] > WORSE * times[0]):
            missed.append(f"{example} at {percent} %: {cells[-1]}")
    last = None
    for host in works:
        low = 0  # is too small; what works is known
        while works[host] - low > STEP:
            middle = (low + works[host]) // 2 // STEP * STEP or STEP
            if middle == works[host] or not (found := tried(middle, host)):
                low = middle
            else:
                last = found
    if last is None:
        last = tried(works[file], file)
    assert last is not None
    base = plain_once(example, *TINY[example], *ARGUMENTS).capture["resident_peak_bytes"]
    resident = [(one.capture["resident_peak_bytes"] - base) / 1e6 for one in (plain, last)]
    least = f"{works['none']} %, {works[file]} % ({quickest(last) / quickest(plain):.2f})"
    return [*cells, least, ", ".join(f"{one:.0f} MB" for one in resident)]


def quickest(run: Run) -> float:
    return min(run.capture["step_seconds"][2:])
