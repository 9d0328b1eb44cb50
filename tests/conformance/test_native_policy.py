"""The native policy makes the same choices as the one in Python that it stands for."""

import gc
import random
import weakref
from pathlib import Path

import pytest

from dtrrun.core.graph import Operation, Signature, Version, new_operation, new_version
from dtrrun.core.heuristics import make_heuristic
from dtrrun.core.search import make_policy
from dtrrun.native import build
from dtrrun.simulator.live import predict
from dtrrun.simulator.log import read_log

LOGS = sorted(Path(__file__).parents[1].joinpath("logs").glob("*.log.gz"))


@pytest.fixture(scope="module")
def make_native():
    try:
        extension = build.load(print)
    except build.CannotBuild as error:
        pytest.skip(str(error))
    return lambda: extension.Policy(make_heuristic("h_dtr_eq"), Version, Operation)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name.partition(".")[0])
def test_it_runs_logs_alike(make_native, path):
    log = read_log(path)
    peak = predict(log, None).peak_bytes
    for share in (0.8, 0.5, 0.4, 0.3):
        budget = int(peak * share)
        theirs = predict(log, budget, limit=20)
        ours = predict(log, budget, limit=20, policy=make_native())
        assert (ours.status, ours.evictions, ours.steps) == (theirs.status, theirs.evictions, theirs.steps)
        assert ours.evaluations <= theirs.evaluations * 1.02


class Storage:
    """Stands for one of PyTorch's."""


class World:
    """Versions and a policy, to which the same things are done as in another world, by number."""

    def __init__(self, policy):
        self.policy, self.clock = policy, 0
        self.storages, self.versions = {}, {}

    def make(self, number, nbytes, cost, inputs):
        storage = self.storages[number] = Storage()
        version = new_version(storage, None, nbytes, number, self.clock)
        reads = [self.versions[one] for one in inputs if one in self.versions]
        version.operation, version.cost = new_operation(None, Signature(None, ()), reads, reads), cost
        self.versions[number] = version
        self.policy.insert(version)

    def evict(self, nearest):
        chosen = self.policy.select(self.clock, lambda version: version.age % 7 != nearest % 7)
        if chosen is None:
            return None
        chosen.resident = False
        self.policy.evicted(chosen)
        return chosen.age, chosen.nbytes

    def bring_back(self, number):
        version = self.versions.get(number)
        if version is not None and not version.resident and number in self.storages:
            version.resident, version.last_access = True, self.clock
            self.policy.rematerialized(version)
            self.policy.insert(version)

    def touch(self, number):
        if number in self.versions:
            self.versions[number].last_access = self.clock

    def release(self, number):
        """The program releases it. It lives on while recipes read it."""
        if self.storages.pop(number, None) is not None:
            version = self.versions[number]
            if version.resident:
                version.resident = False
                self.policy.discard(version)
                self.policy.released(version)

    def forget(self, number):
        """The only reference of ours: it dies, unless recipes read it."""
        if number not in self.storages:
            self.versions.pop(number, None)

    def change_cost(self, number, cost):
        version = self.versions.get(number)
        if version is not None and version.resident:
            version.cost = cost
            self.policy.cost_changed(version)

    def seen(self):
        costs = {one: self.policy.projected_cost(version) for one, version in self.versions.items()}
        return costs, len(self.policy), self.policy.nbytes, [version.age for version in self.policy]


EVENTS = {"make": 6, "evict": 4, "bring_back": 3, "touch": 3, "release": 2, "forget": 2, "change_cost": 1}


@pytest.mark.parametrize("seed", range(12))
def test_it_chooses_alike_whatever_happens(make_native, seed):
    """Also with costs, sizes and times whose products no floating-point number holds exactly."""
    draw = random.Random(seed)
    worlds = World(make_policy("h_dtr_eq")), World(make_native())
    unit = draw.choice([1, 1000, 1 << 22])
    made = 0
    for _ in range(3000):
        number = draw.randrange(max(made - 60, 0), made + 1)
        what = draw.choices(list(EVENTS), list(EVENTS.values()))[0]
        arguments = [number]
        if what == "make":
            recent = range(max(made - 40, 0), made)
            inputs = draw.choices(recent, k=draw.randrange(4)) if made else []
            arguments = [made, draw.randint(0, 50) * unit, draw.randint(0, 9000) * unit, inputs]
            made += 1
        elif what == "change_cost":
            arguments.append(draw.randint(0, 9000) * unit)
        passed = draw.randrange(1 << 20) * unit
        results = []
        for world in worlds:
            world.clock += passed
            results.append(getattr(world, what)(*arguments))
        assert results[0] == results[1]
    assert worlds[0].seen() == worlds[1].seen()
    assert worlds[1].policy.score_evaluations > 0


def test_scores_of_equal_value_go_to_the_first(make_native):
    for policy in (make_policy("h_dtr_eq"), make_native()):
        world = World(policy)
        for number in range(20):
            world.make(number, 8, 100, [])
        world.clock = 1000
        assert [world.evict(3)[0] for _ in range(4)] == [0, 1, 2, 4]


def test_an_error_or_interrupt_while_choosing_loses_nothing(make_native):
    world = World(make_native())
    for number in range(10):
        world.make(number, 8, 100 + number, [])
    world.clock = 1000

    def interrupted(version):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.policy.select(world.clock, interrupted)
    assert [world.evict(10)[0] for _ in range(3)] == [0, 1, 2]


def test_it_dies_with_all_that_it_holds(make_native):
    world = World(make_native())
    for number in range(50):
        world.make(number, 8, 100, [number - 1] if number else [])
        world.clock += 10
        world.evict(6)
    world.keeps = world.policy
    world.versions[3].uses = world  # a cycle through the pool
    alive = weakref.ref(world)
    storages = [weakref.ref(storage) for storage in world.storages.values()]
    del world
    gc.collect()
    assert alive() is None
    assert not any(storage() for storage in storages)
