"""Recipes: which versions can be recomputed, and what keeps them recomputable (`core/recipes.h`)."""

from __future__ import annotations

from collections.abc import Callable

from dtrrun.core.foreign import Foreign
from dtrrun.core.graph import Operation, Version
from dtrrun.core.ledger import Ledger


class Recipes:
    """Makes, secures and drops recipes."""

    make_constant: Callable[[Version, str], None]
    """Drop the recipe of a resident version, so that it can't be evicted any more. Takes the reason."""
    pin: Callable[[Version, str], None]
    """Keep a resident version in memory from now on. Takes the reason."""
    secure: Callable[[Version], bool]
    """Make sure that a version stays recomputable, or return False if an input is lost."""
    lose: Callable[[Version], None]
    """Give up a version that is not in memory and can't be recomputed any more."""
    supersede: Callable[[Version, Operation | None, int], Version]
    """Make a new version that takes over the storage of one that has been mutated, and return it.

    Takes the mutation as a recipe, or None if there is none, and the cost of the operation in ns.
    """
    half_written: Callable[[Version], Version | None]
    """Handle a storage that a failed operator may have written to.

    Return its new version, a constant, or None if it is gone. The old version keeps its recipe.
    """
    end_counting: Callable[[], None]
    """Record operators again, if they are only counted at present. What there is stays in memory."""
    end: Callable[[], None]
    """Release the storages that recipes have kept alive, since nothing will be recomputed any more."""

    def __init__(self, ledger: Ledger) -> None:
        self.foreign = Foreign(ledger, self)
