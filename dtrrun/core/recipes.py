"""Recipes: which versions can be recomputed, and what keeps them recomputable (`core/recipes.h`)."""

from __future__ import annotations

from collections.abc import Callable

from dtrrun.core.foreign import Foreign
from dtrrun.core.graph import Operation, Version
from dtrrun.core.ledger import Ledger


class Recipes:
    """Makes, secures and drops recipes."""

    make_constant: Callable[[Version, str], None]
    """Drop the recipe of a resident version, so that it can't be evicted any more, for a reason."""
    pin: Callable[[Version, str], None]
    """Keep a resident version in memory from now on, for a reason."""
    secure: Callable[[Version], bool]
    """Make sure that a version stays recomputable, or return False: an input is lost."""
    lose: Callable[[Version], None]
    """A version that is not in memory can't be recomputed any more."""
    supersede: Callable[[Version, Operation | None, int], Version]
    """Make a new version that takes over the storage of one that has been mutated, and return it.

    Takes the mutation as a recipe, or None if there is none, and the cost of the operation in ns.
    """
    half_written: Callable[[Version], Version | None]
    """A failed operator may have written to the storage.

    Return the version that it has now, a constant, or None; the old version keeps its recipe.
    """
    end: Callable[[], None]
    """Nothing will be recomputed any more: let go of the storages that recipes have kept alive."""

    def __init__(self, ledger: Ledger) -> None:
        self.foreign = Foreign(ledger, self)
