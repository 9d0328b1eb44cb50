"""Notices tensors that are exported through DLPack's C exchange.

`Tensor.__dlpack_c_exchange_api__` is a table of C functions. Consumers look it up once and keep it, or its
functions, for the life of the process. So functions in PyTorch's own table are replaced while a session runs
(`dtrrun/native/dlpack.h`); ours call PyTorch's after the session. New in PyTorch 2.10.
"""

from __future__ import annotations

from typing import Any

import torch

from dtrrun.runtime.access import Reach
from dtrrun.runtime.patches.registry import UNSEEN, lack

CAPSULE: Any = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


class Exports:
    """Brings tensors back before they are exported, while installed."""

    def __init__(self, reach: Reach, native: Any) -> None:
        """native: the extension."""
        self._reach, self._guard = reach, native.guard_exports

    def install(self) -> None:
        if CAPSULE is not None and not self._guard(CAPSULE, self._hand_out):
            lack("table of DLPack's functions as in its version 1", UNSEEN)

    def remove(self) -> None:
        if CAPSULE is not None:
            self._guard(CAPSULE, None)

    def _hand_out(self, tensor: torch.Tensor) -> None:
        self._reach(tensor, True, True)()
