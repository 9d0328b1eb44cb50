"""What a program can do itself if its budget is too small: known remedies, by what fills the memory.

A hint accuses only what was seen: a container that holds the values, and autograd's graph if it keeps them.
"""

from __future__ import annotations

from dtrrun.core.graph import Signature, Version
from dtrrun.core.history import History
from dtrrun.core.ledger import Ledger
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.observe.holders import Holder
from dtrrun.runtime.observe.labels import COMPUTED
from dtrrun.sizes import format_size

LARGE_HOLDING = 0.1
"""The share of the budget from which what a container holds is mentioned."""
LARGE = 0.2
"""The share of the budget from which one operator's logits are mentioned."""
VOCABULARY = 1000
LONGEST = 200
"""How many characters of another error are quoted."""

GRAPHS = (
    "{held} keeps {size} for the backward pass of values of earlier steps: if there will be none, hold their "
    "detach() or item() instead"
)
RESULTS = (
    "{held} holds {size} of results: if less of them is enough (item(), argmax(), a mean), keep only that"
)
ELSEWHERE = ", or move them to the CPU"
LOGITS = (
    "{} has logits of {:,} x {:,} at once: a loss that is computed in chunks of the batch, or fused with the "
    "last layer, takes a fraction of the memory"
)


def hint(
    ledger: Ledger, holders: dict[int, Holder], error: BudgetError, failed: Signature | None, history: History
) -> str:
    """Return what is known to help, or "" if nothing is. holders: of what can't be evicted, by key."""
    found = [*_containers(ledger, holders, LARGE_HOLDING * error.budget_bytes, history)]
    if failed is not None and (shape := _logits(failed, error.budget_bytes)):
        found.append(LOGITS.format(failed.operator.name, *shape))
    return ". ".join(found)


def unnamed(why: Exception) -> str:
    """Return, for the error's text, that nothing could be worked out. Tests raise `why` instead."""
    said = " ".join(str(why).split())[:LONGEST]
    return f"dtrrun could not work out which budget to try ({type(why).__name__}: {said})"


def _containers(ledger: Ledger, holders: dict[int, Holder], least: float, history: History) -> list[str]:
    """Return what to do about containers that hold results of this many bytes."""
    held: dict[Holder, list[Version]] = {}
    for key, holder in holders.items():
        version = ledger.versions.get(key)
        if version is not None and version.pin in COMPUTED and holder.container and not holder.of_optimizer:
            held.setdefault(holder, []).append(version)
    found = []
    for holder, versions in held.items():
        nbytes = sum(one.nbytes for one in versions)
        ages = [one.age for one in versions]
        if nbytes < least or len(versions) < 2:
            continue
        if not holder.by_graph:
            text = RESULTS + (ELSEWHERE if ledger.device_type == "cuda" else "")
        elif max(ages) - min(ages) > ledger.step_age - history.former_step_age > 0:  # of more than one step
            text = GRAPHS
        else:
            continue
        found.append(text.format(held=holder._replace(by_graph=False), size=format_size(nbytes)))
    return found


def _logits(failed: Signature, budget_bytes: int) -> tuple[int, int] | None:
    """Return the rows and columns of logits over a vocabulary that make up much of the budget."""
    if "log_softmax" not in failed.operator.name:
        return None
    (*rows, columns), *_ = failed.geometries[0][0] or (1,), None
    count = 1
    for length in rows:
        count *= length
    large = columns >= VOCABULARY and failed.output_bytes >= LARGE * budget_bytes
    return (count, columns) if large else None
