"""In-place operators on lists of tensors: an optimizer's step, clipped or unscaled gradients.

What lives on over steps is a constant, so that nothing is ever recomputed from a recipe of theirs: they need
none, and of thousands of tensors not each one's geometry. The rest of the short cut's work stays: what they
read is in memory, and who relies on the old contents is known.
"""

from __future__ import annotations

from time import perf_counter_ns as now_ns
from typing import Any

import torch

from dtrrun.ledger.record import Record, Signature
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.storage import storage_of

Tensor = torch.Tensor
count_write = torch.autograd.graph.increment_version


def key_of(func: Any, tensors: list[Tensor], records: list[Record]) -> tuple[Any, ...]:
    """What calls that take the same time have in common, near enough; the types tell complex ones apart."""
    nbytes = sum([record.nbytes for record in records])
    return func, len(tensors), frozenset([tensor.dtype for tensor in tensors]), nbytes


def update(mode: Any, operator: Operator, func: Any, args: Any, kwargs: Any, entered: int) -> bool:
    """Run the operator if nothing about the call is special; else False, and nothing has happened."""
    careful, ledger = mode.careful, mode.ledger
    if ledger.dead:
        ledger.drain()
    tensors: list[Tensor] = []
    written: list[Tensor] = []
    spans: list[slice] = []  # of the tensors: those that are written to
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
    records, clock = ledger.records, ledger.clock
    try:
        found = [records[id(storage_of(tensor))] for tensor in tensors]
        targets = [record for span in spans for record in found[span]]
        versions = [tensor._version for tensor in written] if operator.unversioned else ()
    except (KeyError, NotImplementedError, RuntimeError, TypeError):  # new, odd, of inference mode, None
        return False
    signature: Signature | None = careful.updates.get(key_of(func, tensors, found))
    if signature is None or not signature.calls:  # its first call has failed
        return False
    if signature.output_bytes and ledger.resident_bytes + signature.output_bytes > ledger.limit:
        return False
    for record in found:
        if not record.resident:
            return False
        record.last_access = clock
    loose = []
    for record, tensor in zip(targets, written, strict=True):
        if record.secured_by is not None:
            return False
        if record.op is not None:
            if tensor.requires_grad:
                return False
            loose.append(record)
    if len(loose) == len(targets):
        return False  # all may have a recipe
    for record in loose:
        ledger.make_constant(record, "updated in place")
    started = now_ns()
    try:
        func(*args, **(kwargs or {}))
        ended = now_ns()
        unseen = [
            tensor for tensor, version in zip(written, versions, strict=False) if tensor._version == version
        ]
        if unseen:
            count_write(unseen)
        cost = ended - started
        if signature.calls < Signature.SETTLED:
            signature.cost = min(cost, signature.cost)
            signature.calls += 1
        ledger.clock += signature.cost
        ledger.age += 1
        mode.operators_ns += cost
        for record in targets:
            if record.used and not record.superseded:
                ledger.supersede(record, None, 0)
    except BaseException:
        for record in targets:
            ledger.half_written(record)
        raise
    left = now_ns()
    mode.bookkeeping_ns += started - entered + left - ended
    if left > careful.next_tick:
        careful.tick()
    return True
