"""The budget that is expected to be enough for a program whose budget was too small.

It is the sum of what stays in memory in any case, now or later in the step, and of the most that any one
operator needs besides. The operators that have run are known, and those of the backward pass can be guessed
from the forward pass. Computed once, when the program is about to end, from what the session already knows.

For a program that has not begun to compute (it is making its parameters or its first batch), there is no
basis for an estimate, and no budget is named: it would be too small again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from dtrrun.core.graph import Geometry, Operation, Signature, Version
from dtrrun.core.ledger import COPIED, GATHERED, INPUT_LOST, INPUT_MUTATED, Ledger, beside_tensors
from dtrrun.extensions.building import CannotBuild
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.observe.rehearsal import LIMIT, Found, Rehearsal
from dtrrun.runtime.observe.training_memory import Training, in_backward, in_optimizer
from dtrrun.runtime.storage import rounded
from dtrrun.sizes import format_size_up
from dtrrun.telemetry.advice import Advised

MARGIN = 1.05
"""Estimates are multiplied with this. In an optimizer's step, what stays in memory is known, and left out."""
SAME = 0.98
"""A share of another run's peak: a program that exceeds it, or falls short, is not taken to be the same."""
WORTH = 0.01
"""What steps to come may leave in memory is considered from this share of the budget."""
SURE = 1.02
"""What the rest of a step takes without a budget is multiplied with this, because it is a guess."""
NEARBY = 1.5
"""A budget that is larger by less than this factor may be as slow."""
SPARE, AT_MOST = 0.25, 0.1
"""What is added to the least that a rehearsal needs, which is a guess, and where nothing runs any more: this
share of what is no constant, or one more result, but at most that share of all."""
LOST_PINS = (INPUT_LOST, INPUT_MUTATED)
"""Reasons why computed memory became constant."""
NESTED = 2
"""How many operators may be waiting for one of their own inputs while an input is recomputed."""
JOINED = 3
"""How many more may be waiting where results are joined (residual connections)."""
COPYING = {"aten.clone", "aten._to_copy", "aten.copy_"}
UPDATES = ("aten._foreach", "aten._fused")
JOINING = {"aten.add", "aten.add_"}

STEPS = "an estimate for steps like {}: other work, such as an evaluation with a larger batch, may need more"
THESE, THIS = "those so far", "this one, of which none has ended"
LESS = "; without a budget it may take less"
LARGER = "an estimate for a batch of {:,}, the largest so far: what has not run yet may need more"
SO_FAR = "at least: enough for what has run so far, and what has not run yet may need more"
GROWS = (
    "at least: enough for this call of {} and {} more, each of which makes {} more than the one before; "
    "every further one takes {}"
)
KEEPS = "at least: enough for {} more steps, each of which leaves {} more in memory"
POOLS = "; the program's own memory pools may keep more in a larger budget"
"""What an advised budget is for if nobody knows what the whole program takes, in words."""


class Plain(NamedTuple):
    """What is known of the program's memory without a budget, in bytes of tensors; 0 if unknown.

    run: of earlier runs. of_steps: of this run, when its last step ended. steps: how many there were. now,
    so_far: with the operator that did not fit. slowdown: what all operators so far have cost, in multiples of
    what they would have without being run again. kept_a_step: how much more each step has left behind.
    """

    run: int = 0
    of_steps: int = 0
    steps: int = 0
    now: int = 0
    so_far: int = 0
    slowdown: float = 1.0
    kept_a_step: int = 0

    @classmethod
    def of(
        cls, ledger: Ledger, of_steps: int, steps: int, error: BudgetError, failed: Signature | None
    ) -> Plain:
        """Return what is known of this run."""
        now = ledger.plain_bytes + (failed.output_bytes if failed is not None else error.needed_bytes)
        slowdown = ledger.clock / max(ledger.clock - ledger.recomputed_cost, 1)
        return cls(0, of_steps, steps, now, max(ledger.plain_peak_bytes, now), slowdown)


