"""The replay against a plain recursive one that scans, written from App. C.4 for this test alone."""

import math

import pytest

from dtrrun.policy import make_policy
from dtrrun.simulator.log import Call, Constant, Mutate, Release
from dtrrun.simulator.replay import Replay
from dtrrun.simulator.schedule import CONSTANT, schedule_of
from tests.unit.simulator_logs import random_log


class Oracle:
    """h_dtr_local, lru or size by a scan; sets and lists only."""

    def __init__(self, schedule, budget, heuristic):
        self.schedule, self.budget, self.heuristic = schedule, budget, heuristic
        self.memory = self.clock = self.evictions = self.recomputed = 0
        self.defined, self.pool, self.resident = set(), [], set()
        self.locks = [0] * len(schedule.nbytes)
        self.access = [0] * len(schedule.nbytes)
        self.made = []  # operators run so far, as a storage's cost is of those alone
        self.pinned = set()

    def size(self, tensor):
        return 0 if self.schedule.is_alias(tensor) else self.schedule.nbytes[self.schedule.storage_of[tensor]]

    def cost(self, storage):
        by = {self.schedule.operator_of[t] for t, s in enumerate(self.schedule.storage_of) if s == storage}
        return sum(self.schedule.operators[one].cost for one in by if one in self.made)

    def score(self, storage):
        stale, size = max(self.clock - self.access[storage], 1), self.schedule.nbytes[storage]
        return {
            "h_dtr_local": lambda: self.cost(storage) / (size * stale),
            "lru": lambda: 1 / stale,
            "size": lambda: 1 / size,
        }[self.heuristic]()

    def run(self):
        for event in self.schedule.events:
            if event >= 0:
                self.made.append(event)
                operator = self.schedule.operators[event]
                self.compute(event, operator.outputs[0])
                for one in operator.outputs:
                    self.access[self.schedule.storage_of[one]] = self.clock
                if operator.name == CONSTANT:
                    self.pin(self.schedule.storage_of[operator.outputs[0]])
            elif ~event in self.resident and ~event not in self.pinned:
                self.evict(~event)
        for one in self.schedule.outputs:
            if one not in self.defined:
                self.compute(self.schedule.operator_of[one], one)
                self.recomputed += 1
            self.pin(self.schedule.storage_of[one])

    def pin(self, storage):
        self.pinned.add(storage)
        self.locks[storage] += 1

    def evict(self, storage):
        self.evictions += 1
        self.resident.remove(storage)
        self.defined -= {t for t, s in enumerate(self.schedule.storage_of) if s == storage}
        self.memory -= self.schedule.nbytes[storage]
        if storage in self.pool:
            self.pool.remove(storage)

    def compute(self, number, wanted):
        operator = self.schedule.operators[number]
        storages = [self.schedule.storage_of[one] for one in operator.inputs]
        for one in storages:
            self.access[one] = self.clock
        missing = [one for one in operator.inputs if one not in self.defined]
        for one, storage in zip(operator.inputs, storages, strict=True):
            self.locks[storage] += one in self.defined
        for one in missing:
            if one not in self.defined:
                self.compute(self.schedule.operator_of[one], one)
                self.recomputed += 1
            self.locks[self.schedule.storage_of[one]] += 1
        needed = sum(self.size(one) for one in operator.outputs)
        while self.memory + needed > self.budget:
            candidates = [one for one in self.pool if not self.locks[one]]
            if not candidates:
                raise MemoryError
            self.evict(min(candidates, key=self.score))
        self.clock += operator.cost
        self.memory += needed
        for one in [one for one in operator.outputs if one != wanted] + [wanted]:
            if one in self.defined:
                self.memory -= self.size(one)
                continue
            self.defined.add(one)
            storage = self.schedule.storage_of[one]
            if storage not in self.resident:
                self.resident.add(storage)
                if self.schedule.nbytes[storage]:
                    self.pool.append(storage)
        for storage in storages:
            self.locks[storage] -= 1


