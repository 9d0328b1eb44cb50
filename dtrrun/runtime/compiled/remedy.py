"""What to do if a compiled program recomputes too much, or does not fit into its budget."""

from __future__ import annotations

from collections.abc import Iterable

from dtrrun.runtime.operators import KERNELS
from dtrrun.sizes import format_size_up

IN_A_COMMAND, IN_A_BLOCK = "--compile eager", 'dtrrun.budget(..., compile="eager")'
TEXT = (
    "What a compiled graph computes can only be recomputed from what torch.compile has chosen to save: in so "
    "small a budget, {}, or compiling block by block (block.compile()), recomputes less"
)
AT_ONCE = (
    "The kernel that torch.compile has generated needs all of its tensors at the same time, {} together, "
    "such as all of an optimizer's state: {} runs the operators one by one"
)


def remedy(called: Iterable[str], how: str, refused: str = "", tensors_bytes: int = 0, limit: int = 0) -> str:
    """Return what helps, or "" if none of these operators is a kernel that torch.compile has generated.

    how: how to run the program eagerly. refused: the operator that does not fit, if one did not, which
    reads and makes so many bytes. limit: what tensors may take.
    """
    if refused.startswith(f"{KERNELS}.") and tensors_bytes > limit:
        return AT_ONCE.format(format_size_up(tensors_bytes), how)
    return TEXT.format(how) if any(name.startswith(f"{KERNELS}.") for name in called) else ""
