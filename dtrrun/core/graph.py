"""The graph of storage versions and the operations that made them (paper, App. C.1).

A `Version` is a node. Mutation follows the paper's reference layer (App. C.6): an in-place operator makes a
new version, which takes over the storage. The old version remains, without memory, while a recipe needs it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Geometry = tuple[Any, ...]
"""(size, stride, storage offset, dtype), optionally with the conjugate and negative bits."""


class Version:
    """One version of one storage. It is told when the storage dies.

    Made in C++ (`bindings/nodes.h`), which gets the methods of this class. References run from dependents to
    inputs only, so a version that nothing needs is freed at once.
    """

    key: int  # id of the storage in the ledger's table
    nbytes: int  # m(t), as rounded by the allocator
    cost: int  # c_0(t), ns
    last_access: int  # ledger clock, ns
    age: int  # the ledger's operator count when the storage was made
    mutations: int  # number of mutations since the storage was made
    resident: bool
    locks: int  # > 0 while an operator needs it
    operation: Operation | None  # its recipe; None for a constant
    pin: str | None  # why it can't be evicted
    escaped: bool  # other code may write to the memory unnoticed, now or later
    superseded: bool  # a later version has taken over the storage
    used: bool  # some recipe reads it
    scratch: Any  # a storage of its own: recomputed, or the copy of a constant that has changed since
    copy: Any  # of a constant that is about to change: a storage, for when it has been superseded
    block: Any  # the ledger's entry for `scratch`
    needed_by: list[Any] | None  # weakly, versions whose recipes read this, once secured
    extent: int  # bytes of the storage that its first tensor reaches, -1 for all (only set under verify)
    fingerprint: bytes | None  # of the content when it was evicted, under verify
    uses: Any  # by foresight: () once the program will not use it again
    released: bool  # it has memory of its own, which the program does not have
    pool_id: int | None  # its number in the policy's pool
    has_storage: bool  # the program still holds the storage that this version has or had

    def __init__(self, storage: Any, on_death: Callable[[Any], None] | None) -> None:
        raise NotImplementedError

    def __call__(self) -> Any:
        """Return the storage, or None if it is gone."""
        raise NotImplementedError

    def forget_policy(self) -> None:
        """Another policy takes over: this is in no pool, and neither evicted nor released."""
        raise NotImplementedError

    @property
    def constant(self) -> bool:
        """Whether it has no recipe, and so is never evicted."""
        return self.operation is None

    @property
    def inputs(self) -> Sequence[Version]:
        """deps(S) of App. C.2. A version may occur twice."""
        operation = self.operation
        return () if operation is None else operation.inputs

    @property
    def alive(self) -> bool:
        """Whether the program itself still holds this version."""
        return not self.superseded and self.has_storage

    def memory(self) -> Any:
        """Return the storage that holds this version's bytes, or None."""
        if self.scratch is not None:
            return self.scratch
        return None if self.superseded else self()


class Overwritten:
    """Stands in a recipe for an input that the operator overwrites completely without reading it.

    nbytes: m(t), as of a version. size, device: of the storage that a replay allocates, in bytes.
    """

    __slots__ = ("device", "nbytes", "size")

    def __init__(self, nbytes: int, size: int, device: Any) -> None:
        self.nbytes, self.size, self.device = nbytes, size, device


class Operation:
    """A recipe: a recorded operator call that can be run again. It holds no reference to any tensor."""

    recorded: Any  # what the executor needs to run it again; opaque here
    tensors: Sequence[Any]  # the operator's tensor arguments in order, each a Version or an Overwritten
    inputs: Sequence[Version]  # the versions it reads
    outputs: tuple[tuple[int, Any], ...] | int | None
    """Pairs (where, weak reference to a version).

    A where >= 0 is an index into the results; ~where is the index of the argument whose memory was written.
    An int: there is only one such pair, with the version that has this operation. None: the same as 0.
    """
    signature: Signature
    secured: bool  # the recipe stays replayable, whatever the program releases
    constants: tuple[Any, ...] | None  # storages kept alive because something evicted is computed from them
    kept_inputs: tuple[Any, ...]  # storages of inputs that were resident when the output was evicted

    def made(self, one: Version) -> list[tuple[int, Version]]:
        """Return every version that this operation makes, including `one`, and where (see `outputs`)."""
        if not isinstance(self.outputs, tuple):
            return [(self.outputs or 0, one)]
        return [(where, version) for where, reference in self.outputs if (version := reference()) is not None]

    def versions(self, one: Version) -> list[Version]:
        """Return every version that this operation makes, including `one`."""
        return [version for _, version in self.made(one)]

    def mutated(self) -> set[int]:
        """Return the ids of the input versions whose storage the operator writes to."""
        if self.outputs is None:
            return set()
        places = [where for where, _ in self.outputs] if isinstance(self.outputs, tuple) else [self.outputs]
        return {id(self.tensors[~where]) for where in places if where < 0}

    def references_to(self, version: Version) -> int:
        """Return how often this recipe refers to a version."""
        raise NotImplementedError