def growth_of(held: Sequence[int]) -> int:
    """Return by how many bytes each step has left more in memory, at least; 0 if one has not, or if unknown.

    held: at the ends of the last steps.
    """
    if len(held) < 3:
        return 0
    return max(min(after - before for before, after in itertools.pairwise(held)), 0)


class Refused(NamedTuple):
    """An operator that did not fit, and what is known of the program at that moment.

    signatures: of the calls so far, including the one that failed. inputs, failed: the inputs and signature
    of the call that failed, if it was a call. rehearsal: of a backward pass, which is better than a guess.
    """

    ledger: Ledger
    signatures: Iterable[Signature]
    training: Training
    error: BudgetError
    inputs: Sequence[Version] = ()
    failed: Signature | None = None
    rehearsal: Rehearsal | None = None


class Growth(NamedTuple):
    """What is known of a call that takes more than those before.

    nbytes: what it or those to come need, besides what stays in memory. length: of the batch, if that is all
    that is larger. Otherwise the result of `operator` grows by `each` bytes from call to call, and this one
    takes `least` bytes, with all that stays.
    """

    nbytes: int = 0
    length: int = 0
    operator: str = ""
    each: int = 0
    least: int = 0

    @property
    def more(self) -> int:
        """Return how many more bytes each further call needs: its input and its result are larger."""
        return 2 * self.each


class Estimate(NamedTuple):
    """Bytes; 0 if unknown.

    nbytes: by a formula. rehearsed: in which the rest of this step runs. rest: what the program's tensors
    take in it without a budget. state: of optimizers, which is to come. slowdown: of the rest of the
    backward pass in `rehearsed`. trains: whether operators have a backward pass. growth: of calls without
    one.
    """

    nbytes: int = 0
    rehearsed: int = 0
    rest: int = 0
    state: int = 0
    slowdown: float = 1.0
    trains: bool = True
    growth: Growth = Growth()


def advised_budget(refused: Refused, plain: Plain = Plain(), growth: int = 0) -> Advised:  # noqa: B008 - it is immutable
    """Return the budgets to tell the user about.

    growth: bytes of the budget that are going to be neither tensors nor overhead.

    What the program's tensors take together, evicted or not, is always enough: so far, in a whole run, or in
    a step like those before. A rehearsal tells what is enough for another step like this one. In the first
    step, the program may be about to do more than that, so the larger of both estimates is advised.
    """
    ledger, error, training = refused.ledger, refused.error, refused.training
    if ledger.constants_leave:
        return _beside_the_host(refused, plain, growth)
    estimate = expected_budget(refused)
    beside = beside_tensors(ledger) + growth
    so_far, least, trains = plain.so_far + beside, error.least_bytes, estimate.trains
    whole = _whole_step(refused, plain, estimate)
    whole += beside if whole else 0
    likely = expected = estimate.nbytes + growth if estimate.nbytes else 0
    slowdown = 1.0
    if estimate.rehearsed:
        likely = estimate.rehearsed + growth
        if plain.slowdown > LIMIT and likely < NEARBY * error.budget_bytes:
            # What has run so far may be as slow there, which a rehearsal of the rest cannot tell.
            likely, expected = 2 * error.budget_bytes, whole
        elif plain.of_steps or likely >= expected:
            expected, slowdown = likely, estimate.slowdown
    if plain.run and SAME * so_far <= plain.run + beside and plain.run + beside > error.budget_bytes:
        most = max(plain.run + beside, so_far)
        # What has not been seen may all have to stay in memory.
        seen = max(so_far, plain.now + beside + training.to_come_bytes(ledger.key_of))
        unseen = max(most - seen, 0) if SAME * seen < most else 0
        if not (expected and trains) or expected + unseen >= SAME * most:
            expected, slowdown = most, 1.0
        elif unseen:
            expected, slowdown = expected + unseen, 1.0
        return Advised.of(least, expected, likely, most, slowdown)
    calls = 0
    if not expected:
        pass
    elif not trains:  # an evaluation, or part of a step that a backward pass runs again
        slowdown = 1.0
        if plain.of_steps:
            expected = max(whole, expected) if estimate.growth.nbytes else whole
        if estimate.growth.each:
            calls = max(expected - estimate.growth.least - beside, 0) // estimate.growth.more
    elif whole and (whole < expected or not (estimate.rehearsed or in_optimizer())):
        expected, slowdown = whole, 1.0
    kept = plain.steps * plain.kept_a_step if trains else 0
    if expected and kept < WORTH * expected:
        kept = 0
    advised = Advised.of(least, expected + kept, min(likely, expected) + kept, 0, slowdown)
    if not expected:
        return advised
    basis = _basis(estimate, plain, calls, kept, less=advised.expected > so_far)
    return advised._replace(basis=basis + (POOLS if growth else ""))


