"""Budgets in which only recomputation does not suffice: constants leave for a file."""

import tempfile

from tests.bench.runs import Run, difference, inside, inside_once, plain_once
from tests.bench.section import Section

TITLE = "29. In less than recomputation needs"
EXAMPLES = ("transformer", "unet", "vae", "unrolled_gan", "treelstm", "lstm", "resnet", "densenet", "amp")
QUICK = ("transformer", "vae")
STEP = 5
"""Percent of the plain peak between budgets that are tried."""
STOP = {"DTRRUN_MAX_SLOWDOWN": "20", "DTRRUN_ON_THRASH": "stop"}
ARGUMENTS = ("--steps", "6")

TEXT = f"""\
The least budget in which an example trains, in percent of its plain peak, to within {STEP} %: by
recomputation alone (`--host-budget none`), and where weights, gradients and optimizer state may leave for a
file. A step may take at most 20 times its own work. The times of steps are in multiples of a plain run's
(means of the last four; one run each): in the least budget of recomputation alone, there with a file allowed,
and in the least budget with a file. A different bit, or a step that takes more than 1.05 times as long only
because a file is allowed, counts as missed."""


def measure(quick: bool) -> Section:
    headers = [
        "Example",
        "Plain peak",
        "Least, without",
        "Time",
        "Time, file allowed",
        "Least, with a file",
        "Time",
        "Left",
    ]
    section = Section(TITLE, TEXT, headers)
    for example in QUICK if quick else EXAMPLES:
        plain, peak = (
            plain_once(example, *ARGUMENTS),
            inside_once(None, example, *ARGUMENTS).report["peak_bytes"],
        )
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            alone = least(example, peak, "none", 95)
            row = [example, f"{peak / 1e6:.0f} MB"]
            found: dict[str, Run] = {}
            if alone:
                found["without"] = run(example, peak, alone, "none")
                found["allowed"] = run(example, peak, alone, f"4GB:{folder}")
                row += [
                    f"{alone} %",
                    *(f"{one.step_seconds / plain.step_seconds:.2f}" for one in found.values()),
                ]
                times = found["allowed"].step_seconds, found["without"].step_seconds
                if times[0] > 1.05 * times[1]:
                    section.missed.append(
                        f"{example} at {alone} %: {times[0] / times[1]:.2f} times as long with a file"
                    )
            else:
                row += ["–", "–", "–"]
            both = least(example, peak, f"4GB:{folder}", (alone or 100) - STEP)
            if both:
                last = found["with"] = run(example, peak, both, f"4GB:{folder}")
                left = last.report["host"]["left_peak_bytes"]
                row += [f"{both} %", f"{last.step_seconds / plain.step_seconds:.2f}", f"{left / 1e6:.0f} MB"]
            else:
                row += ["the same", "–", "–"]
        section.rows.append(row)
        for name, one in found.items():
            if told := difference(plain, one):
                section.missed.append(f"{example} {name}: {told}")
    return section


def run(example: str, peak: int, percent: int, host: str) -> Run:
    return inside(peak * percent // 100, example, *ARGUMENTS, DTRRUN_HOST_BUDGET=host, **STOP)


def least(example: str, peak: int, host: str, most: int) -> int:
    """Return the least share of the peak, in percent, that is enough; 0 if `most` is too little."""
    shares = list(range(STEP, most + 1, STEP))
    low, high = 0, len(shares)  # all below `low` are too small, and `high` is enough
    while low < high:
        middle = (low + high) // 2
        if run(example, peak, shares[middle], host).exit_code:
            low = middle + 1
        else:
            high = middle
    return shares[low] if low < len(shares) else 0
