"""The operator database, and composites that it lacks, in the contexts that a program can set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db

from tests.conformance.programs import difference
from tests.database import composites
from tests.database.contexts import INPUTS, Context, around, covering, within
from tests.database.judge import (
    FAILED,
    NONDETERMINISTIC,
    Probe,
    Program,
    Verdict,
    Way,
    always_repeats,
    inside,
    plain,
    raised,
)
from tests.database.operators import (
    UNREPEATABLE,
    arguments,
    blanks,
    described,
    name_of,
    ramp,
    samples,
)
from tests.database.replicas import Replicas, tensors

DEFAULTS_OF_CONTEXT = ("dtype", "device")
"""What samples of factories specify, and a program in a context does not."""


COUNTED = Way("counted", budget_bytes=None)
EVICTED = (Way("inside 1 B"), Way("inside 1 B, with care", careful=True))
"""Everything is evicted at every moment: programs alternate between these."""


def names() -> list[str]:
    return sorted({name_of(info) for info in op_db} | set(composites.COMPOSITES))


class InContext:
    """One program in one context."""

    def __init__(
        self, name: str, context: Context, turn: int, program: Program, repeats: bool = True
    ) -> None:
        self.name = f"{name} [{context}]"
        self.context = context
        self.turn = turn
        self.program = program
        self.repeats = repeats


def cases(name: str) -> Iterator[InContext]:
    contexts = covering()
    if name in composites.COMPOSITES:
        fitting = [
            one for one in contexts if not one.variant and one.inputs in (torch.float32, torch.bfloat16)
        ]
        for turn, context in enumerate(fitting):
            yield InContext(name, context, turn, partial(_composite, composites.COMPOSITES[name], context))
    for place, info in enumerate(op_db):
        if name_of(info) == name:
            found = {
                dtype: _small(samples(info, dtype))
                for dtype in INPUTS
                if dtype in info.supported_dtypes("cpu")
            }
            for turn, context in enumerate(contexts):
                program = _operator(info, context, found.get(context.inputs), turn)
                if program is not None:
                    yield InContext(name, context, place + turn, program, name not in UNREPEATABLE)


def _small(given: list[tuple[int, Any]]) -> list[Any]:
    """Return the samples with the fewest elements: contexts do not depend on sizes."""
    return sorted((sample for _, sample in given), key=_elements)[: (len(given) + 1) // 2 + 1]


def _elements(sample: Any) -> int:
    return sum(one.numel() for one in tensors([sample.input, sample.args, sample.kwargs]))


def _operator(info: Any, context: Context, given: list[Any] | None, turn: int) -> Program | None:
    """Return the operator's variant on one of its samples, if any; each context takes the next sample."""
    function = info.inplace_variant if context.variant == "in place" else info.op
    if not given or function is None or (context.variant == "out=" and not info.supports_out):
        return None
    return partial(_call, function, given[turn % len(given)], context)


def judge(case: InContext) -> Verdict:
    """Compare a plain run in the context with one in each of the ways."""
    program, context = case.program, case.context
    verdict = Verdict()
    with around(context):
        expected = plain(program)
        for way in (COUNTED, EVICTED[case.turn % len(EVICTED)]):
            found, probe, report = inside(program, way)
            verdict.evicted += probe.evicted
            told = difference(expected, found)
            if told and not verdict.reasons and not (case.repeats and always_repeats(program, expected)):
                return Verdict(NONDETERMINISTIC, ["other bits each time"], verdict.evicted)
            if told:
                verdict.reasons.append(f"{way.name}: {told}{raised(found)}")
            elif report["mismatches"] and case.repeats:
                verdict.reasons.append(
                    f"{way.name}: other bits after rematerialization: {report['mismatches']}"
                )
    if verdict.reasons:
        verdict.status = FAILED
    return verdict


def _call(function: Any, sample: Any, context: Context, probe: Probe) -> Any:
    in_place, out = context.variant == "in place", context.variant == "out="
    copies = Replicas(inner=in_place)
    first, args, kwargs = arguments(copies, sample)
    if out:  # does not support gradients
        copies.leaves = [leaf.requires_grad_(False) for leaf in copies.leaves]
    if not tensors([first, args, kwargs]):
        kwargs = {name: value for name, value in kwargs.items() if name not in DEFAULTS_OF_CONTEXT}
    if in_place and isinstance(first, torch.Tensor) and first.is_leaf:
        first = first.view_as(first)
    if out:
        kwargs["out"] = blanks(function, first, args, kwargs)
        if kwargs["out"] is None:
            return "no tensors"
    probe()
    found = _run(lambda: function(first, *args, **kwargs), copies.leaves, context, probe)
    return [found, first, args, kwargs]


def _composite(make: Callable[[], composites.Made], context: Context, probe: Probe) -> Any:
    function, given = make()
    leaves = [one.to(context.inputs).requires_grad_() for one in given]
    module = next(
        (
            one
            for one in (function, *getattr(function, "keywords", {}).values())
            if isinstance(one, nn.Module)
        ),
        None,
    )
    weights = []
    if module is not None:
        module.to(context.inputs)
        weights = list(module.parameters())
    probe()
    inputs = [leaf.clone() for leaf in leaves]
    found = _run(lambda: function(*inputs), leaves + weights, context, probe)
    return [found, inputs, dict(module.named_buffers()) if module is not None else None]


def _run(call: Callable[[], Any], leaves: list[torch.Tensor], context: Context, probe: Probe) -> Any:
    with within(context) as seen:
        result = call()
        probe(result)
        told = described(result)
        told += [[[str(one.device), one.is_inference()] for one in tensors(result)]]
        gradients = _gradients(result, leaves, probe) if context.grad == "backward inside" else None
    if context.grad == "backward after":
        gradients = _gradients(result, leaves, probe)
    return [told, gradients, seen]


def _gradients(result: Any, leaves: list[torch.Tensor], probe: Probe) -> Any:
    outputs = [one for one in tensors(result) if one.requires_grad]
    if not outputs or not leaves:
        return None
    found = torch.autograd.grad(outputs, leaves, ramp(outputs), allow_unused=True)
    probe(found)
    return found