def _beside_the_host(refused: Refused, plain: Plain, growth: int) -> Advised:
    """Return the budgets for a program whose constants leave for the host: operators' tensors have to fit.

    A rehearsal tells what else an operator has to wait for in memory. Without one, that is the rest of its
    inputs while one is recomputed.
    """
    ledger, signatures, training, error, inputs, _, _ = refused
    found = _rehearsed_beside(refused) if in_backward() else None
    beside = beside_tensors(ledger) + growth
    seen: Iterable[Any] = ledger.versions.values()
    stays = sum(one.nbytes for one in seen if one.resident and one.operation is None and not one.leaves)
    stays += sum(ledger.pinned_blocks().values()) + beside
    parameters = {_shape(tuple(one.shape)) for one in training.parameters}
    recorded = [Recorded(one, set()) for one in _operations(ledger, inputs)]
    needs = [one.nbytes + (0 if found else one.waiting) for one in recorded if not one.updates]
    for one in signatures:
        call = Sizes(one, set())
        if one.operator.view or call.updates:
            continue
        # An optimizer's update of one weight reads nothing that may have to be computed again.
        alone = one.operator.mutates and not Sizes(one, parameters).inputs
        needs.append(call.nbytes + (0 if alone or found else call.waiting))
    least = max(stays + max(needs, default=0), error.least_bytes)
    if found:
        least = max(least, found.nbytes + _uncounted(ledger) + growth)
    expected = int(MARGIN * least)
    advised = Advised.of(error.least_bytes, expected, expected, plain.run + beside if plain.run else 0, 1.0)
    return advised if plain.run else advised._replace(basis=SO_FAR + (POOLS if growth else ""))


def _rehearsed_beside(refused: Refused) -> Found | None:
    """Rehearse the call that did not fit, and the backward pass of what has run so far, with a host."""
    ledger, _, training, _, _, failed, rehearsal = refused
    if rehearsal is None or failed is None:
        return None
    trained = training.trained(ledger.key_of) if in_backward() or torch.is_grad_enabled() else {}
    try:
        # Gradients and state that are to come leave as well.
        return rehearsal.backward(failed, trained, training.without_gradient(ledger.key_of), (), 0)
    except CannotBuild:
        return None


def _uncounted(ledger: Ledger) -> int:
    """Return the bytes of the budget that a rehearsal does not count."""
    blocks = ledger.pinned_blocks()
    return sum(blocks.values()) - blocks.get(COPIED, 0) + beside_tensors(ledger)


def _basis(estimate: Estimate, plain: Plain, calls: int, kept: int, *, less: bool) -> str:
    """Return what an advised budget is for, in words.

    calls: of the operator whose result grows, that are covered. kept: what steps to come leave in memory.
    less: whether the program may take less without a budget.
    """
    growth = estimate.growth
    if growth.each:
        sizes = format_size_up(growth.each), format_size_up(growth.more)
        return GROWS.format(growth.operator, calls, *sizes)
    if kept:
        return KEEPS.format(plain.steps, format_size_up(plain.kept_a_step))
    if growth.length:
        basis = LARGER.format(growth.length)
    elif estimate.trains:
        basis = STEPS.format(THESE if plain.of_steps else THIS)
    else:
        basis = SO_FAR
    return basis + (LESS if less else "")


