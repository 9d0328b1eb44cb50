"""The budget that is expected to be enough for a program whose budget was too small.

It is the sum of what stays in memory in any case, now or later in the step, and of the most that one operator
needs besides. The operators that have run are known, and those of the backward pass can be guessed from the
forward pass. Computed once, when the program is about to end, from what the session knows anyway.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dtrrun.core.graph import Geometry, Operation, Signature, Version
from dtrrun.core.ledger import INPUT_LOST, INPUT_MUTATED, Ledger
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.observe.training_memory import Training, in_backward, in_optimizer

MARGIN = 1.05
LOST_PINS = (INPUT_LOST, INPUT_MUTATED)
"""Why computed memory became constant."""


def expected_budget(
    ledger: Ledger, signatures: Iterable[Signature], training: Training, error: BudgetError
) -> int:
    """Return the budget in bytes. signatures: of the calls so far, including the one that failed."""
    assert ledger.budget_bytes is not None
    trained = training.present(ledger.key_of)
    kept = sum(nbytes for key, nbytes in trained.items() if key not in ledger.versions)
    lost = 0
    for key, version in ledger.versions.items():
        if key in trained or (version.resident and version.operation is None):
            kept += version.nbytes
            lost += version.nbytes if key not in trained and version.pin in LOST_PINS else 0
    kept += training.to_come_bytes() + sum(block.nbytes for block in ledger.counted.values())
    kept += max(ledger.budget_bytes - ledger.limit, sum(ledger.overhead.values()), 0)  # on a GPU

    parameters = {_shape(tuple(one.shape)) for one in training.parameters}
    calls = [Sizes(one, parameters) for one in signatures if not one.operator.view]
    most = max((one.nbytes for one in calls), default=0)
    trains = torch.is_grad_enabled() or in_backward()
    updates = not trains and in_optimizer()
    operations = list(_operations(ledger))
    if trains:
        most = max([most, *map(_backward_bytes, operations)])
    elif not updates:
        most = max(most, _with_larger_batch(calls))
    if trains or (error.called != error.operator and not updates):  # one of its inputs is recomputed
        most += max(map(_forward_bytes, operations), default=0)
    # The optimizer's temporary memory may exist already: it becomes constant when the weights change.
    most = max(most, training.update_bytes() - lost)
    return int(MARGIN * max(kept + most, error.least_bytes))


def _operations(ledger: Ledger) -> Iterable[Operation]:
    """Return the recipes of what the program has, and of what these are computed from."""
    found: dict[int, Operation] = {}
    pending: list[Version] = [*ledger.versions.values(), *ledger.scratch.values()]
    while pending:
        operation = pending.pop().operation
        if operation is not None and id(operation) not in found:
            found[id(operation)] = operation
            pending += operation.inputs
    return found.values()


def _inputs(operation: Operation) -> list[int]:
    return [source.nbytes for source in operation.inputs if source.operation is not None]


def _forward_bytes(operation: Operation) -> int:
    return sum(_inputs(operation)) + operation.signature.output_bytes


def _backward_bytes(operation: Operation) -> int:
    """Return the most that an operator or its backward is likely to have in memory.

    The backward of most operators with one input, such as a convolution or an activation, reads the gradient
    of the output and the input or the output, and makes the gradient of the input. With more inputs, there is
    an operator for each.
    """
    inputs, result = _inputs(operation), operation.signature.output_bytes
    if len(inputs) > 1 or "backward" in operation.signature.operator.name:
        return sum(inputs) + result
    return sum(inputs) + result + max([*inputs, result])


class Sizes:
    """What a call has in memory besides parameters: `nbytes`. `shapes`: those of its inputs."""

    def __init__(self, signature: Signature, parameters: set[tuple[int, ...]]) -> None:
        """parameters: the shapes that are taken for parameters."""
        inputs = [one for one in signature.geometries if _shape(one[0]) not in parameters]
        self.operator: Any = signature.operator
        self.shapes = [tuple(one[0]) for one in inputs if one[0]]
        self.nbytes = signature.output_bytes + sum(map(_nbytes, inputs))


def _shape(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return what a tensor's size has in common with its transposed sizes."""
    return tuple(sorted(size))


def _nbytes(geometry: Geometry) -> int:
    size, stride, _, dtype, *_ = geometry
    total: int = dtype.itemsize
    for length, step in zip(size, stride, strict=True):
        total *= length if step or not length else 1
    return total


def _with_larger_batch(calls: list[Sizes]) -> int:
    """Return what the forward pass needs if its last call so far has a larger batch than before.

    An evaluation often has a larger batch than the training before it.
    """
    if not calls or not calls[-1].shapes:
        return 0
    last = calls[-1]
    length, *sample = last.shapes[0]
    alike = [one.shapes[0] for one in calls if one.operator is last.operator and one.shapes]
    before = {shape[0] for shape in alike if list(shape[1:]) == sample and 0 < shape[0] < length}
    return max(
        (
            one.nbytes * length // shape[0]
            for one in calls
            for shape in one.shapes
            if shape[0] in before and "backward" not in one.operator.name
        ),
        default=0,
    )
