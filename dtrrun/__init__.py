"""Run an unmodified PyTorch training script inside a memory budget.

In your own code:

    with dtrrun.budget("200MB") as session:
        train()
    session.report()
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["BudgetError", "LostError", "budget"]


def __getattr__(name: str) -> Any:
    # Imported on demand: the command line must not load torch.
    if name in __all__:
        from dtrrun import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module 'dtrrun' has no attribute {name!r}")
