"""The ledger over PyTorch's storages."""

from __future__ import annotations

import torch

from dtrrun.ledger.ledger import Ledger as AnyLedger
from dtrrun.runtime import storage, weak
from dtrrun.runtime.errors import BudgetError

weak.install()


class Ledger(AnyLedger):
    """Empties and refills storages of PyTorch."""

    memory = storage
    BudgetError = BudgetError
    out_of_memory = torch.OutOfMemoryError
