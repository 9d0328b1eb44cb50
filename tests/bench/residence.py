"""Memory really goes back to the machine: the resident set follows the budget."""

from tests.bench.runs import TINY, inside_once, plain_once, share
from tests.bench.section import Section

SHARES = (70, 50, 40)
TOLERANCE = 0.15

TEXT = f"""\
The peak of the resident set (`VmHWM`) above that of the same script on a tiny batch, in MB, and as a share of
the plain run's. `auto`, the default, keeps freed pages for the next tensor while the machine has memory to
spare. With `--return-memory always` they go back, and the resident set must fall with the budget: it counts
as missed if its share of the plain figure is more than {TOLERANCE * 100:.0f} points over the budget's share
of the peak."""


def cell(part: int | None, whole: int) -> str:
    return "infeasible" if part is None else f"{part / 1e6:.0f} ({part / whole:.0%})"


def measure(quick: bool) -> Section:
    shares = (50,) if quick else SHARES
    arguments = ["--steps", "4"]
    headers = ["Example", "Plain", "50 %, auto", *(f"{percent} %, always" for percent in shares)]
    section = Section("2. Resident set", TEXT, headers)
    for example, tiny in TINY.items():
        peak = inside_once(None, example, *arguments).report["peak_bytes"]
        base = plain_once(example, *tiny, "--steps", "3").capture["resident_peak_bytes"]

        def above(run, base=base) -> int | None:
            return run.capture["resident_peak_bytes"] - base if run.capture else None

        whole = above(plain_once(example, *arguments))
        assert whole is not None
        returned = {
            percent: above(
                inside_once(share(percent, peak), example, *arguments, DTRRUN_RETURN_MEMORY="always")
            )
            for percent in shares
        }
        kept = above(inside_once(share(50, peak), example, *arguments))
        section.rows.append(
            [
                example,
                f"{whole / 1e6:.0f}",
                cell(kept, whole),
                *(cell(part, whole) for part in returned.values()),
            ]
        )
        for percent, part in returned.items():
            if part is not None and part / whole > percent / 100 + TOLERANCE:
                section.missed.append(f"{example} at {percent} %: {part / whole:.0%} of the plain figure")
    return section