def _whole_step(refused: Refused, plain: Plain, estimate: Estimate) -> int:
    """Return what a step takes without a budget, in bytes of tensors; 0 if too little of one has run."""
    if not plain.of_steps:
        if not estimate.rehearsed or refused.training.totals()["optimizer"] is None:
            return 0
        rest = min(int(SURE * estimate.rest), estimate.rehearsed)
        return max(plain.so_far + estimate.state, rest)
    whole = plain.of_steps
    if plain.steps < 2 * len(refused.training.optimizers):  # not all steps began with the optimizers' state
        whole += refused.training.totals()["optimizer"] or 0
    return max(whole, plain.so_far)


def expected_budget(refused: Refused) -> Estimate:
    """Return what the budget should be as far as the operators so far tell."""
    ledger, signatures, training, error, inputs, failed, rehearsal = refused
    assert ledger.budget_bytes is not None
    trained = training.present(ledger.key_of)
    operations = list(_operations(ledger, inputs))
    updates = in_optimizer()
    if not (updates or in_backward() or _begun(ledger, training, trained, operations, inputs, failed)):
        return Estimate()
    unseen = kept = sum(nbytes for key, nbytes in trained.items() if key not in ledger.versions)
    sizes = {rounded(one.numel() * one.element_size()) for one in training.parameters}
    lost = 0
    for key, version in ledger.versions.items():
        if key in trained or (version.resident and version.operation is None):
            kept += version.nbytes
            of_update = key not in trained and version.pin in LOST_PINS and version.nbytes in sizes
            lost += version.nbytes if of_update else 0
    around = sum(ledger.pinned_blocks().values()) + beside_tensors(ledger)
    reached = None
    if in_backward():
        reached = {source.key for source in (*inputs, *_read(operations))}
        reached |= _under_way(training, ledger, reached, failed)
    to_come = training.to_come_bytes(ledger.key_of, reached)

    trains = updates or in_backward() or (torch.is_grad_enabled() and bool(training.trained(ledger.key_of)))
    parameters = {_shape(tuple(one.shape)) for one in training.parameters}
    calls = [Sizes(one, parameters) for one in signatures if not one.operator.view]
    recorded = [Recorded(one, parameters) for one in operations]
    recorded = [one for one in recorded if one.inputs and not one.updates]
    known = [*(one for one in calls if not one.updates), *recorded]
    guessed: list[Call] = []
    if trains:
        guessed += [one.backward() for one in recorded if "backward" not in one.operator.name]
        passes = not (updates or in_backward())  # a backward pass may follow
        if failed is not None and passes and any(one.key in trained for one in inputs):
            guessed.append(_after(failed))
        known += guessed
    ways = max((one.nbytes for one in recorded), default=0)
    waits = max((one.waiting for one in (*recorded, *guessed)), default=0)
    joins = sum(sorted((one.waiting for one in recorded if one.joins), reverse=True)[:JOINED])
    again = ways + NESTED * waits + joins if trains or error.called != error.operator else 0
    most = max((max(one.nbytes, one.waiting + again if one.inputs else 0) for one in known), default=0)
    most = max([most, *(one.nbytes for one in calls if one.updates)])
    kept += around + to_come
    growth = Growth() if trains or failed is None else _growth(calls, Sizes(failed, parameters))
    larger = growth.nbytes
    if growth.each:
        growth = growth._replace(least=kept - to_come + growth.least)
    needed = kept + most
    if not torch.is_grad_enabled() or in_backward():  # otherwise there is more to come
        # With this much, no computed memory would have to be evicted.
        whole = unseen + around + to_come + _whole_bytes(ledger, operations, inputs)
        needed = min(needed, whole + max((one.nbytes for one in known), default=0))
    # The optimizer's temporary memory may already exist: it becomes constant when the weights change.
    update = kept + training.update_bytes() - lost
    least = max(update, error.least_bytes)
    enough = max(needed, least)
    enough += int((MARGIN - 1) * max(enough - (kept if updates else 0), 0))
    estimate = Estimate(max(enough, kept - to_come + larger), trains=trains, growth=growth)
    if rehearsal is None or failed is None or not in_backward():
        return estimate
    of_parameters = training.trained(ledger.key_of), training.without_gradient(ledger.key_of)
    try:
        found = rehearsal.backward(failed, *of_parameters, trained, to_come)
    except CannotBuild:  # its file is there, but cannot be loaded
        return estimate
    if found is None:
        return estimate
    beside = _uncounted(ledger)
    needed = found.nbytes + beside
    result = max((one.result for one in known), default=0)
    needed += int(max(SPARE * (needed - kept), min(result, AT_MOST * needed)))
    rehearsed = max(int(MARGIN * max(needed, least)), kept + larger)
    return estimate._replace(
        rehearsed=rehearsed,
        rest=max(found.plain_bytes, update),
        state=training.state_to_come_bytes(ledger.key_of, reached),
        slowdown=found.slowdown_in(rehearsed - beside),
    )


