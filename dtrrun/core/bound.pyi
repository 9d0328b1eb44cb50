"""What the parts have in C++ (`bindings/ledger.h`, `bindings/parts.h`)."""

from collections.abc import Callable, Sequence
from typing import Any

from dtrrun.core.backend import Fingerprints, Heap, Outside, Policy
from dtrrun.core.graph import Operation, Version
from dtrrun.core.observer import DecisionObserver, Observer

class Ledger:
    age: int  # number of operators so far
    clock: int  # ns: the sum of the costs of all operators run
    step_age: int  # age of the first operator of the present step
    step_began: int  # ns: `own_work` when it began
    step_work: int  # ns: what the longer of the two steps before has taken, without recomputation
    resident_bytes: int  # of the program's tensors and of those that dtrrun holds
    census_bytes: int  # the part of them that has no version, since its operators were only counted
    evicted_bytes: int
    scratch_bytes: int
    copied_bytes: int
    brought_bytes: int  # the part of `resident_bytes` that has come back from the host ahead of its use
    peak_bytes: int
    step_peak_bytes: int
    plain_peak_bytes: int  # the most that the program's tensors took together, whether evicted or not
    freed_bytes: int
    recomputed_ns: int  # in operators that were run again
    recomputed_cost: int  # the part of `clock` that they are
    collection_due_ns: int  # value of `recomputed_ns` from which making room collects garbage
    operators_counted: int  # in this step: those that were only counted
    least_bytes: int  # smaller storages are not worth a search
    least_copy_bytes: int  # what is smaller is not worth a copy on the host
    paused: int  # how many times eviction is disabled at present
    limit: int  # what tensors may take
    budget_bytes: int | None
    pressure: bool  # whether memory ever ran short; before that the policy is not notified of anything
    results_leave: int  # whether what has a recipe may leave for the host (`core.host`)
    policy: Policy
    observers: list[Observer]
    decision_observers: list[DecisionObserver]
    fingerprints: Fingerprints | None
    heap: Heap | None
    outside: Outside | None
    dtr: Any  # the `core.dtr.DTR` of which this is a part

    def __init__(self) -> None: ...
    @property
    def reserved_bytes(self) -> int: ...  # for operators in progress, which other threads may not take
    @property
    def left_bytes(self) -> int: ...  # the part of `evicted_bytes` that is of constants on the host
    @property
    def left_peak_bytes(self) -> int: ...
    @property
    def decisions(self) -> int: ...  # number of decisions
    @property
    def digest(self) -> int: ...  # of the decisions: two runs of a program decide alike if both are equal
    @property
    def device(self) -> int: ...  # the one in use: bytes, peaks and the limit are those of its tensors
    @property
    def devices(self) -> int: ...  # how many have been used
    @property
    def live_storages(self) -> int: ...  # with and without versions
    @property
    def counting(self) -> bool: ...  # whether operators are only counted at present (`core/census.h`)
    @property
    def constants_leave(self) -> bool: ...  # whether constants may leave: once nothing else could make room
    @property
    def host(self) -> dict[str, int] | None: ...  # the figures of the host tier (`core/host.h`); made anew
    @property
    def host_costs(self) -> tuple[float, float] | None: ...  # ns for each byte copied there, and back
    @property
    def dead(self) -> bool: ...  # whether storages have died for which `collect_dead` has to account
    @property
    def on_death(self) -> Callable[[Any], None]: ...  # reports such a death
    @property
    def scratch(self) -> list[Version]: ...  # recomputed versions that the program does not have, latest last
    @property
    def versions(self) -> dict[int, Version]: ...  # as a dict: the present version of each storage, in order
    def decided(self, decision: int, nbytes: int, age: int, mutations: int, /) -> None: ...
    def evictable(self, version: Version, /) -> None: ...
    def enter(self, version: Version, /) -> None: ...
    def keep_copy(self, version: Version, storage: Any, /) -> None: ...
    def forget_host_copy(self, version: Version, /) -> None: ...
    def let_constants_leave(self) -> None: ...
    def restored(self, version: Version, /) -> None: ...
    def use_copy(self, version: Version, /) -> None: ...
    def begin_pressure(self) -> None: ...
    def known(self) -> list[Version]: ...
    def note_peak(self, nbytes: int, /) -> None: ...
    def collect_dead(self) -> None: ...
    def reserve(self, call: int, nbytes: int, /) -> None: ...
    def give_back(self, call: int, /) -> bool: ...
    def others_reserve(self) -> bool: ...
    def use(self, device: int, /) -> int: ...
    def take_away(self, version: Version, /) -> None: ...
    def largest_copy(self) -> int: ...
    def weigh(self) -> tuple[set[int], int]: ...
    def carried(self, cut_age: int, /) -> list[Version]: ...
    def mutated(self, age: int, trusted: list[Version], /) -> list[Version]: ...

class Part:
    def __init__(self, ledger: Ledger) -> None:
        """ledger: one of the same extension."""

class Recipes(Part):
    def make_constant(self, version: Version, why: str, /) -> None: ...
    def pin(self, version: Version, why: str, /) -> None: ...
    def secure(self, version: Version, /) -> bool: ...
    def lose(self, version: Version, /) -> None: ...
    def supersede(self, version: Version, operation: Operation | None, cost: int, /) -> Version: ...
    def half_written(self, version: Version, /) -> Version | None: ...
    def end_counting(self) -> None: ...
    def end(self) -> None: ...

class Deallocation(Part):
    kept: int
    scratch_shift: int
    def free_all_unread_scratch(self) -> None: ...

class Eviction(Part):
    evictions: int
    evicted_bytes_total: int
    over_budget: int  # how often there was no room and the program continued
    making_room_ns: int
    dear_part: int
    replaying: int  # rematerializations in progress
    warn_only: bool  # exceed the budget and count it, instead of raising
    adapts: bool  # if so, raise the limit to what has not fitted, and keep to that from then on
    @property
    def evicted_by(self) -> dict[str, int]: ...  # by operator; made anew each time
    def try_room(self, nbytes: int, /) -> bool: ...
    def evict_to(self, most: int, /) -> bool: ...
    def may_be_evicted(self, version: Version, /) -> bool: ...
    def could_leave(self, version: Version, /) -> bool: ...
    def evict_if_possible(self, version: Version, /) -> bool: ...

class Rematerializer(Part):
    rematerializations: int
    rematerialized_bytes: int
    frugal_runs: int  # how often what did not fit was brought back in as little memory as possible
    last_planned: int
    operators_ns: int  # time in recomputed operators only
    @property
    def by_operator(self) -> dict[str, tuple[int, int, int]]: ...  # name: (count, ns, bytes); made anew
    def materialize(self, targets: Sequence[Version], *, locked: bool = True) -> None: ...
    def under_way_ns(self) -> int: ...

class Mutation(Part):
    def rescue_dependents(self, version: Version, /) -> None: ...
    def escape(self, version: Version, why: str, /) -> None: ...
    def escape_together(self, versions: Sequence[Version], why: str, /) -> None: ...
    def written_outside(self, version: Version, why: str, *, escapes: bool) -> None: ...

class Operators(Part):
    def adopt(self, storage: Any, *, pin: str = "constant") -> Version: ...