def read_by_others(version: Version, table: int, operation: Operation | None = None) -> bool:
    """Return whether anything but `operation` refers to a version, such as another recipe that reads it.

    table: how many tables the caller knows to refer to it, besides one variable of the caller. This counts
    references because counting readers would need a finalizer for each recipe, which is slow and can lose a
    Ctrl-C.
    """
    known = _REFERENCES_OF_A_CALL + table
    if operation is not None:
        known += operation.references_to(version)
    return sys.getrefcount(version) > known


def _references_of_a_call() -> int:
    """Return what `getrefcount` reports, in a callee, for an object held by one variable of the caller.

    This depends on the version of Python.
    """

    def count(one: object, _table: int) -> int:
        return sys.getrefcount(one)

    alone = object()
    return count(alone, 0)


_REFERENCES_OF_A_CALL = _references_of_a_call()


def distinct(tensors: list[Any]) -> list[Version]:
    """Return the distinct versions among an operator's tensors. A `_foreach_` operator has thousands."""
    return list({id(one): one for one in tensors if type(one) is not Overwritten}.values())


def together(made: list[tuple[int, Any]]) -> tuple[tuple[int, Any], ...] | int | None:
    """Return an operation's `outputs`, given the pairs."""
    return tuple(made) if len(made) != 1 else made[0][0] or None


class TensorSlot:
    """Placeholder for a tensor among recorded arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "TENSOR_SLOT"


TENSOR_SLOT = TensorSlot()


class Signature:
    """What calls of one operator on tensors of the same geometry share.

    `cost` is in ns: the minimum over the first few calls, which excludes warm-up and keeps decisions stable.
    `output_bytes` is what a call allocates: its results and, on a GPU, its temporary memory. `guessed`:
    `output_bytes` is a prediction because no call has finished yet. `timed`: the cost was measured with GPU
    events. `workspace`: the part of `output_bytes` that a GPU library can do without by choosing another
    algorithm; 0 if there is none.
    """

    SETTLED = 8  # number of calls after which the cost is fixed
    timed = False
    same: tuple[int, ...] = ()

    def __init__(self, operator: Any, geometries: tuple[Geometry, ...]) -> None:
        """operator: any object with a `name`. geometries: those of its tensors."""
        self.operator = operator
        self.geometries = geometries
        self.calls = 0
        self.cost = 0
        self.output_bytes = 0
        self.guessed = False
        self.workspace = 0
        self.replayed_as: Signature | None = None  # if a replay omits some of the tensors


class Walks(Protocol):
    """Looks through all versions, in C++ (`core/history.h`, `core/copies.h`). table: `Ledger.versions`."""

    def held_bytes(self, table: Any) -> int:
        """Return the bytes of what the program has and recipes can make."""

    def weigh(self, table: Any) -> tuple[set[int], int]:
        """Return the keys of the constants worth a copy, and how many versions have been looked at."""

    def carried(self, table: Any, cut_age: int) -> list[Version]:
        """Return the versions that would be recomputed from released storages older than `cut_age`.

        The youngest first, like the next.
        """

    def mutated(self, table: Any, age: int, trusted: list[Version]) -> list[Version]:
        """Return the versions in memory, since `age`, whose recipes have lost an input.

        trusted: `Foreign.trusted()`.
        """


class Graph:
    """Makes the nodes of a graph."""

    def __init__(
        self,
        version: type[Version],
        operation: type[Operation],
        walks: Walks,
        signature: type[Signature] = Signature,
        queue: Callable[[], Any] = deque,
        versions: Callable[[Any], Any] = lambda _queue: {},
        key_of: Callable[[Any], int] = id,
    ) -> None:
        """version, operation, signature: the classes. queue: makes a queue for those that die.

        versions: makes a map of versions by their keys. It gets the queue. key_of: gives the key of a
        storage's versions.
        """
        self.version, self.operation, self.signature, self.walks = version, operation, signature, walks
        self.queue, self.versions, self.key_of = queue, versions, key_of

    def new_version(self, storage: Any, on_death: Any, nbytes: int, age: int, clock: int) -> Version:
        """Return a resident version without a recipe."""
        version = self.version(storage, on_death)
        version.nbytes, version.age, version.last_access = nbytes, age, clock
        return version

    def new_operation(
        self, recorded: Any, signature: Signature, tensors: Sequence[Any], inputs: Sequence[Version]
    ) -> Operation:
        """Return a recipe without outputs."""
        operation = self.operation()
        operation.recorded, operation.signature = recorded, signature
        operation.tensors, operation.inputs = tensors, inputs
        return operation