def _begun(
    ledger: Ledger,
    training: Training,
    trained: dict[int, int],
    operations: list[Operation],
    inputs: Sequence[Version],
    failed: Signature | None,
) -> bool:
    """Return whether an operator has computed with a parameter, or one has a gradient, or there is none."""
    if not training.parameters or training.has_gradients():
        return True
    calls = [(one.signature, one.inputs) for one in operations]
    calls += [] if failed is None else [(failed, inputs)]
    computed: set[int] = set()
    copied: set[int] = set()
    for signature, versions in calls:
        into = copied if signature.operator.name in COPYING else computed
        into.update(one.key for one in versions)
    # What was computed with the others may have been released.
    used = {key for key, version in ledger.versions.items() if version.used and key not in copied}
    gathered = any(ledger.versions[key].pin == GATHERED for key in used)  # from shards: no parameters
    return gathered or not trained.keys().isdisjoint(computed | used)


def _under_way(training: Training, ledger: Ledger, reached: set[int], failed: Signature | None) -> set[int]:
    """Return the key of a parameter whose gradient the failed call may have made in a backward pass."""
    if failed is None:
        return set()
    sizes = training.without_gradient(ledger.key_of)
    return set(
        [key for key, nbytes in sizes.items() if key not in reached and nbytes == failed.output_bytes][:1]
    )


def _whole_bytes(ledger: Ledger, operations: list[Operation], inputs: Sequence[Version]) -> int:
    """Return the bytes of all the program's storages, and of those from which they are computed."""
    versions = {id(one): one for one in (*ledger.versions.values(), *inputs, *_read(operations))}
    largest: dict[int, int] = {}  # versions of one storage take its memory once
    for one in versions.values():
        largest[one.key] = max(largest.get(one.key, 0), one.nbytes)
    return sum(largest.values())


def _read(operations: list[Operation]) -> Iterable[Version]:
    return (source for operation in operations for source in operation.inputs)


def _operations(ledger: Ledger, inputs: Sequence[Version]) -> Iterable[Operation]:
    """Return the recipes of the program's storages, and of those from which they are computed."""
    found: dict[int, Operation] = {}
    pending: list[Version] = [*ledger.versions.values(), *ledger.scratch, *inputs]
    while pending:
        operation = pending.pop().operation
        if operation is not None and id(operation) not in found:
            found[id(operation)] = operation
            pending += operation.inputs
    return found.values()


class Call:
    """The memory of a call, besides constants: the bytes of its `inputs` and of its `result`."""

    operator: Any
    inputs: list[int]
    result: int

    @property
    def nbytes(self) -> int:
        return sum(self.inputs) + self.result

    @property
    def updates(self) -> bool:
        """Return whether this is an optimizer's update of many parameters at once."""
        return bool(self.operator.name.startswith(UPDATES))

    @property
    def waiting(self) -> int:
        """Return the bytes in memory while the smallest of its inputs is recomputed."""
        return sum(self.inputs) - min(self.inputs, default=0)

    def backward(self) -> Backward:
        return Backward(self)


