"""Run an unmodified PyTorch training script inside a memory budget.

In your own code:

    with dtrrun.budget("200MB") as session:
        train()
    session.report()
"""

from __future__ import annotations

import sys
from typing import Any

__version__ = "0.1.0"
__all__ = ["BudgetError", "LostError", "budget", "current"]
NO_TORCH = "dtrrun.{} needs PyTorch, which is not installed for {}: pip install 'torch>=2.9'"


def load_ipython_extension(shell: Any) -> None:
    """Add `%%dtrrun` to a notebook: called by `%load_ext dtrrun`."""
    from dtrrun.notebook import load

    load(shell)


def __getattr__(name: str) -> Any:
    # Imported on demand: the command line must not load torch, and may be installed without it.
    if name in __all__:
        try:
            import torch  # noqa: F401 - first, since it begins the session of a program that we have started

            from dtrrun import runtime
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(NO_TORCH.format(name, sys.executable), name="torch") from None

        return getattr(runtime, name)
    raise AttributeError(f"module 'dtrrun' has no attribute {name!r}")
