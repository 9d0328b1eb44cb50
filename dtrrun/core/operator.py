"""One operator of the program, from before it runs until its outputs are in the ledger (Sec. 2, figure 1).

Its inputs are made resident and locked, room is made for what it will allocate, and it runs. Then its outputs
are entered with its recipe, and the inputs are unlocked. The runtime does this with tensors, the simulator
with the contents of a log. Both describe the operator by a `Call`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from dtrrun.core.evict import Eviction
from dtrrun.core.graph import Operation, Overwritten, Signature, Version, distinct, together
from dtrrun.core.ledger import SMALL_CONSTANT, Ledger
from dtrrun.core.locks import unlock
from dtrrun.core.mutation import Mutation
from dtrrun.core.recipes import Recipes
from dtrrun.core.rematerialize import Rematerializer

SHARED = "shared with a tensor without plain storage"
SHARED_BY_THREADS = "written by one thread while another uses it"

NEW = ""
"""Kind of output: a new storage, which can be evicted if the operator has a recipe."""
ODD = "odd"
"""Not a plain tensor over a storage: neither evicted nor recomputed from."""
UNSEEN = "unseen"
"""Code that is not an operator reads it: it stays in memory."""
ELSEWHERE = "elsewhere"
"""It is on another device."""
FOREIGN = "foreign"
"""Its memory is not from our allocator."""


Output = tuple[int, Any, str]
"""A storage that an operator has made, and that was not in the ledger before.

A tuple of its tensor's index among the results, the storage, and its kind.
"""


class Call:
    """One operator call in progress. `hole`: a tensor's index among the tensor arguments."""

    # Reading a slot is several times as fast as reading a default from the class.
    __slots__ = (
        "changing",
        "cost",
        "handed_out",
        "locked",
        "opaque",
        "recordable",
        "replayable",
        "reshapes",
        "shrinks",
        "signature",
        "statistics",
        "uninitialised",
        "untouching",
        "updates_statistics",
        "versions",
        "view",
        "written",
    )
    signature: Signature
    versions: list[Version]
    """The versions of its tensor arguments, by hole."""
    written: dict[int, list[int]]
    """By id of each version that it writes to: the holes through which it writes."""
    locked: list[Version]
    changing: list[Version]
    """Constants that it is about to write to. Until it has, nothing may come to depend on them."""
    replayable: bool
    """Whether the operator and its arguments allow a replay."""
    recordable: bool
    """Whether it gets a recipe; known once it is admitted."""
    view: bool
    """Its results are views: nothing is entered, and recreating them is free."""
    untouching: bool
    """It does not read its inputs' memory."""
    reshapes: bool
    """It may change which memory a storage has."""
    opaque: bool
    """An input has no plain storage."""
    uninitialised: bool
    """Its results are uninitialised."""
    shrinks: bool
    """It may have allocated more than predicted."""
    statistics: Sequence[int]
    """Holes of running statistics, which a replay neither reads nor updates."""
    updates_statistics: bool
    """This call updates the running statistics."""
    handed_out: Sequence[Version]
    """Versions that other code can reach once it has run."""
    cost: int
    """Cost in ns, once it has run."""

    def __init__(self) -> None:
        self.versions, self.written, self.locked, self.changing = [], {}, [], []
        self.statistics = self.handed_out = ()
        self.replayable = self.recordable = True
        self.view = self.untouching = self.reshapes = self.opaque = False
        self.uninitialised = self.shrinks = self.updates_statistics = False
        self.cost = 0

    def is_leaf(self, place: int) -> bool:
        """Return whether the `place`-th version written is a leaf of autograd, written through that leaf."""
        raise NotImplementedError

    def overwrites(self, place: int) -> bool:
        """Return whether it overwrites all of the `place`-th version written, without reading it."""
        raise NotImplementedError

    def overwritten(self, place: int) -> Overwritten:
        """Return the entry in the recipe for a version that it overwrites."""
        raise NotImplementedError

    def resized(self, hole: int, version: Version) -> int | None:
        """Return the bytes that a version takes after being written to; None if unchanged."""
        raise NotImplementedError

    def made(self, nbytes: int) -> None:
        """`nbytes` bytes of its results are new."""

    def recorded(self) -> Any:
        """Return what the executor needs to run it again."""
        raise NotImplementedError

    def replay_signature(self) -> Signature:
        """Return the signature of a replay: without the running statistics, if it has any."""
        return self.signature


