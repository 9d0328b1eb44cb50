"""A host tier beside recomputation, in the simulator: by the speed of the link."""

from collections.abc import Sequence
from math import exp, log
from statistics import mean

from dtrrun.core.host import HostMemory
from dtrrun.simulator.live import Prediction, predict
from dtrrun.simulator.log import Instruction, read_log
from tests.bench.runs import ROOT
from tests.bench.section import Section

TITLE = "30. The host tier by the speed of its link"
EXAMPLES = ("lstm", "treelstm", "unrolled_gan", "unet", "transformer", "resnet", "densenet", "vae")
QUICK = ("lstm", "unet")
LINKS = (0.1, 0.2, 1.2, 5)
"""GB/s, beside operators that are priced as if memory moved 10 GB/s and products were 50 GFLOP/s."""
SHARES = (70, 50, 40, 30, 20)
MOST = 20
WORSE = 1.05

TEXT = f"""\
One step of each example, by its log in `tests/logs`, in a share of its peak, in multiples of the plain step:
by recomputation alone, and where all may leave for a host. `–`: too small, or more than {MOST}. β: how often
the link could move all of the peak during a step; for such programs, that is .15 to .6 on an H100 with PCIe
at 50 GB/s, and 5 to 50 on a CPU with a file. Costs are those of the model, so the figures are the same on
each machine. The last rows have geometric means over the cells that work without the host, and how many of
the others work with it. More than {WORSE} times as long as without the host counts as missed."""


def measure(quick: bool) -> Section:
    section = Section(TITLE, TEXT, ["Example", "GB/s", "β", *(f"{percent} %" for percent in SHARES)])
    ratios: dict[float, list[float]] = {link: [] for link in LINKS}
    gained = dict.fromkeys(LINKS, 0)
    for example in QUICK if quick else EXAMPLES:
        steps = list(read_log(ROOT / "tests" / "logs" / f"{example}.log.gz"))
        plain = predict(steps, None)
        alone = [told(steps, plain, percent, None) for percent in SHARES]
        for link in LINKS:
            both = [told(steps, plain, percent, link) for percent in SHARES]
            cells = [f"{shown(one)}, {shown(other)}" for one, other in zip(alone, both, strict=True)]
            beta = link * plain.plain_time / plain.peak_bytes
            section.rows.append([example, f"{link:g}", f"{beta:.2f}", *cells])
            for percent, one, other in zip(SHARES, alone, both, strict=True):
                if one is None:
                    gained[link] += other is not None
                    continue
                ratios[link].append(ratio := (other or MOST) / one)
                if ratio > WORSE:
                    section.missed.append(f"{example} at {percent} % and {link:g} GB/s: {ratio:.2f}")
    for link, found in ratios.items():
        means = f"{exp(mean(map(log, found))):.3f}; {gained[link]} more work"
        section.rows.append(["all", f"{link:g}", "", means, *[""] * (len(SHARES) - 1)])
    return section


def told(steps: Sequence[Instruction], plain: Prediction, percent: int, link: float | None) -> float | None:
    host = None if link is None else HostMemory(1 << 40, 1 / link, 1 / link)
    found = predict(steps, plain.peak_bytes * percent // 100, host=host, limit=MOST)
    return found.time / plain.plain_time if found.status == "ok" else None


def shown(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}"
