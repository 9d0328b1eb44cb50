"""What the ledger knows about one storage at one version, and about the operator that made it.

A `Record` is a node of the paper's dependency graph (App. C.1). Mutation follows the paper's reference layer
(App. C.6): an in-place operator makes a new record, which takes over the storage; the old one lives on, not
resident, as long as some recipe needs that version.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

Geometry = tuple[Any, ...]
"""(size, stride, storage offset, dtype), or the same with conjugate and negative bits."""


class Record(weakref.ref):  # type: ignore[type-arg]
    """One version of one storage; itself the weak reference that sees the storage die.

    It compares and hashes by its referent, as every `weakref.ref`: use `is` and `id`.
    References run from dependents to inputs only, so a record that nothing needs is freed at once.
    """

    __slots__ = (
        "__weakref__",
        "age",
        "block",
        "bound",
        "component",
        "cost",
        "dependents",
        "exposed",
        "extent",
        "fingerprint",
        "held",
        "key",
        "last_access",
        "locks",
        "nbytes",
        "neighbourhood",
        "op",
        "pin",
        "resident",
        "secured_by",
        "superseded",
        "used",
        "uses",
        "version",
    )
    key: int  # id of the storage in the ledger's table
    nbytes: int  # m(t), as the allocator rounds it
    cost: int  # c_0(t), ns
    last_access: int  # ledger clock, ns
    age: int  # the ledger's operator count when the storage was made
    version: int  # mutations since then
    resident: bool
    locks: int  # > 0 while an operator needs it
    op: Op | None  # what makes it; None for a constant
    pin: str | None  # why it can't be evicted
    exposed: bool  # other code may write to the memory unseen, now and later
    superseded: bool  # a later version has taken over the storage
    used: bool  # some recipe was made that reads it
    held: Any  # a storage: recomputed memory that the program does not have
    block: Any  # the ledger's account of `held`
    secured_by: list[weakref.ref[Record]] | None  # the records whose replay needs this one
    extent: int  # bytes of the storage that its first tensor reaches, -1: all (known under verify only)
    fingerprint: bytes | None  # of the content at its eviction, under verify
    uses: Any  # set where a heuristic with foresight has asked
    bound: Any  # the last four are the policy's
    component: Any
    dependents: Any
    neighbourhood: Any

    @property
    def constant(self) -> bool:
        """Without a recipe: never evicted."""
        return self.op is None

    @property
    def released(self) -> bool:
        """In memory for a replay alone."""
        return self.held is not None

    @property
    def inputs(self) -> Sequence[Record]:
        """deps(S) of App. C.2; may name a record twice."""
        op = self.op
        return () if op is None else op.inputs

    @property
    def alive(self) -> bool:
        """Whether the program itself still holds this version."""
        return not self.superseded and self() is not None

    def memory(self) -> Any:
        """The storage that holds this version's bytes, None if it is nowhere."""
        if self.held is not None:
            return self.held
        return None if self.superseded else self()


def new_record(storage: Any, on_death: Any, nbytes: int, age: int, clock: int) -> Record:
    """A resident record with no recipe yet (the dispatch mode has an inlined twin of this)."""
    record = Record(storage, on_death)
    record.key = id(storage)
    record.nbytes = nbytes
    record.age = age
    record.last_access = clock
    record.resident = True
    record.pin = None
    record.op = None
    record.locks = 0
    record.extent = -1
    record.cost = 0
    record.version = 0
    record.superseded = record.used = record.exposed = False
    record.held = record.block = record.secured_by = record.fingerprint = None
    record.component = record.dependents = record.bound = record.neighbourhood = None
    return record


class Blank:
    """In a recipe, in place of an input: memory that the operator overwrites whole."""

    __slots__ = ("device", "nbytes")

    def __init__(self, nbytes: int, device: Any) -> None:
        self.nbytes = nbytes
        self.device = device


class Op:
    """A recorded operator call: enough to run it again, without a reference to any tensor."""

    __slots__ = (
        "args",
        "autocast",
        "func",
        "held",
        "inputs",
        "kept",
        "kwargs",
        "outputs",
        "rng",
        "secured",
        "signature",
        "state",
        "tensors",
    )
    func: Any
    args: list[Any]  # positional arguments, HOLE in the place of each tensor
    kwargs: dict[str, Any] | None
    tensors: list[Any]  # Record or Blank for each hole, in order
    inputs: list[Record]  # the records that it reads
    outputs: tuple[tuple[int, Any], ...] | None
    """(where, weak reference to the record): the where-th tensor of the result, or ~where: the memory under
    that hole. None: the result is one new storage."""
    rng: (
        Any  # the generators that it may draw from, with their states before the call; None: it draws nothing
    )
    signature: Signature
    state: tuple[Any, ...]  # the settings that its kernel saw: `runtime.ambient`
    autocast: tuple[Any, ...]  # what autocast did to the operators that its kernel calls: `runtime.guards`
    secured: bool  # the recipe stays replayable whatever the program lets go of
    kept: tuple[Any, ...]  # storages of inputs that were in memory when what it makes was evicted
    held: tuple[Any, ...] | None  # storages of constants, kept alive since something evicted needs them

    def records(self, one: Record) -> list[Record]:
        """Every record that this operator makes, `one` being one of them."""
        if self.outputs is None:
            return [one]
        return [record for _, reference in self.outputs if (record := reference()) is not None]


def inputs_of(tensors: list[Any]) -> list[Record]:
    """The records among an operator's tensors, each once; a `_foreach_` operator has thousands."""
    return list({id(one): one for one in tensors if type(one) is not Blank}.values())


class Hole:
    """Marks the place of a tensor among recorded arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "HOLE"


HOLE = Hole()


class Signature:
    """What calls of one operator on tensors of the same geometry share.

    `cost` is in ns: the least of the first few calls, so that first-time work does not count and decisions
    do not jitter; `output_bytes` what it allocates: its results, and on a GPU what it takes beside them while
    it runs, too. `guessed`: no call has ended yet, and that is a prediction. `timed`: the cost is that of a
    GPU's clock. `workspace`: bytes among `output_bytes` that a GPU's library does without, in another way, if
    it cannot have them; 0 where there are none.
    """

    __slots__ = (
        "calls",
        "cost",
        "geometries",
        "guessed",
        "operator",
        "output_bytes",
        "replayed_as",
        "same",
        "timed",
        "workspace",
    )

    SETTLED = 8

    def __init__(self, operator: Any, geometries: tuple[Geometry, ...]) -> None:
        self.operator = operator
        self.geometries = geometries
        self.calls = 0
        self.cost = 0
        self.output_bytes = 0
        self.guessed = False
        self.workspace = 0
        self.timed = False
        self.same: tuple[int, ...] = ()
        self.replayed_as: Signature | None = None  # where a replay leaves out some of the tensors
