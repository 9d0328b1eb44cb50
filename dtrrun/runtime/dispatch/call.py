"""One call of a PyTorch operator, taken apart: the storages it uses, those it writes to, and its recipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from dtrrun.core.graph import TENSOR_SLOT, Geometry, Overwritten, Signature, Version
from dtrrun.core.operator import Call
from dtrrun.runtime.dispatch.arguments import covers, geometry_of, holes_in, is_leaf, outputs_of
from dtrrun.runtime.dispatch.kernels import Again, Reading
from dtrrun.runtime.guards import Autocast, below
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.storage import device_type_of, size_of, storage_of

UNINITIALISED = "uninitialised"
"""The pin of memory that nothing has written to (`core/pin.h`)."""


class TensorCall(Call):
    """A call in progress, with its tensors. `native/observed.h` shows fast-path calls to observers with the
    same attributes."""

    __slots__ = (
        "autocast",
        "common",
        "counted",
        "device_type",
        "ended",
        "func",
        "generators",
        "identity",
        "kept",
        "kwargs",
        "measured",
        "needed",
        "operator",
        "reading",
        "result",
        "rng",
        "started",
        "state",
        "template",
        "tensors",
        "unplain",
        "writes",
    )
    template: list[Any]
    """The positional arguments, with each tensor replaced by TENSOR_SLOT."""
    kwargs: dict[str, Any]
    tensors: list[torch.Tensor]
    writes: Sequence[list[int]]
    """The values of `written`."""
    state: int
    """The settings that its kernel sees, as numbered by the extension."""
    autocast: Autocast
    """The autocast state of operators that its kernel calls."""
    generators: Sequence[torch.Generator]
    """The generators that it was given."""
    rng: Any
    """The generators that it may draw from, with their states before the call; None if there are none."""
    common: bool
    """Whether every call with such arguments has the same signature."""
    identity: Any
    """Its signature's key."""
    unplain: int
    """Bytes of its inputs without plain storage."""
    counted: int
    """Bytes of its results without plain storage."""
    kept: list[torch.Tensor]
    """Its tensors that native code has kept, if the operator is foreign."""
    reading: Reading | None
    """What its kernel reads besides its arguments; None if it is not written in Python, or PyTorch's own."""
    result: Any
    """Its result, once it has run."""
    measured: bool
    """Whether its allocations are measured (on a GPU)."""
    needed: int
    """On a GPU: the bytes that it used at its peak, -1 if not measured."""
    started: int
    """When its kernel was called, in ns; 0 before that."""
    ended: int
    """When its kernel returned."""

    def __init__(self, func: Any, operator: Operator, device_type: str) -> None:
        """device_type: the session's."""
        super().__init__()
        self.func, self.operator, self.device_type = func, operator, device_type
        self.template, self.kwargs, self.tensors, self.kept = [], {}, [], []
        self.writes = self.generators = self.autocast = ()
        self.rng = self.identity = self.result = self.reading = None
        self.common = self.measured = False
        self.unplain = self.counted = self.started = self.ended = 0
        self.needed = -1
        self.view = operator.only_views
        self.untouching = operator.untouching
        self.reshapes = operator.reshapes_storage
        self.opaque = operator.shares_memory
        self.uninitialised = operator.uninitialised
        self.shrinks = not (operator.view or (operator.mutates and not operator.grows))

    def take_by_value(self, key: list[Any]) -> bool:
        """Copy numbers on the CPU, given along with tensors on a GPU, into the template.

        Kernels read them at launch, so the program may overwrite them later. Without copies, nothing computed
        with a scale, a mask value or the seed of an attention's dropout could be recomputed. Adds to `key`
        what a signature needs of them. Returns whether there are any.
        """
        tensors = self.tensors
        if self.operator.collective or all(tensor.dim() or tensor.is_cuda for tensor in tensors):
            return False
        kept, place, found = [], 0, False
        for argument, value in enumerate(self.template):
            count = holes_in(value)
            own = tensors[place : place + count]
            place += count
            if value is not TENSOR_SLOT or argument in self.operator.mutates or not is_number(own[0]):
                kept += own
                continue
            with below():
                self.template[argument] = own[0].clone()
            key += [argument, own[0].dtype]
            found = True
        tensors[:] = kept + tensors[place:]
        return found

    def find_statistics(self) -> None:
        """Note which tensors are running statistics that the call, in training mode, does not read."""
        rule = self.operator.statistics
        if rule is None:
            return
        if rule.flag is not None and (rule.flag >= len(self.template) or not self.template[rule.flag]):
            return
        self.statistics = [
            self.template[:position].count(TENSOR_SLOT)
            for position in rule.positions
            if self.template[position] is TENSOR_SLOT
        ]
        self.updates_statistics = rule.updates and bool(self.statistics)

    @property
    def geometries(self) -> Sequence[Geometry]:
        """The geometries of its tensors, by hole."""
        return self.signature.geometries

    @property
    def leaves(self) -> list[int]:
        """The holes of leaves of autograd."""
        if self.opaque:
            return []
        return [hole for hole, one in enumerate(self.tensors) if one.requires_grad and is_leaf(one)]

    @property
    def results(self) -> list[tuple[torch.UntypedStorage, Geometry] | None]:
        """The storage and geometry of each tensor among its results; None for those without a plain one."""
        found: list[tuple[torch.UntypedStorage, Geometry] | None] = []
        for tensor in outputs_of(self.result, []):
            try:
                found.append((storage_of(tensor), geometry_of(tensor)))
            except (NotImplementedError, RuntimeError):
                found.append(None)
        return found

    @property
    def places(self) -> list[int] | None:
        """The place of each tensor in the operator's lists, -1 for one that is in none of them.

        None if the call can't be split into calls with parts of the lists (`native/split_lists.h`).
        """
        if not self.operator.splits:
            return None
        tensors = iter(self.tensors)
        return places_in_lists(
            ([*islice(tensors, holes_in(value))], len(value) if type(value) is list else 0)
            for value in (*self.template, *self.kwargs.values())
        )

    def changed(self) -> list[Version]:
        """Return the versions that it will write to."""
        changed = [self.versions[holes[0]] for holes in self.written.values()]
        return changed + [self.versions[hole] for hole in self.statistics] if self.statistics else changed

    def is_leaf(self, place: int) -> bool:
        tensor = self.tensors[self.writes[place][0]]
        return tensor.requires_grad and is_leaf(tensor)

    def overwrites(self, place: int) -> bool:
        holes = self.writes[place]
        version = self.versions[holes[0]]
        if self.operator.overwrites_blank and version.pin == UNINITIALISED:
            return True
        return (
            self.operator.overwrites
            and covers(self.tensors[holes[0]])
            and sum(1 for other in self.versions if other is version) == 1
        )

    def overwritten(self, place: int) -> Overwritten:
        version = self.versions[self.writes[place][0]]
        storage = version()
        assert storage is not None
        return Overwritten(version.nbytes, storage.nbytes(), storage.device)

    def resized(self, hole: int, version: Version) -> int | None:
        if self.operator.foreach:  # these never resize, and have thousands of tensors
            return None
        storage = version()
        if storage is None or device_type_of(storage) != self.device_type:
            return None
        nbytes = size_of(storage)
        return None if nbytes == version.nbytes else nbytes

    def recorded(self) -> Any:
        func, template, rule = self.func, self.template, self.operator.statistics
        if self.statistics and rule is not None:
            func = rule.replay or func
            template = [None if place in rule.positions else arg for place, arg in enumerate(template)]
        if self.reading is not None:
            func = Again(func, self.reading)
        return func, template, self.kwargs or None, self.rng, self.state, self.autocast

    def replay_signature(self) -> Signature:
        signature = self.signature
        if not self.statistics:
            return signature
        if signature.replayed_as is None:
            kept = [g for hole, g in enumerate(signature.geometries) if hole not in self.statistics]
            signature.replayed_as = type(signature)(signature.operator, tuple(kept))
            signature.replayed_as.calls = signature.calls
        signature.replayed_as.guessed = signature.guessed
        signature.replayed_as.cost = signature.cost
        signature.replayed_as.output_bytes = signature.output_bytes
        return signature.replayed_as

    def made(self, nbytes: int) -> None:
        operator = self.operator
        varies = operator.dynamic or operator.grows
        self.signature.learn_bytes(nbytes + self.counted, operator.opaque_output >= 0, varies, self.measured)
        if self.statistics:
            self.replay_signature()


def places_in_lists(arguments: Iterable[tuple[Sequence[torch.Tensor], int]]) -> list[int] | None:
    """Return the value of `TensorCall.places`, for an operator that can be split.

    arguments: the tensors of each argument, and the length of the list that it is; 0 if it is none.
    """
    places: list[int] = []
    lengths = set()
    for tensors, length in arguments:
        if not length:
            places += [-1] * len(tensors)
            continue
        lengths.add(length)
        if tensors and (len(tensors) != length or not are_alike(tensors)):
            return None
        places += range(len(tensors))
    return places if len(lengths) == 1 and max(places, default=-1) >= 0 else None


def are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether part of a list of tensors takes the same kernel as the list (`native/split_lists.h`)."""
    first = tensors[0]
    return not first.is_cuda or all(
        (one.dtype, one.device) == (first.dtype, first.device) and one.is_contiguous() for one in tensors
    )


def is_number(tensor: torch.Tensor) -> bool:
    """Return whether a CPU tensor can be replaced by a copy: one real element and no lazy bits.

    A copy would no longer stand for a number, and its lazy bits would be resolved.
    """
    return (
        tensor.device.type == "cpu"
        and not tensor.dim()
        and tensor.layout == torch.strided
        and not tensor.is_complex()
    )
