"""The accounts: versions by storage, what is resident or evicted, and the bytes of each.

They are kept in C++ (`core/ledger.h`). This module has what only Python needs of them.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any

from dtrrun.core import bound
from dtrrun.core.backend import Fingerprints, Heap, Memory, Policy
from dtrrun.core.graph import Graph, Version
from dtrrun.core.observer import FIXED, RESIZED

UNLIMITED = 1 << 62
INPUT_LOST = "input lost"
GIVEN_UP = "given up with an earlier session"
INPUT_MUTATED = "input mutated"
GATHERED = "gathered weight"
COPIED = "old values of weights"
COUNTED = "only counted"
SMALL_CONSTANT = 512  # bytes
SMALL_CONSTANTS = 256  # of these


class Decision(IntEnum):
    """The decisions that a ledger notes; see `core/ledger.h`."""

    REFUSED = 8  # a request for so many bytes; concerns no version


class Block(weakref.ref):  # type: ignore[type-arg]
    """Accounts for memory at an address that is not a storage's. pin: why it can't be evicted."""

    __slots__ = ("nbytes", "pin")
    nbytes: int
    pin: str


class Ledger(bound.Ledger):
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
        super().__init__()
        self.policy = policy
        self.memory = memory
        self.graph, self.key_of = graph, graph.key_of
        self.device_type = device_type
        self.fingerprints, self.heap = fingerprints, heap
        self.counted: dict[int, Block] = {}  # tensors without plain storage, by address
        # Kept alive: the program releases these at once (`torch.tensor(2.0)`), and what was computed from
        # them could then never be evicted.
        self.small_constants: deque[Any] = deque(maxlen=SMALL_CONSTANTS)
        self.lock: AbstractContextManager[Any] = nullcontext()  # held while another device is in use
        self._overheads: dict[int, dict[str, int]] = {}  # by device
        # By device: what was granted, and what it is exceeded to.
        self._grants: dict[int, tuple[int, int]] = {}
        self.set_budget(budget_bytes)

    # -- devices ---------------------------------------------------------------------------------

    def on(self, device: int) -> AbstractContextManager[None]:
        """Return a context in which another device is in use."""
        return OnDevice(self, device) if device or self.devices > 1 else nullcontext()

    @property
    def overhead(self) -> dict[str, int]:
        """Bytes of the device's budget that are not tensors, by kind."""
        return self._overheads.setdefault(self.device, {})

    @overhead.setter
    def overhead(self, found: dict[str, int]) -> None:
        self._overheads[self.device] = found

    @property
    def _granted(self) -> int:
        known = self._grants.get(self.device)
        return known[0] if known else UNLIMITED if self.budget_bytes is None else self.budget_bytes

    @property
    def _exceeded(self) -> int:
        return self._grants.get(self.device, (UNLIMITED, 0))[1]

    def in_turn(self) -> Iterator[int]:
        """Use each device in turn, and then the present one again."""
        for device in range(self.devices):
            with self.on(device):
                yield device

    def most(self, figure: str) -> int:
        """Return the largest of the devices' figures of this name."""
        if self.devices == 1:  # at the end of each step
            return int(getattr(self, figure))
        found: list[int] = [getattr(self, figure) for _ in self.in_turn()]
        return max(found)

    @property
    def plain_bytes(self) -> int:
        """What the program's tensors take together, whether evicted or not."""
        ours = self.scratch_bytes + self.copied_bytes + self.brought_bytes
        return self.resident_bytes + self.evicted_bytes - ours

    # -- the budget ------------------------------------------------------------------------------

    def set_budget(self, budget_bytes: int | None) -> None:
        """Change the budget. This evicts nothing by itself."""
        self.budget_bytes = budget_bytes
        self._grants.clear()
        for _ in self.in_turn():
            self.set_limit(UNLIMITED if budget_bytes is None else budget_bytes)
        self.look_outside()
        # Smaller storages are not worth a search, unless the budget requires it.
        self.least_bytes = min(1024, max(self._granted, self._exceeded) // 10_000)
        if self.pressure:
            for version in self.versions.values():  # some may have been too small for the previous budget
                if version.operation is not None and version.resident:
                    self.evictable(version)

    def set_limit(self, nbytes: int) -> None:
        """Set what tensors may take: the budget, or on a GPU what it leaves for them."""
        self._grants[self.device] = nbytes, self._exceeded
        self.limit = UNLIMITED if self.paused else max(nbytes, self._exceeded)

    def exceed(self, nbytes: int) -> None:
        """Let tensors take this much from now on, whatever the budget."""
        self._grants[self.device] = self._granted, nbytes
        self.set_limit(self._granted)

    @property
    def is_raised(self) -> bool:
        """Whether tensors may take more than the budget leaves for them."""
        return self._exceeded > self._granted

    @property
    def exceeded_bytes(self) -> int:
        """By how much the budget is exceeded at most: by the raised limit, or by what was in memory."""
        if self.budget_bytes is None:
            return 0
        return max(self._exceeded - self._granted, self.peak_bytes - self.budget_bytes, 0)

    def look_outside(self) -> None:
        """Subtract from the limit what storages that no version counts take of the budget now."""
        if self.outside is not None:
            self.outside.look()

    def no_eviction(self) -> NoEviction:
        """Disable eviction until the returned object is called or its context ends."""
        self.paused += 1
        for _ in self.in_turn():
            self.limit = UNLIMITED
        return NoEviction(self)

    def _eviction_again(self) -> None:
        self.paused -= 1
        for _ in self.in_turn():
            self.set_limit(self._granted)

    @property
    def evicting(self) -> bool:
        """Whether `no_eviction` is not in force."""
        return not self.paused

    # -- the policy ------------------------------------------------------------------------------

    def change_policy(self, policy: Policy) -> None:
        """Let another policy choose what to evict from now on. Call it between operators.

        policy: a new one. It takes over the pool, what is evicted or released, and the former's counts, and
        its foresight unless the new one has another or does not use any.
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
        for one in (former, policy):  # after an interrupt, both have some
            for version in one:
                one.discard(version)
        known = self.known()
        for version in known:
            version.forget_policy()
            version.uses = () if version.superseded else None  # others belong to another recorded step
        if not self.pressure:
            return
        for version in pool:
            policy.insert(version)
        for version in known:
            if version.operation is not None and not (version.resident or version.has_left):
                (policy.evicted if version.alive else policy.released)(version)

    # -- storages --------------------------------------------------------------------------------

    def version_of(self, storage: Any) -> Version | None:
        """Return the present version of a storage, or None if there is none."""
        return self.versions.get(self.key_of(storage))

    def fix(self, version: Version) -> None:
        """Keep a version's memory where it is from now on: code that is not an operator knows its address."""
        for observer in self.observers:
            observer.changes(FIXED, version)
        version.fixed = True

    def resized(self, version: Version, nbytes: int) -> None:
        """Account for a resident storage whose size has changed."""
        for observer in self.observers:
            observer.changes(RESIZED, version, bytes=nbytes)
        self.forget_host_copy(version)
        self.policy.discard(version)
        if nbytes > SMALL_CONSTANT >= version.nbytes > 0:  # no longer keep it alive
            kept = [one for one in self.small_constants if self.key_of(one) != version.key]
            self.small_constants = deque(kept, self.small_constants.maxlen)
        with self.on(version.device):
            self.resident_bytes += nbytes - version.nbytes
            version.nbytes = nbytes
            self.note_peak(self.resident_bytes)
        if version.operation is not None:
            self.evictable(version)

    def enter_given_up(self, storage: Any, nbytes: int) -> None:
        """Enter a storage without memory that an earlier session has given up: it can't be read."""
        version = self.graph.version(storage, self.on_death)
        self.enter(version)
        version.resident, version.nbytes, version.pin = False, nbytes, GIVEN_UP
        with self.on(version.device):
            self.evicted_bytes += nbytes

    def count(self, owner: Any, nbytes: int, address: int, pin: str) -> None:
        """Account for memory at an address that is not a storage's, until its owner dies."""
        known = self.counted.get(address)
        if known is not None and known() is not None:
            return
        block = Block(owner, self.on_death)
        block.nbytes, block.pin = nbytes, pin
        self.counted[address] = block
        self.resident_bytes += nbytes  # first, because an interrupt could come in a call
        self.note_peak(self.resident_bytes)

    def pinned_blocks(self) -> dict[str, int]:
        """Return the bytes that are no version's and can't be evicted, by reason."""
        self.counted = {address: block for address, block in self.counted.items() if block() is not None}
        found = {COPIED: self.copied_bytes, COUNTED: self.census_bytes}
        found = {pin: nbytes for pin, nbytes in found.items() if nbytes}
        for block in self.counted.values():
            found[block.pin] = found.get(block.pin, 0) + block.nbytes
        return found

    def made_last(self) -> Iterator[tuple[int, str, int]]:
        """For `core.foresight`: yield age, maker and bytes of storages made by operators, newest first."""
        for version in reversed(self.versions.values()):
            if version.operation is not None and not version.mutations:
                yield version.age, version.operation.signature.operator.name, version.nbytes


class OnDevice(AbstractContextManager[None]):
    """The context that `Ledger.on` returns.

    No other thread has a turn meanwhile, as it might use another device.
    """

    __slots__ = ("_before", "_device", "_ledger")

    def __init__(self, ledger: Ledger, device: int) -> None:
        self._ledger, self._device = ledger, device

    def __enter__(self) -> None:
        self._ledger.lock.__enter__()
        self._before = self._ledger.use(self._device)

    def __exit__(self, *exc: object) -> None:
        self._ledger.use(self._before)
        self._ledger.lock.__exit__(None, None, None)


def beside_tensors(ledger: Any) -> int:
    """Return the bytes of a ledger's budget that are not for tensors: on a GPU, what else takes memory."""
    beside: int = max((ledger.budget_bytes or 0) - ledger.limit, sum(ledger.overhead.values()), 0)
    return beside


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
