"""Memory is really returned: the resident set is below a plain run's, and follows the budget."""

from tests.bench.runs import TINY, inside_once, plain_once, share
from tests.bench.section import Section

PROGRAMS = TINY | {"tanh_layers": ["--rows", "10"]}
SHARES = (70, 50)
TOLERANCE = 0.15

TEXT = f"""\
The table shows the peak of the resident set (`VmHWM`) above that of the same script on a tiny batch, in MB,
and as a share of the plain run's figure. With `--return-memory auto`, the default, a result counts as missed
if it is more than the plain run's. With `always`, the resident set must shrink with the budget: a result
counts as missed if its share of the plain figure is more than {TOLERANCE * 100:.0f} points above the budget's
share of the peak. `tanh_layers` has layers of equal blocks of 12 MB, which fragments the C library's heap, in
a plain run as well."""


def cell(part: int | None, whole: int) -> str:
    return "infeasible" if part is None else f"{part / 1e6:.0f} ({part / whole:.0%})"


def measure(quick: bool) -> Section:
    shares = (50,) if quick else SHARES
    arguments = ["--steps", "3"]
    headers = ["Example", "Plain", *(f"{percent} %" for percent in shares), "50 %, always"]
    section = Section("2. Resident set", TEXT, headers)
    for example, tiny in PROGRAMS.items():
        peak = inside_once(None, example, *arguments).report["peak_bytes"]
        base = plain_once(example, *tiny, *arguments).capture["resident_peak_bytes"]

        def above(run, base=base) -> int | None:
            return run.capture["resident_peak_bytes"] - base if run.capture else None

        whole = above(plain_once(example, *arguments))
        assert whole is not None
        found = {percent: above(inside_once(share(percent, peak), example, *arguments)) for percent in shares}
        always = above(inside_once(share(50, peak), example, *arguments, DTRRUN_RETURN_MEMORY="always"))
        parts = [*found.values(), always]
        section.rows.append([example, f"{whole / 1e6:.0f}", *(cell(part, whole) for part in parts)])
        for percent, part in found.items():
            if part is not None and part > whole:
                section.missed.append(f"{example} at {percent} %: {part / whole:.0%} of the plain figure")
        if always is not None and always / whole > 0.5 + TOLERANCE:
            section.missed.append(f"{example} at 50 %, always: {always / whole:.0%} of the plain figure")
    return section