@pytest.mark.parametrize("heuristic", ["h_dtr_local", "lru", "size"])
@pytest.mark.parametrize("seed", range(40))
def test_the_replay_does_what_the_paper_says(seed, heuristic):
    schedule = schedule_of(random_log(seed), "random")
    for share in (1.0, 0.7, 0.5, 0.3):
        budget = int(schedule.peak_bytes * share)
        oracle = Oracle(schedule, budget, heuristic)
        status = "ok"
        try:
            oracle.run()
        except MemoryError:
            status = "oom"
        found = Replay(schedule, budget, make_policy(heuristic), limit=math.inf).run()
        assert found.status == status
        assert (found.time, found.evictions) == (oracle.clock, oracle.evictions)
        if status == "ok":
            assert found.rematerializations == oracle.recomputed
            assert found.peak_bytes <= budget


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "heuristic", ["h_dtr", "h_dtr_eq", "msps", "e_star", "h_chain", "h'(s=no,m=no,c=eqclass)", "lru", "size"]
)
@pytest.mark.parametrize("latest", [False, True])
def test_the_search_and_the_scan_give_the_same_run(seed, heuristic, latest):
    schedule = schedule_of(random_log(100 + seed, 120), "random")
    for share in (0.8, 0.5, 0.35):
        budget = int(schedule.peak_bytes * share)
        fast, slow = (
            Replay(schedule, budget, make_policy(heuristic, latest=latest, scan=scan), limit=8).run()
            for scan in (False, True)
        )
        for field in ("status", "time", "evictions", "rematerializations", "peak_bytes"):
            assert getattr(fast, field) == getattr(slow, field)


def test_the_random_logs_try_everything():
    """Otherwise the comparisons above would show little."""
    outcomes = [
        Replay(schedule, int(schedule.peak_bytes * share), make_policy("h_dtr_local"), limit=8).run()
        for schedule in (schedule_of(random_log(seed), "random") for seed in range(40))
        for share in (1.0, 0.7, 0.5, 0.3)
    ]
    completed = [one for one in outcomes if one.status == "ok"]
    assert len(completed) > 40
    assert len(outcomes) - len(completed) > 10
    assert sum(one.rematerializations for one in completed) > 200


def test_without_a_budget_nothing_is_recomputed():
    schedule = schedule_of(random_log(3), "random")
    outcome = Replay(schedule, None, make_policy("h_dtr_eq")).run()
    assert (outcome.status, outcome.overhead, outcome.rematerializations) == ("ok", 1.0, 0)


def chain(length):
    log = [Constant("x0", 1)]
    log += [Call("op", (f"x{i}",), (f"x{i + 1}",), (1,), (-1,), 1) for i in range(length)]
    return log


def test_a_long_chain_is_rematerialized_without_recursion():
    log = [*chain(5000), *(Release(f"x{i}") for i in range(1, 5000))]
    log.append(Call("op", ("x5000",), ("y",), (1,), (-1,), 1))
    log.append(Mutate("op_", ("x5000",), (0,), 1))
    schedule = schedule_of(log, "chain")
    outcome = Replay(schedule, 4, make_policy("lru"), limit=math.inf).run()
    assert outcome.status == "ok"
    assert outcome.peak_bytes <= 4


def test_what_recomputes_more_than_the_limit_is_said_to_thrash():
    schedule = schedule_of(
        [*chain(200), *(Call("op", (f"x{i}",), (f"y{i}",), (1,), (-1,), 1) for i in range(200, 0, -1))],
        "chain",
    )
    outcome = Replay(schedule, 204, make_policy("lru"), limit=1.01).run()
    assert outcome.status == "thrash"
    assert Replay(schedule, 202, make_policy("lru"), limit=math.inf).run().status == "oom"


def test_the_observer_sees_every_storage_come_and_go():
    schedule = schedule_of(random_log(5), "random")
    seen = []
    replay = Replay(
        schedule,
        schedule.peak_bytes // 2,
        make_policy("h_dtr"),
        limit=math.inf,
        observer=lambda what, storage: seen.append((what, storage.nbytes)),
    )
    outcome = replay.run()
    come = sum(nbytes for what, nbytes in seen if what == "compute")
    gone = sum(nbytes for what, nbytes in seen if what == "evict")
    assert come - gone == replay.memory
    assert sum(what == "evict" for what, _ in seen) == outcome.evictions
