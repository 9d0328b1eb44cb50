"""The accounts: versions by storage, what is resident or evicted, and the bytes of each.

Invariants: `resident_bytes` counts the program's tensors and those that dtrrun holds. The ledger keeps no
tensor of the program alive, except constants that something evicted is computed from.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

from dtrrun.core.backend import Fingerprints, Heap, Memory, Outside, Policy
from dtrrun.core.graph import Graph, Version
from dtrrun.core.observer import RESIZED, DecisionObserver, Observer

UNLIMITED = 1 << 62
INPUT_LOST = "input lost"
INPUT_MUTATED = "input mutated"
COPIED = "old values of weights"
SMALL_CONSTANT = 512  # bytes
SMALL_CONSTANTS = 256  # of these
LOOK_SHIFT = 4  # check the process's memory when a sixteenth of the budget (or peak) has been freed,
LOOK_BYTES = 4 << 20  # and at least this much


class Decision(IntEnum):
    """What a ledger is told by `Ledger.decided`."""

    EMPTIED = 1
    RESTORED = 2
    HELD = 3  # recomputed memory that the program does not have
    DROPPED = 4  # the same, when it goes
    COPIED = 5
    PINNED = 6  # it has no recipe from now on, and stays
    LOST = 7  # the same of what is not in memory
    REFUSED = 8  # so many bytes, of no version


class Block(weakref.ref):  # type: ignore[type-arg]
    """Accounts for memory that no storage of a version in the ledger's table has.

    That is scratch, a copy of a constant, or a tensor without plain storage. pin: for the last two, why it
    can't be evicted.
    """

    __slots__ = ("address", "nbytes", "pin")
    nbytes: int
    pin: str
    address: int  # of a tensor without plain storage, once in `Ledger.counted`


class Ledger:
    """Storages by version, and their bytes. Reports those that come and go to the policy."""

    def __init__(
        self,
        policy: Policy,
        memory: Memory,
        graph: Graph,
        *,
        budget_bytes: int | None = None,
        device_type: str = "cpu",
        fingerprints: Fingerprints | None = None,
        heap: Heap | None = None,
    ) -> None:
        self.policy = policy
        self.memory = memory
        self.graph, self.key_of = graph, graph.key_of
        self.device_type = device_type
        self.fingerprints = fingerprints
        self.observers: list[Observer] = []
        self.decision_observers: list[DecisionObserver] = []
        self.heap = heap
        self.blocks: dict[int, Block] = {}
        self.counted: dict[int, Block] = {}  # tensors without plain storage, by address
        self.scratch: dict[int, Version] = {}  # recomputed versions that the program does not have
        self.scratch_bytes = 0
        # The program releases these at once (`torch.tensor(2.0)`), and what they made could never be evicted.
        self.small_constants: deque[Any] = deque(maxlen=SMALL_CONSTANTS)
        self.dead: deque[Any] = graph.queue()
        self.on_death: Callable[[Any], None] = (
            self.dead.append
        )  # at any moment and in any thread, so it only queues
        self.versions: dict[int, Version] = graph.versions(self.dead)
        self.outside: Outside | None = None
        self.overhead: dict[str, int] = {}  # bytes of the budget that are not tensors, by kind
        self.pressure = False  # whether memory ever ran short; before that the policy is told nothing
        self._no_eviction = 0
        self.set_budget(budget_bytes)
        self.clock = 0  # ns: the sum of the costs of all operators run
        self.age = 0  # number of operators so far
        self.step_age = 0  # age at the end of the last step
        self.resident_bytes = self.peak_bytes = self.evicted_bytes = self.step_peak_bytes = 0
        self.reserved: dict[int, tuple[int, int]] = {}
        """For operators in progress, by the id of their call: the thread, and the reserved bytes."""
        self.freed_bytes = 0

    # -- the budget ------------------------------------------------------------------------------

    def set_budget(self, budget_bytes: int | None) -> None:
        """Change the budget. This evicts nothing by itself."""
        self.budget_bytes = budget_bytes
        self.set_limit(UNLIMITED if budget_bytes is None else budget_bytes)
        self.look_outside()
        # Smaller storages are not worth a search, unless the budget requires it.
        self.least_bytes = min(1024, self._limit // 10_000)
        if self.pressure:
            for version in self.versions.values():  # some may have been too small for the previous budget
                if version.operation is not None and version.resident:
                    self.evictable(version)

    def set_limit(self, nbytes: int) -> None:
        """Set what tensors may take: the budget, or on a GPU what it leaves for them."""
        self._limit = nbytes
        self.limit = UNLIMITED if self._no_eviction else nbytes

    def look_outside(self) -> None:
        """Take from the limit what storages that have not been met take of the budget now."""
        if self.outside is not None:
            self.outside.look()

    def no_eviction(self) -> NoEviction:
        """Disable eviction until the returned object is called or its context ends."""
        self._no_eviction += 1
        self.limit = UNLIMITED
        return NoEviction(self)

    def _eviction_again(self) -> None:
        self._no_eviction -= 1
        self.set_limit(self._limit)

    @property
    def evicting(self) -> bool:
        """Whether `no_eviction` is not in force."""
        return not self._no_eviction

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved for operators in progress, which other threads may not take."""
        return sum([nbytes for _, nbytes in self.reserved.values()])

    def begin_pressure(self) -> None:
        """Memory runs short for the first time: report everything so far to the policy."""
        if self.pressure:
            return
        self.pressure = True
        seen: set[int] = set()
        stack: list[Version] = []
        for version in self.versions.values():
            if version.operation is not None:
                stack.append(version)
                if version.resident:
                    self.evictable(version)
        while stack:
            for source in stack.pop().inputs:
                if source.operation is not None and not source.resident and id(source) not in seen:
                    seen.add(id(source))
                    stack.append(source)
                    self.policy.released(source)

    def change_policy(self, policy: Policy) -> None:
        """Let another policy choose what to evict from now on. Call it between operators.

        policy: a new one. It takes over the pool, what is evicted or released, and the former's counts, and
        its foresight unless it has another or does not use any.
        """
        self.collect_dead()
        former, pool = self.policy, list(self.policy)
        try:
            self._hand_over(former, policy, pool)
        except BaseException:  # an interrupt: no version may be left with the former's state
            self._hand_over(former, policy, pool)
            raise

    def _hand_over(self, former: Policy, policy: Policy, pool: list[Version]) -> None:
        self.policy = policy
        policy.score_evaluations = former.score_evaluations
        policy.scoring_ns, policy.search_ns = former.scoring_ns, former.search_ns
        if policy.heuristic.foresight and policy.foresight is None:
            policy.foresight = former.foresight
        for one in (former, policy):  # after an interrupt, both have some. Their references count as readers
            for version in one:
                one.discard(version)
        known = self._known()
        for version in known:
            version.forget_policy()
            version.uses = () if version.superseded else None  # others belong to another recorded step
        if not self.pressure:
            return
        for version in pool:
            policy.insert(version)
        for version in known:
            if version.operation is not None and not version.resident:
                (policy.evicted if version.alive else policy.released)(version)

    def _known(self) -> list[Version]:
        """Return all versions: those with memory, or whose memory is evicted, and what they are made from."""
        known = {id(version): version for version in (*self.versions.values(), *self.scratch.values())}
        stack = list(known.values())
        while stack:
            for source in stack.pop().inputs:
                if id(source) not in known:
                    known[id(source)] = source
                    stack.append(source)
        return list(known.values())

    def evictable(self, version: Version) -> None:
        """Add a resident version with a recipe to the policy, if it is large enough."""
        if self.pressure and version.nbytes >= self.least_bytes:
            self.policy.insert(version)

    def version_of(self, storage: Any) -> Version | None:
        """Return the present version of a storage, or None if there is none."""
        return self.versions.get(self.key_of(storage))

    def decided(self, decision: int, nbytes: int, age: int, mutations: int) -> None:
        """Note a decision about a version with these attributes.

        A native ledger keeps their number and a digest of them (`decisions`, `digest`): two runs of a program
        decide alike if these are equal. This one keeps nothing.
        """

    def decided_about(self, decision: Decision, version: Version) -> None:
        """Note a decision about this version."""
        self.decided(decision, version.nbytes, version.age, version.mutations)

    # -- births ----------------------------------------------------------------------------------

    def enter(self, version: Version) -> None:
        """Count a storage that has memory now."""
        self.versions[version.key] = version
        self.resident_bytes += version.nbytes  # first, because an interrupt could come in a call
        self.note_peak(self.resident_bytes)

    def resized(self, version: Version, nbytes: int) -> None:
        """Account for a resident storage whose size has changed."""
        for observer in self.observers:
            observer.changes(RESIZED, version, bytes=nbytes)
        self.policy.discard(version)
        if nbytes > SMALL_CONSTANT >= version.nbytes:  # no longer keep it alive
            kept = [one for one in self.small_constants if self.key_of(one) != version.key]
            self.small_constants = deque(kept, self.small_constants.maxlen)
        self.resident_bytes += nbytes - version.nbytes
        version.nbytes = nbytes
        self.note_peak(self.resident_bytes)
        if version.operation is not None:
            self.evictable(version)

    def count(self, owner: Any, nbytes: int, address: int, pin: str) -> None:
        """Account for memory at an address that is not a storage's, until its owner dies."""
        if address in self.counted:
            return
        block = Block(owner, self.on_death)
        block.nbytes, block.pin, block.address = nbytes, pin, address
        self.counted[address] = self.blocks[id(block)] = block
        self.resident_bytes += nbytes  # first, because an interrupt could come in a call
        self.note_peak(self.resident_bytes)

    def hold_scratch(self, version: Version, storage: Any) -> None:
        """Keep a recomputed storage for a version that the program does not have."""
        self.decided_about(Decision.HELD, version)
        block = Block(storage, self.on_death)
        block.nbytes, block.pin, block.address = version.nbytes, "", 0
        place, key = id(block), id(version)
        # No calls from here on, since an interrupt could come in one.
        self.blocks[place] = version.block = block
        self.scratch[key] = version
        self.scratch_bytes += version.nbytes
        self.resident_bytes += version.nbytes
        version.scratch = storage
        version.resident = True
        self.note_peak(self.resident_bytes)

    def keep_copy(self, version: Version, storage: Any) -> None:
        """Keep a copy of a constant that is about to change, as long as some recipe reads this version."""
        self.decided_about(Decision.COPIED, version)
        block = Block(storage, self.on_death)
        block.nbytes, block.pin, block.address = version.nbytes, COPIED, 0
        place = id(block)
        # No calls from here on, since an interrupt could come in one.
        self.blocks[place] = block
        self.resident_bytes += version.nbytes
        version.copy = storage
        self.note_peak(self.resident_bytes)

    def pinned_blocks(self) -> list[Block]:
        """Return the blocks that can't be evicted."""
        return [block for block in self.blocks.values() if block.pin]

    def drop_scratch(self, version: Version) -> None:
        """Free a storage kept by `hold_scratch`."""
        self.decided_about(Decision.DROPPED, version)
        place, key = id(version.block), id(version)
        # No calls from here on, since an interrupt could come in one.
        if key in self.scratch:
            del self.scratch[key]
            self.scratch_bytes -= version.nbytes
        if place in self.blocks:
            del self.blocks[place]
            self.resident_bytes -= version.nbytes
        version.block = version.scratch = None  # the block first: it need not be told of the death
        version.resident = False

    def note_peak(self, nbytes: int) -> None:
        """Update the peak with the bytes in memory at this moment."""
        if nbytes > self.step_peak_bytes:
            self.step_peak_bytes = nbytes
            if nbytes > self.peak_bytes:
                self.peak_bytes = nbytes

    def made_last(self) -> Iterator[tuple[int, str, int]]:
        """For `core.foresight`: yield age, maker and bytes of storages made by operators, newest first."""
        for version in reversed(self.versions.values()):
            if version.operation is not None and not version.mutations:
                yield version.age, version.operation.signature.operator.name, version.nbytes

    # -- evictions -------------------------------------------------------------------------------

    def emptied(self, version: Version) -> None:
        """A version of the program is about to lose its memory."""
        self.decided_about(Decision.EMPTIED, version)
        version.resident = False
        self.resident_bytes -= version.nbytes
        self.evicted_bytes += version.nbytes

    def restored(self, version: Version) -> None:
        """An evicted version of the program has its memory again."""
        self.decided_about(Decision.RESTORED, version)
        version.resident = True
        self.evicted_bytes -= version.nbytes
        self.resident_bytes += version.nbytes
        self.note_peak(self.resident_bytes)
        if self.fingerprints is not None and version.fingerprint is not None:
            self.fingerprints.compare(version)

    # -- deaths ----------------------------------------------------------------------------------

    def collect_dead(self) -> None:
        """Account for the storages that died since the last call."""
        dead = self.dead
        before = self.resident_bytes
        version: Any = None
        try:
            while dead:
                version = dead[0]
                dead.popleft()
                if type(version) is Block:
                    place = id(version)
                    if place in self.blocks:  # no call until it is accounted for: no interrupt
                        del self.blocks[place]
                        self.resident_bytes -= version.nbytes
                    if version.pin and self.counted.get(version.address) is version:
                        del self.counted[version.address]
                    continue
                current: Any = self.versions.get(version.key)
                if current is not version:
                    continue  # superseded by a later version, which has its own callback
                for observer in self.observers:
                    observer.died(version)
                del self.versions[version.key]
                if version.scratch is not None:
                    # It died evicted while a rematerialization held it: any memory left is scratch.
                    self.evicted_bytes -= version.nbytes
                elif version.resident:
                    self.resident_bytes -= version.nbytes
                    version.resident = False
                    if self.pressure and version.operation is not None:
                        self.policy.discard(version)
                        if version.used:
                            self.policy.released(version)  # what depends on it may need it again
                else:
                    self.evicted_bytes -= version.nbytes
                    self.policy.forget(version)
                    if version.used:
                        self.policy.released(version)
        except BaseException:
            # Interrupted: do it again, or the table keeps an id that the next storage may get.
            if version is not None:
                dead.appendleft(version)
            raise
        if self.heap is not None:
            self.freed(before - self.resident_bytes)

    def freed(self, nbytes: int) -> None:
        """Occasionally check what became of memory that was given back to the C library."""
        if self.heap is None:
            return
        self.freed_bytes += nbytes
        limit = self.peak_bytes if self.budget_bytes is None else self.limit
        if self.freed_bytes > max(limit >> LOOK_SHIFT, LOOK_BYTES):
            self.freed_bytes = 0
            self.heap.check(self.resident_bytes, limit)


class SlottedLedger(Ledger):
    """A ledger whose figures are in slots. A native one has them as numbers of C++ (`native/figures.h`)."""

    __slots__ = (
        "age",
        "budget_bytes",
        "clock",
        "dead",
        "evicted_bytes",
        "freed_bytes",
        "heap",
        "least_bytes",
        "limit",
        "peak_bytes",
        "policy",
        "pressure",
        "resident_bytes",
        "scratch_bytes",
        "step_age",
        "step_peak_bytes",
        "versions",
    )


class NoEviction:
    """Ends `Ledger.no_eviction`, once: when called, or when its context ends."""

    __slots__ = ("_ledger",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger: Ledger | None = ledger

    def __call__(self) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger._eviction_again()

    def __enter__(self) -> NoEviction:
        return self

    def __exit__(self, *exc: object) -> None:
        self()
