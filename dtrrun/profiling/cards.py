"""GPUs by name: memory, bandwidth and speed, and from these what an operator takes on each.

The figures are those of NVIDIA's data sheets and architecture whitepapers: without sparsity, and for products
of 16-bit numbers with sums in 32 bits. `programs_gib` is what PyTorch shows as the total capacity, as people
have reported it; where that is unknown, a share of the memory.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from dtrrun.simulator.log import WORK, Call, Instruction, Mutate

GIB = 1 << 30
USABLE = 0.98
"""The share of a card's memory that the driver leaves, where nothing else is known."""
LAUNCH_NS = 15_000
"""What an operator takes at least, since the host has to launch it."""
OF_PEAK = {"multiply": 0.5, "convolve": 0.2, "move": 0.7, "reduce": 0.25}
"""Shares of the rates on the data sheet that kernels reach: with these, the steps of five models on an H100
and an H200 take from 0.74 to 1.27 times what was measured (docs/estimate.md)."""
WITHIN = 1.5
"""The factor by which times may be wrong."""
REDUCES = re.compile("norm|softmax|pool|upsample|loss|interpolate|sort|topk|scatter|index|embedding")
"""Operators whose kernels read their inputs more than once, or not in order."""


class Card(NamedTuple):
    """gib: as it is sold. bandwidth: GB/s. fp32, tf32, bf16: TFLOP/s; half precision is like bf16."""

    name: str
    gib: int
    programs_gib: float
    bandwidth: float
    fp32: float
    tf32: float
    bf16: float

    @property
    def programs_bytes(self) -> int:
        """Return the memory that programs may take."""
        return int(self.programs_gib * GIB)

    def cost(self, operator: str, work: Sequence[Any]) -> int:
        """Return the time of an operator in ns. work: as `runtime.absent.recorder` logs it."""
        flops, precision, moved, _ = work
        if not moved:  # a view
            return 0
        tera = {"fp32": self.fp32, "tf32": self.tf32, "bf16": self.bf16}[precision]
        kind = "convolve" if "convolution" in operator else "multiply"
        computing = flops / (tera * 1e3 * OF_PEAK[kind])
        moving = moved / (self.bandwidth * OF_PEAK["reduce" if REDUCES.search(operator) else "move"])
        return int(max(computing, moving, LAUNCH_NS))


CARDS = (
    Card("B200", 180, 178.0, 8000, 75, 1125, 2250),
    Card("H200", 141, 139.8, 4800, 67, 494.7, 989.4),
    Card("H100", 80, 79.1, 3350, 67, 494.7, 989.4),
    Card("H100 PCIe", 80, 79.1, 2000, 51, 378, 756),
    Card("A100 80GB", 80, 79.1, 2039, 19.5, 156, 312),
    Card("A100 40GB", 40, 39.4, 1555, 19.5, 156, 312),
    Card("A30", 24, 23.5, 933, 10.3, 82, 165),
    Card("A40", 48, 44.3, 696, 37.4, 74.8, 149.7),
    Card("A10", 24, 22.0, 600, 31.2, 62.5, 125),
    Card("L40S", 48, 44.4, 864, 91.6, 183, 362),
    Card("L4", 24, 22.0, 300, 30.3, 60, 121),
    Card("V100 32GB", 32, 31.7, 900, 15.7, 15.7, 125),
    Card("V100 16GB", 16, 15.7, 900, 15.7, 15.7, 125),
    Card("T4", 16, 14.5, 320, 8.1, 8.1, 65),
    Card("RTX 6000 Ada", 48, 47.4, 960, 91.1, 182, 364),
    Card("RTX A6000", 48, 47.4, 768, 38.7, 77.4, 154.8),
    Card("RTX 5090", 32, 31.3, 1792, 104.8, 104.8, 209.5),
    Card("RTX 4090", 24, 23.6, 1008, 82.6, 82.6, 165.2),
    Card("RTX 4080", 16, 15.7, 717, 48.7, 48.7, 97.5),
    Card("RTX 4070", 12, 11.7, 504, 29.1, 29.1, 58.3),
    Card("RTX 3090", 24, 23.6, 936, 35.6, 35.6, 71),
    Card("RTX 3080", 10, 9.7, 760, 29.8, 29.8, 59.5),
    Card("RTX 3070", 8, 7.8, 448, 20.3, 20.3, 40.6),
    Card("RTX 3060", 12, 11.7, 360, 12.7, 12.7, 25.4),
    Card("RTX 2080 Ti", 11, 10.7, 616, 13.4, 13.4, 53.8),
)
DEFAULTS = {"A100": "A100 80GB", "V100": "V100 16GB"}
"""Which card is meant by a name that several have."""
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(g|gb|gib|gi)", re.IGNORECASE)


class Chosen(NamedTuple):
    """card: with the memory that was asked for. priced_as: the name of the card that times are for, if only a
    size was given."""

    card: Card
    priced_as: str | None


def parse_card(text: str) -> Chosen:
    """Read `RTX 4090` or `24GB`, the size of a card as it is sold. Raises ValueError."""
    if size := SIZE.fullmatch(text.strip()):
        gib = float(size[1])
        if not 1 <= gib <= 1024:
            raise ValueError(f"{text!r} is not the memory of a GPU")
        like = min(CARDS, key=lambda one: (abs(one.gib - gib), -one.bandwidth))
        card = like._replace(name=f"a GPU with {size[1]} GiB", gib=round(gib), programs_gib=USABLE * gib)
        return Chosen(card, like.name)
    wanted = _short(text)
    wanted = _short(DEFAULTS.get(wanted.upper(), wanted))
    for one in CARDS:
        if _short(one.name) == wanted:
            return Chosen(one, None)
    names = {_short(one.name): one.name for one in CARDS}
    near = [names[one] for one in get_close_matches(wanted, names, 1)]
    hint = f"did you mean {near[0]}?" if near else "give its memory, such as 24GB"
    raise ValueError(f"{text!r} is not in the table of GPUs (docs/estimate.md); {hint}")


def _short(name: str) -> str:
    """Return a name without what does not tell cards apart: `NVIDIA GeForce RTX 4090` is `4090`."""
    words = re.sub(r"nvidia|geforce|tesla|quadro|rtx|sxm\d?|[-_]", " ", name.lower()).split()
    return "".join(words)


def priced(log: Sequence[Instruction], card: Card) -> list[Instruction]:
    """Return a log of an absent GPU with the costs that its operators have on a card."""
    return [
        one._replace(cost=card.cost(one.operator, one.facts[WORK]))
        if isinstance(one, (Call, Mutate)) and one.facts and WORK in one.facts
        else one
        for one in log
    ]
