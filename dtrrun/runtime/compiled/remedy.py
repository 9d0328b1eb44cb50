"""What to do if a compiled program recomputes too much, or does not fit into its budget."""

from __future__ import annotations

from collections.abc import Iterable

from dtrrun.runtime.operators import KERNELS

IN_A_COMMAND, IN_A_BLOCK = "--compile eager", 'dtrrun.budget(..., compile="eager")'
TEXT = (
    "What a compiled graph computes can only be recomputed from what torch.compile has chosen to save: in so "
    "small a budget, {}, or compiling block by block (block.compile()), recomputes less"
)


def remedy(called: Iterable[str], how: str) -> str:
    """Return what helps, or "" if none of these operators is a kernel that torch.compile has generated.

    how: how to run the program eagerly.
    """
    return TEXT.format(how) if any(name.startswith(f"{KERNELS}.") for name in called) else ""
