"""What a host tier costs at budgets that work without one."""

import tempfile

from tests.bench.runs import inside, inside_once, share
from tests.bench.section import Section

TITLE = "32. The host tier at budgets that work without it"
EXAMPLES = ("transformer", "unet", "vae", "unrolled_gan", "treelstm", "lstm", "resnet", "densenet", "amp")
QUICK = ("vae",)
SHARES = (70, 50)
ROUNDS = 2
ARGUMENTS = ("--steps", "6")
WORSE = 1.02
PARTS = ("operators", "rematerialization", "scoring", "search", "bookkeeping", "host")

TEXT = f"""\
The time that a run has taken for the program's operators, for recomputation, for choosing, for bookkeeping
and for copies, in multiples of the first of these: by recomputation alone (`--host-budget none`), where 8 GB
may leave for a file, and the second in multiples of the first. Each is the least of {ROUNDS} runs, which took
turns. All of these times are of the same run, so other programs on the machine make little difference. In
brackets: the megabytes that were copied, out and back, in a step. More than {WORSE} times as long counts as
missed."""


def measure(quick: bool) -> Section:
    section = Section(TITLE, TEXT, ["Example", *(f"{percent} %" for percent in SHARES)])
    for example in QUICK if quick else EXAMPLES:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            section.rows.append(row(example, f"8GB:{folder}", section.missed))
    return section


def row(example: str, file: str, missed: list[str]) -> list[str]:
    peak, cells = inside_once(None, example, *ARGUMENTS).report["peak_bytes"], [example]
    for percent in SHARES:
        least, copied = {"none": 0.0, file: 0.0}, 0.0
        for _ in range(ROUNDS):
            for host in least:
                report = inside(share(percent, peak), example, *ARGUMENTS, DTRRUN_HOST_BUDGET=host).report
                seconds, there = report["seconds"], report["host"] or {}
                took = sum(seconds[part] for part in PARTS) / seconds["operators"]
                least[host] = min(least[host] or took, took)
                copied = sum(there.get(f"copied_{way}_bytes", 0) for way in ("out", "in"))
        without, with_it = least.values()
        cells.append(f"{without:.3f}, {with_it:.3f}: {with_it / without:.3f} ({copied / 6e6:.0f})")
        if with_it > WORSE * without:
            missed.append(f"{example} at {percent} %: {cells[-1]}")
    return cells
