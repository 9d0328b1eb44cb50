"""The graph of storage versions and the operations that made them (paper, App. C.1).

A `Version` is a node. Mutation follows the paper's reference layer (App. C.6): an in-place operator makes a
new version, which takes over the storage. The old version remains, without memory, while a recipe needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Geometry = tuple[Any, ...]
"""(size, stride, storage offset, dtype), optionally with the conjugate and negative bits."""


class Version:
    """One version of one storage. It is notified when the storage dies.

    Made in C++ (`core/version.h`, `bindings/nodes.h`), with the methods of this class added. References run
    from dependents to inputs only, so a version that nothing needs is freed at once.
    """

    key: int  # id of the storage in the ledger's table
    nbytes: int  # m(t), as rounded by the allocator
    cost: int  # c_0(t), ns
    last_access: int  # ledger clock, ns
    age: int  # the ledger's operator count when the storage was made
    mutations: int  # number of mutations since the storage was made
    resident: bool
    locks: int  # > 0 while an operator needs it
    device: int  # in whose account it is (`Ledger.use`)
    readers: int  # how often recipes read it
    operation: Operation | None  # its recipe; None for a constant
    pin: str | None  # why it can't be evicted
    escaped: bool  # other code may write to the memory unnoticed, now or later
    away: bool  # a constant whose content the program has taken away, and will bring back
    fixed: bool  # the memory must stay where it is, though nothing else writes to it
    period: int  # of the clock, between the two uses around its last stay on the host; 0: there was none
    superseded: bool  # a later version has taken over the storage
    used: bool  # some recipe has read it
    scratch: Any  # a storage of its own: recomputed, or the copy of a constant that has changed since
    has_left: bool  # it has no memory, but can be brought back from the host
    copy: Any  # copy of a constant that is about to change, for use once it is superseded
    dependents: list[Version] | None  # those whose recipes are known to need this; None if none is noted
    extent: int  # bytes of the storage that its first tensor reaches, -1 for all (only set under verify)
    fingerprint: Any  # of the content when it was evicted, under verify; or None
    uses: Any  # set by foresight: () once the program will not use it again
    released: bool  # it has memory of its own that the program does not hold
    pool_id: int | None  # its number in the policy's pool
    has_storage: bool  # the program still holds the storage that this version has or had

    def __init__(self, storage: Any, on_death: Callable[[Any], None] | None) -> None:
        raise NotImplementedError

    def __call__(self) -> Any:
        """Return the storage, or None if it is gone."""
        raise NotImplementedError

    def weak(self) -> Callable[[], Version | None]:
        """Return a function that returns this version, or None once it has gone."""
        raise NotImplementedError

    def forget_policy(self) -> None:
        """Forget the policy, as another takes over: this is in no pool, neither evicted nor released."""
        raise NotImplementedError

    def forget_dependents(self) -> None:
        """Note that nothing depends on it any more."""
        raise NotImplementedError

    @property
    def constant(self) -> bool:
        """Whether it has no recipe, and so is never dropped, though it may leave for the host."""
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

    nbytes: m(t), as for a version. size: of the storage that a replay allocates, in bytes.
    """

    __slots__ = ("nbytes", "size")

    def __init__(self, nbytes: int, size: int) -> None:
        self.nbytes, self.size = nbytes, size


class Operation:
    """A recipe: a recorded operator call that can be run again. It holds no reference to any tensor.

    Made in C++, like a version.
    """

    recorded: Any  # in a session, the operator that runs again
    tensors: Sequence[Any]  # the operator's tensor arguments in order, each a Version or an Overwritten
    inputs: Sequence[Version]  # the versions it reads
    signature: Signature
    secured: bool  # the recipe stays replayable, whatever the program releases
    constants: tuple[Any, ...]  # storages kept alive because something evicted is computed from them
    kept_inputs: tuple[Any, ...]  # storages of inputs that were resident when the output was evicted
    outputs: Any
    """What it makes. Assign pairs (where, version); only weak references to the versions are kept.

    A where >= 0 is an index into the results; ~where is the index of the argument whose memory was written.
    Reading returns `where` if there is one output (None for 0), otherwise such pairs.
    """
    places: list[int]
    """Where its outputs are, including those that are gone."""

    def made(self, one: Version) -> list[tuple[int, Version]]:
        """Return pairs of where and each version that this operation makes, including `one`."""
        raise NotImplementedError

    def versions(self, one: Version) -> list[Version]:
        """Return every version that this operation makes, including `one`."""
        return [version for _, version in self.made(one)]

    def mutated(self) -> set[int]:
        """Return the ids of the input versions whose storage the operator writes to."""
        return {id(self.tensors[~where]) for where in self.places if where < 0}


def distinct(tensors: Sequence[Any]) -> list[Version]:
    """Return the distinct versions among an operator's tensors. A `_foreach_` operator has thousands."""
    return list({id(one): one for one in tensors if type(one) is not Overwritten}.values())


class TensorSlot:
    """Placeholder for a tensor among recorded arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "TENSOR_SLOT"


TENSOR_SLOT = TensorSlot()


class Signature:
    """What calls of one operator on tensors of the same geometry have in common.

    `cost` is in ns: the minimum over the first few calls, which excludes warm-up and keeps decisions stable.
    `output_bytes` is what a call allocates: its results and, on a GPU, its temporary memory. `guessed`:
    `output_bytes` is a prediction because no call has finished yet. `timed`: a call was timed with GPU
    events, while the GPU was busy. `workspace`: the part of `output_bytes` that a GPU library can do without
    by choosing another algorithm; 0 if there is none.
    """

    SETTLED = 8  # number of calls after which the cost is fixed
    same: tuple[int, ...] = ()

    def __init__(self, operator: Any, geometries: tuple[Geometry, ...]) -> None:
        """operator: any object with a `name`. geometries: those of its tensors."""
        self.operator = operator
        self.geometries = geometries
        self.calls = 0
        self.cost = 0
        self.output_bytes = 0
        self.guessed = self.timed = False
        self.workspace = 0
        self.replayed_as: Signature | None = None  # if a replay omits some of the tensors

    def learn_bytes(self, nbytes: int, opaque: bool, varies: bool, measured: bool) -> None:
        """Learn that its results take `nbytes`: expect that of the next call, or the most if it varies.

        opaque: one result is a workspace. measured: the expectation includes other workspaces, and takes
        precedence. In C++.
        """
        raise NotImplementedError


class Graph:
    """Makes the nodes of a graph."""

    def __init__(self, extension: Any, signature: type[Signature]) -> None:
        """extension: a C++ extension. signature: the class of its signatures."""
        self.extension, self.signature = extension, signature
        self.version: type[Version] = extension.Version
        self.operation: type[Operation] = extension.Operation
        self.key_of: Callable[[Any], int] = extension.key_of
        """Returns the key of a storage's versions."""

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
