"""What a program can do itself if its budget is too small: known remedies, by what fills the memory."""

from __future__ import annotations

from dtrrun.core.graph import Signature
from dtrrun.core.ledger import INPUT_MUTATED, Ledger
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.observe.training_memory import Training
from dtrrun.sizes import format_size

LEAK = 0.1
"""The share of the budget from which values of earlier steps are mentioned."""
LARGE = 0.2
"""The share of the budget from which one operator's logits are mentioned."""
VOCABULARY = 1000

EARLIER_STEPS = (
    "{} are values of earlier steps that the program still refers to (losses or outputs in a list): detach() "
    "or item() frees what they were computed from, and under torch.no_grad() nothing is kept"
)
LOGITS = (
    "{} has logits of {:,} x {:,} at once: a loss that is computed in chunks of the batch, or fused with the "
    "last layer, takes a fraction of the memory"
)


def hint(ledger: Ledger, training: Training, error: BudgetError, failed: Signature | None, steps: int) -> str:
    """Return what is known to help, or "" if nothing is. steps: the number of steps so far."""
    found = []
    if steps and (nbytes := _of_earlier_steps(ledger, training)) >= LEAK * error.budget_bytes:
        found.append(EARLIER_STEPS.format(format_size(nbytes)))
    if failed is not None and (shape := _logits(failed, error.budget_bytes)):
        found.append(LOGITS.format(failed.operator.name, *shape))
    return ". ".join(found)


def _of_earlier_steps(ledger: Ledger, training: Training) -> int:
    """Return the bytes that can't be evicted because weights have changed since they were computed."""
    trained = training.present(ledger.key_of)
    return sum(
        version.nbytes
        for key, version in ledger.versions.items()
        if version.resident and version.pin == INPUT_MUTATED and key not in trained
        if version.age < ledger.step_age
    )


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