class Operators:
    """Admits and finishes the program's operators."""

    def __init__(
        self,
        ledger: Ledger,
        recipes: Recipes,
        eviction: Eviction,
        rematerializer: Rematerializer,
        mutation: Mutation,
        *,
        met_device: Callable[[str], None] | None = None,
        room_given_back: Callable[[], None] | None = None,
    ) -> None:
        """met_device: called with the type of another device on which a tensor is.

        room_given_back: called when a call has entered its results or failed, and its reservation and locks
        are released.
        """
        self._met_device, self._room_given_back = met_device, room_given_back
        self._ledger, self._recipes, self._foreign = ledger, recipes, recipes.foreign
        self._eviction, self._rematerializer, self._mutation = eviction, rematerializer, mutation

    # -- before it runs --------------------------------------------------------------------------

    def admit(self, call: Call) -> None:
        """Bring the inputs back, rescue what a mutation would lose, make room and reserve it.

        If this raises, for instance the budget error, `abandon` releases what the call has taken.
        """
        ledger, foreign = self._ledger, self._foreign
        call.recordable = call.replayable
        for version in call.versions:
            if version.escaped and not foreign.trusts(version):
                call.recordable = False
        for observer in ledger.observers:
            observer.admitted(call)
        if not call.untouching:
            self._rematerializer.lock(call.versions, call.locked)
        else:
            for version in call.versions:
                version.locks += 1
                call.locked.append(version)
        if call.opaque:
            for version in call.versions:
                self._mutation.escape(version, SHARED)
        if call.written:
            call.recordable = self._mutation.prepare_writes(
                [call.versions[holes[0]] for holes in call.written.values()],
                call,
                call.changing,
                recordable=call.recordable and not call.reshapes,
            )
        if call.updates_statistics:
            statistics = [call.versions[hole] for hole in call.statistics]
            for version in statistics:
                self._recipes.make_constant(version, "running statistics")
            self._mutation.about_to_change(statistics, call.changing)
        nbytes = call.signature.output_bytes
        self._eviction.make_room(nbytes, call.signature.operator.name)
        ledger.reserved[id(call)] = get_ident(), nbytes

    def abandon(self, call: Call) -> None:
        """Release what a call has taken, when it does not run."""
        self._unlock(call)
        for observer in self._ledger.observers:
            observer.abandoned(call)

    def _unlock(self, call: Call) -> None:
        """Release what a call has taken, even if an interrupt has left only part of it."""
        if self._ledger.reserved.pop(id(call), None) is not None and self._room_given_back is not None:
            self._room_given_back()
        while call.changing:
            call.changing[-1].escaped = False
            del call.changing[-1]
        unlock(call.locked)

    # -- after it ran ----------------------------------------------------------------------------

    def finish(self, call: Call, outputs: Sequence[Output], *, plain: bool = True) -> None:
        """Enter what a call has made; its cost is known. plain: all results have a plain storage.

        Raises the budget error if its outputs exceed the budget.
        """
        ledger, recipes = self._ledger, self._recipes
        ledger.age += 1
        if not call.view:  # a view comes back with its storage
            ledger.clock += call.cost
        if ledger.dead:
            ledger.collect_dead()
        self._unlock(call)
        if call.updates_statistics:
            for hole in call.statistics:
                if call.versions[hole].used:
                    recipes.supersede(call.versions[hole], None, 0)
        targets = [call.versions[holes[0]] for holes in call.written.values()]
        if any(version.superseded for version in targets):  # meanwhile, by another thread
            call.recordable = False
        operation = self._operation(call) if call.recordable else None
        made: list[tuple[int, Any]] = []
        changed: list[Version] = []
        for target, holes in zip(targets, call.written.values(), strict=True):
            version = ledger.versions[target.key] if target.superseded else target
            if operation is not None:
                version = recipes.supersede(version, operation, call.cost)
                place = holes[0] - sum(hole < holes[0] for hole in call.statistics)  # in the recipe
                made.append((~place, weakref.ref(version)))
            elif version.used:
                version = recipes.supersede(version, None, 0)
            nbytes = call.resized(holes[0], version)
            if nbytes is not None:
                ledger.resized(version, nbytes)
            if target.locks:  # another thread's operator, which has locked the old version, uses the memory
                self._mutation.escape(version, SHARED_BY_THREADS)
            changed.append(version)
        if not plain and not call.view:
            shared = [one for hole, one in enumerate(call.versions) if hole not in call.statistics]
            self._mutation.escape_together(shared, SHARED)
        if call.handed_out:
            self._mutation.escape_together(call.handed_out, "handed out")
        if not call.view or call.reshapes:
            changed += self._enter_outputs(call, operation, outputs, made)
        if operation is not None:
            operation.outputs = together(made)
        for observer in ledger.observers:
            observer.finished(call, outputs)
        if ledger.resident_bytes > ledger.limit and call.shrinks:
            self._eviction.shrink(changed, call.signature.operator.name)

    def fail(self, call: Call) -> None:
        """A call has raised: the program gets its error, and nothing stays locked."""
        self._unlock(call)
        for holes in call.written.values():
            version = self._recipes.half_written(call.versions[holes[0]])
            nbytes = None if version is None else call.resized(holes[0], version)
            if version is not None and nbytes is not None:
                self._ledger.resized(version, nbytes)
        if call.updates_statistics:
            for hole in call.statistics:
                self._recipes.half_written(call.versions[hole])
        for observer in self._ledger.observers:
            observer.failed(call)

    def _operation(self, call: Call) -> Operation:
        places = {id_: place for place, id_ in enumerate(call.written)} if call.written else {}
        tensors: list[Any] = []
        for hole, version in enumerate(call.versions):
            if hole in call.statistics:
                continue
            place = places.get(id(version))
            if place is not None and call.overwrites(place):
                tensors.append(call.overwritten(place))
            else:
                version.used = True
                tensors.append(version)
        return self._ledger.graph.new_operation(
            call.recorded(), call.replay_signature(), tensors, distinct(tensors)
        )

    def _enter_outputs(
        self, call: Call, operation: Operation | None, outputs: Sequence[Output], made: list[tuple[int, Any]]
    ) -> list[Version]:
        versions, total = [], 0
        for where, storage, kind in outputs:
            if operation is not None and kind == NEW:
                version = self.enter(storage, operation)
                made.append((where, weakref.ref(version)))
            elif operation is not None and kind in (ELSEWHERE, FOREIGN):
                version = self.adopt(storage)
            else:
                pin = "read unseen" if kind == UNSEEN else "not replayable"
                version = self.adopt(storage, pin="uninitialised" if call.uninitialised else pin)
                version.escaped = version.escaped or kind == ODD
            versions.append(version)
            total += version.nbytes
        call.made(total)
        return versions

    def enter_results(self, call: Call, outputs: Sequence[Output], *, plain: bool) -> None:
        """Enter the outputs of a call that the caller has admitted and counted itself; see `finish`."""
        operation = self._operation(call)
        made: list[tuple[int, Any]] = []
        if not plain:
            for version in call.versions:
                self._mutation.escape(version, SHARED)
        self._enter_outputs(call, operation, outputs, made)
        operation.outputs = together(made)

    def enter(self, storage: Any, operation: Operation) -> Version:
        """Return the version of a new storage that `operation` has made."""
        ledger = self._ledger
        version = ledger.graph.new_version(
            storage, ledger.on_death, ledger.memory.size_of(storage), ledger.age, ledger.clock
        )
        version.operation, version.cost = operation, operation.signature.cost
        # Like `Ledger.enter` and `Ledger.evictable`, inlined for speed.
        ledger.versions[version.key] = version
        ledger.resident_bytes = resident = ledger.resident_bytes + version.nbytes
        if resident > ledger.step_peak_bytes:
            ledger.note_peak(resident)
        if ledger.pressure and version.nbytes >= ledger.least_bytes:
            ledger.policy.insert(version)
        return version

    def adopt(self, storage: Any, *, pin: str = "constant") -> Version:
        """Enter a storage that no recorded operator made, as a constant. pin: why it can't be evicted."""
        ledger, memory = self._ledger, self._ledger.memory
        version = ledger.graph.new_version(
            storage, ledger.on_death, memory.size_of(storage), ledger.age, ledger.clock
        )
        version.pin = pin
        device_type = memory.device_type_of(storage)
        if device_type != ledger.device_type:
            # Another device's: neither counted nor recomputed from (a copy from the host is a constant).
            version.nbytes, version.escaped, version.pin = 0, True, "other device"
            if self._met_device is not None:
                self._met_device(device_type)
        elif not memory.is_ours(storage):
            version.escaped, version.pin = True, "foreign memory"
            for other in self._foreign.adopted(version, storage):
                self._mutation.escape(other, "foreign memory")
        elif pin == "constant" and 0 < version.nbytes <= SMALL_CONSTANT:
            ledger.small_constants.append(storage)
        if ledger.outside is not None:
            ledger.outside.met(storage)
        if ledger.resident_bytes + version.nbytes > ledger.limit:
            # The memory exists already, so evict something else for it.
            try:
                self._eviction.make_room(version.nbytes, "a tensor from outside")
            except self._eviction.BudgetError:
                self._eviction.over_budget += 1
        ledger.enter(version)
        return version
