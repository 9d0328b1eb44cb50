"""In-place operators on lists of tensors: optimizer steps, clipping or unscaling of gradients.

What persists over steps is a constant, so nothing is ever recomputed from a recipe of these operators: they
need none, nor the geometry of each of thousands of tensors. The rest of the fast path's work remains: their
inputs are resident, and what depends on the old contents is known.
"""

from __future__ import annotations

from time import perf_counter_ns as now_ns
from typing import Any

import torch

from dtrrun.core.graph import Signature, Version
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.storage import storage_of

Tensor = torch.Tensor
count_write = torch.autograd.graph.increment_version


def key_of(func: Any, tensors: list[Tensor], versions: list[Version]) -> tuple[Any, ...]:
    """Return what calls of about equal cost have in common. The types distinguish complex tensors."""
    nbytes = sum([version.nbytes for version in versions])
    return func, len(tensors), frozenset([tensor.dtype for tensor in tensors]), nbytes


def update(mode: Any, operator: Operator, func: Any, args: Any, kwargs: Any, entered: int) -> bool:
    """Run the operator if nothing about the call is special. Otherwise return False without effect."""
    ledger, recipes = mode.ledger, mode.recipes
    if ledger.dead:
        ledger.collect_dead()
    tensors: list[Tensor] = []
    written: list[Tensor] = []
    spans: list[slice] = []  # slices of the tensors that are written to
    for place, arg in enumerate(args):
        if isinstance(arg, Tensor):
            arg = (arg,)
        elif type(arg) not in (list, tuple) or not arg or not isinstance(arg[0], Tensor):
            continue
        if place in operator.mutates:
            written += arg
            spans.append(slice(len(tensors), len(tensors) + len(arg)))
        tensors += arg
    for arg in kwargs.values() if kwargs else ():
        if isinstance(arg, Tensor):
            tensors.append(arg)
        elif type(arg) in (list, tuple):
            return False
    versions, clock = ledger.versions, ledger.clock
    try:
        found = [versions[ledger.key_of(storage_of(tensor))] for tensor in tensors]
        targets = [version for span in spans for version in found[span]]
        writes = [tensor._version for tensor in written] if operator.unversioned else ()
    except (KeyError, NotImplementedError, RuntimeError, TypeError):  # new, sparse, of inference mode, None
        return False
    signature: Signature | None = mode.updates.get(key_of(func, tensors, found))
    if signature is None or not signature.calls:  # its first call failed
        return False
    if signature.output_bytes and ledger.resident_bytes + signature.output_bytes > ledger.limit:
        return False
    for version in found:
        if not version.resident:
            return False
        version.last_access = clock
    loose = []
    wants_copy = mode.slow_path.dtr.copies.wants
    for version, tensor in zip(targets, written, strict=True):
        if version.needed_by is not None or wants_copy(version):
            return False
        if version.operation is not None:
            if tensor.requires_grad or (version.used and ledger.pressure):
                return False
            loose.append(version)
    if len(loose) == len(targets):
        return False  # all may need a recipe
    for version in loose:
        recipes.make_constant(version, "updated in place")
    started = now_ns()
    try:
        mode.call(func, args, kwargs or {})
        ended = now_ns()
        unseen = [tensor for tensor, count in zip(written, writes, strict=False) if tensor._version == count]
        if unseen:
            count_write(unseen)
        cost = ended - started
        if signature.calls < Signature.SETTLED:
            signature.cost = min(cost, signature.cost)
            signature.calls += 1
        ledger.clock += signature.cost
        ledger.age += 1
        mode.operators_ns += cost
        for version in targets:
            if version.used and not version.superseded:
                recipes.supersede(version, None, 0)
    except BaseException:
        for version in targets:
            recipes.half_written(version)
        raise
    left = now_ns()
    mode.bookkeeping_ns += started - entered + left - ended
    if left > mode.slow_path.next_tick:
        mode.slow_path.tick()
    return True
