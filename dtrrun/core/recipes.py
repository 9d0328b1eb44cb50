"""Recipes: which versions can be recomputed, and what keeps them recomputable (`core/recipes.h`)."""

from __future__ import annotations

from dtrrun.core import bound
from dtrrun.core.foreign import Foreign
from dtrrun.core.ledger import Ledger


class Recipes(bound.Recipes):
    """Makes, secures and drops recipes."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.foreign = Foreign(ledger, self)