class Backward(Call):
    """The likely memory of a call's backward.

    For most operators with one input, such as a convolution or an activation, it reads the output's gradient
    and the input or the output, and makes the input's gradient. With more inputs, there is one operator for
    each.
    """

    def __init__(self, call: Call) -> None:
        self.operator = call.operator
        if len(call.inputs) > 1:
            self.inputs, self.result = call.inputs, call.result
        else:
            self.inputs = [call.result, max([*call.inputs, call.result])]
            self.result = sum(call.inputs)


class Recorded(Call):
    """An operation that can be replayed."""

    def __init__(self, operation: Operation, parameters: set[tuple[int, ...]]) -> None:
        """parameters: the shapes taken to be parameters'. A sum of their gradients stays in memory."""
        self.operator = operation.signature.operator
        name, geometries = self.operator.name, operation.signature.geometries
        of_gradients = name in JOINING and all(_shape(one[0]) in parameters for one in geometries)
        self.joins = name in JOINING and not of_gradients
        self.inputs = [
            one.nbytes for one in operation.inputs if one.operation is not None and not of_gradients
        ]
        self.result = operation.signature.output_bytes


def _after(failed: Signature) -> Call:
    """Return the backward of an elementwise operator on the result of the call that failed."""
    call = Call()
    call.operator, call.result = failed.operator, failed.output_bytes
    call.inputs = [failed.output_bytes, failed.output_bytes]
    return call


class Sizes(Call):
    """A call of a signature. `shapes`: of its inputs that are not parameters."""

    def __init__(self, signature: Signature, parameters: set[tuple[int, ...]]) -> None:
        """parameters: the shapes taken to be parameters'."""
        inputs = [one for one in signature.geometries if _shape(one[0]) not in parameters]
        self.operator = signature.operator
        self.shapes = [tuple(one[0]) for one in inputs if one[0]]
        self.inputs = [_nbytes(one) for one in inputs]
        self.result = signature.output_bytes


def _shape(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's size in a form shared by all of its transposes."""
    return tuple(sorted(size))


def _nbytes(geometry: Geometry) -> int:
    size, stride, _, dtype, *_ = geometry
    total: int = dtype.itemsize
    for length, step in zip(size, stride, strict=True):
        total *= length if step or not length else 1
    return total


def _growth(calls: list[Sizes], failed: Sizes) -> Growth:
    """Return what is to be expected if the failed call takes more than those before.

    An evaluation often has a larger batch than the training before it. A result that grows from call to call
    (predictions gathered by `torch.cat`) is not a batch: nobody knows when that ends. As many calls again as
    there have been may follow.
    """
    if not failed.shapes:
        return Growth()
    length, *sample = failed.shapes[0]
    alike = [
        one
        for one in calls
        if one.operator is failed.operator and one.shapes and list(one.shapes[0][1:]) == sample
    ]
    lengths = {one.shapes[0][0] for one in alike} | {length}
    if len(lengths) > 1 and length == max(lengths) and failed.result * min(lengths) > failed.inputs[0]:
        results = sorted({one.result for one in alike if one.result < failed.result})
        grown = [one for one in alike if one.result * length != failed.result * one.shapes[0][0]]
        if grown and results:
            return Growth(
                2 * failed.nbytes, 0, failed.operator.name, failed.result - results[-1], failed.nbytes
            )
    before = {
        one.shapes[0][0]
        for one in alike
        if 0 < one.shapes[0][0] < length and one.result * length == failed.result * one.shapes[0][0]
    }
    nbytes = max(
        (
            one.nbytes * length // shape[0]
            for one in calls
            for shape in one.shapes
            if shape[0] in before and "backward" not in one.operator.name
        ),
        default=0,
    )
    return Growth(nbytes, length) if nbytes else Growth()
