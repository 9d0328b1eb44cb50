"""The time of a step at half the peak, and in a budget that never binds, against the plain run."""

import sys
from statistics import median

from tests.bench.runs import TINY, Run, inside, inside_once, plain, share
from tests.bench.section import Section

HALF, AMPLE = 50, 150
AT_MOST_AMPLE = 1.03
BESIDE_RECOMPUTATION = 0.05

TEXT = f"""\
The figures are the mean processor time of the steps after the second, divided by that of the plain run of the
same round: the median of the rounds, with the least and the most in brackets. In each round, the three kinds
of run take turns. "Recomputed" is the time for which the run inside {HALF} % ran operators again in these
steps, as a multiple of the time of the program's own operators. A step inside {HALF} % may take longer by
that, and by {BESIDE_RECOMPUTATION * 100:.0f} % of a plain step."""


def recomputed(run: Run) -> float:
    """Return it for the steps that `Run.step_seconds` counts; one may be two in the report (a GAN's)."""
    (process,) = run.report["timeline"]["processes"]
    steps = process["steps"]
    skipped = 2 * round(steps["last"][-1] / len(run.capture["step_seconds"]))

    def total(part: str) -> float:
        counted = zip(steps["first"], steps["seconds"][part], strict=True)
        return sum(seconds for first, seconds in counted if first > skipped)

    return total("rematerialization") / total("operators")


def measure(quick: bool) -> Section:
    rounds = 2 if quick else 5
    arguments = ["--steps", "5" if quick else "6"]
    headers = ["Example", "Plain step", f"{AMPLE} % of the peak", f"{HALF} % of the peak", "Recomputed"]
    section = Section("3. Time", TEXT, headers)
    for example in TINY:
        peak = inside_once(None, example, *arguments).report["peak_bytes"]
        seconds, ratios, again = [], {AMPLE: [], HALF: []}, []
        for _ in range(rounds):
            alone = plain(example, *arguments)
            if not alone.capture:  # it took too long
                continue
            seconds.append(alone.step_seconds)
            for percent in ratios:
                run = inside(share(percent, peak), example, *arguments)
                if run.capture:
                    ratios[percent].append(run.step_seconds / seconds[-1])
                    if percent == HALF:
                        again.append(recomputed(run))
        limits = {AMPLE: AT_MOST_AMPLE, HALF: 1 + BESIDE_RECOMPUTATION + (median(again) if again else 0)}
        row = [example, f"{median(seconds) * 1e3:.0f} ms" if seconds else "failed"]
        for percent, limit in limits.items():
            if not seconds or len(ratios[percent]) < len(seconds):
                row.append("failed")
                section.missed.append(f"{example} at {percent} %: did not run")
                continue
            ratio = median(ratios[percent])
            row.append(f"{ratio:.2f} ({min(ratios[percent]):.2f} to {max(ratios[percent]):.2f})")
            if ratio > limit:
                section.missed.append(f"{example} at {percent} %: {ratio:.2f}, should be at most {limit:.2f}")
        section.rows.append([*row, f"{median(again):.2f}" if again else ""])
        print(*section.rows[-1], sep=" | ", file=sys.stderr, flush=True)  # it takes an hour
    return section
