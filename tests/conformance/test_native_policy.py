"""The native policy makes the same choices as the one in Python that it stands for, by every heuristic."""

import gc
import random
import weakref
from pathlib import Path

import pytest

from dtrrun.core.foresight import Foresight, WatchedStep
from dtrrun.core.graph import Graph, Signature
from dtrrun.core.heuristics import ABLATION_NAMES, HEURISTIC_NAMES, make_heuristic
from dtrrun.core.search import make_policy
from dtrrun.native import build
from dtrrun.runtime.dispatch import native
from dtrrun.simulator.live import predict
from dtrrun.simulator.log import read_log

LOGS = sorted(Path(__file__).parents[1].joinpath("logs").glob("*.log.gz"))


ALL = (
    *(name for name in (*HEURISTIC_NAMES, *ABLATION_NAMES[::3]) if name != "random"),
    *(
        f"h_chain(c={cost},s={staleness},next={following},released={released})"
        for cost in ("ancestors", "e_star")
        for staleness in ("0", ".2", "1")
        for following, released in (("0", "alike"), ("0.5", "first"), ("1", "alike"), ("1.5", "alike"))
    ),
)


@pytest.fixture(scope="module")
def make_native():
    try:
        extension = build.load(print)
    except build.CannotBuild as error:
        pytest.skip(str(error))
    return lambda name="h_dtr_eq": (extension.Policy(make_heuristic(name)), native.graph(extension))


@pytest.mark.parametrize(
    "name",
    [
        "h_dtr_eq",
        "h_chain(c=ancestors,s=.2,next=1,released=alike)",
        "h_chain(c=e_star,s=.5,next=1.5,released=alike)",
        "h_next",
    ],
)
@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name.partition(".")[0])
def test_it_runs_logs_alike(make_native, path, name):
    log = read_log(path)
    peak = predict(log, None).peak_bytes
    for share in (0.8, 0.5, 0.4, 0.3) if name == "h_dtr_eq" else (0.5,):
        budget = int(peak * share)
        theirs = predict(log, budget, name, limit=20)
        policy, graph = make_native(name)
        ours = predict(log, budget, limit=20, policy=policy, graph=graph)
        assert (ours.status, ours.evictions, ours.steps) == (theirs.status, theirs.evictions, theirs.steps)
        assert ours.evaluations <= theirs.evaluations * 1.02


class Storage:
    """Stands for one of PyTorch's."""


class Maker:
    """Stands for an operator."""

    def __init__(self, name):
        self.name = name


class World:
    """Versions and a policy, to which the same things are done as in another world, by number.

    For foresight, it is a program, which makes one storage an operator.
    """

    def __init__(self, policy, graph=None, steps=()):
        self.graph = graph or Graph()
        self.policy, self.clock, self.age = policy, 0, 0
        self.storages, self.versions = {}, {}
        self.foreseen = 0  # choices with foresight
        if policy.heuristic.foresight:
            policy.foresight = Foresight(self, steps)

    def made_last(self):
        for number in reversed(self.storages):
            version = self.versions[number]
            yield version.age, version.operation.signature.operator.name, version.nbytes

    def make(self, number, nbytes, cost, inputs, name="some"):
        storage = self.storages[number] = Storage()
        self.age = number + 1
        version = self.graph.new_version(storage, None, nbytes, self.age, self.clock)
        reads = [self.versions[one] for one in inputs if one in self.versions]
        version.operation = self.graph.new_operation(None, Signature(Maker(name), ()), reads, reads)
        version.cost = cost
        self.versions[number] = version
        self.policy.insert(version)

    def evict(self, nearest):
        chosen = self.policy.select(self.clock, lambda version: version.age % 7 != nearest % 7)
        if chosen is None:
            return None
        chosen.resident = False
        if chosen.scratch is None:
            self.policy.evicted(chosen)
        else:
            chosen.scratch = None
            self.policy.released(chosen)
        return chosen.age - 1, chosen.nbytes

    def bring_back(self, number):
        """If the program has released it, the memory is dtrrun's own."""
        version = self.versions.get(number)
        if version is not None and not version.resident:
            version.resident, version.last_access = True, self.clock
            if number not in self.storages:
                version.scratch = Storage()
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
        version = self.versions.get(number)
        if number not in self.storages and version is not None:
            if version.scratch is not None:
                version.resident, version.scratch = False, None
                self.policy.discard(version)
                self.policy.released(version)
            del self.versions[number]

    def change_cost(self, number, cost):
        version = self.versions.get(number)
        if version is not None and version.resident:
            version.cost = cost
            self.policy.cost_changed(version)

    def change_inputs(self, number, other):
        version, source = self.versions.get(number), self.versions.get(other)
        if version is not None and version.resident and source is not None and source.age < version.age:
            version.operation.inputs.append(source)
            self.policy.cost_changed(version)

    def look(self, number):
        version = self.versions.get(number)
        return version and self.policy.projected_cost(version)

    def begin(self, number):
        """A step begins."""
        foresight = self.policy.foresight
        if foresight is not None:
            self.foreseen += foresight.looks - foresight.lost
            foresight.begin()

    def seen(self):
        costs = {one: self.policy.projected_cost(version) for one, version in self.versions.items()}
        return costs, len(self.policy), self.policy.nbytes, [version.age for version in self.policy]


EVENTS = {
    "make": 60,
    "evict": 40,
    "bring_back": 30,
    "touch": 30,
    "release": 20,
    "forget": 20,
    "change_cost": 10,
    "change_inputs": 10,
    "look": 10,
    "begin": 3,
}


class Script:
    """What the program makes: mostly as in one of two recorded steps."""

    def __init__(self, draw, unit):
        self.draw, self.unit = draw, unit
        self.lines = [[self.line() for _ in range(150)] for _ in range(2)]
        self.steps = [self.watched(lines) for lines in self.lines]
        self.begin()

    def begin(self):
        self.step, self.place = self.draw.randrange(2), -1

    def line(self):
        return f"op{self.draw.randrange(6)}", self.draw.choice([0, 1, 20, 20, 50]) * self.unit

    def watched(self, lines):
        step, made = WatchedStep(), []
        for place, (name, nbytes) in enumerate(lines):
            used = self.draw.sample(made, min(len(made), 3)) + made[-2:]
            made.append((place + 1, nbytes))
            other = self.draw.choice([nbytes, nbytes, 7 * self.unit])
            step.add(place + 1, name, self.draw.randint(0, 90) * self.unit, used, {nbytes, other})
        step.end(Rescues(self.draw.sample(made, 20)))
        return step

    def next(self):
        if self.draw.random() < 0.03:
            self.step, self.place = self.draw.randrange(2), self.draw.randrange(150)  # as if it jumped
        self.place = (self.place + 1) % 150
        return self.line() if self.draw.random() < 0.02 else self.lines[self.step][self.place]


class Rescues:
    def __init__(self, made):
        self.made = made

    def rescued_since(self, age):
        for one, nbytes in self.made:
            version = Graph().new_version(self, None, nbytes, one, 0)
            yield version


def live(draw, worlds, events, unit):
    """Let the same things happen in all worlds. The results must be the same."""
    script = Script(draw, unit)
    for world in worlds:
        if world.policy.foresight is not None:
            world.policy.foresight.steps = script.steps
    made = 0
    for _ in range(events):
        number = draw.randrange(max(made - 60, 0), made + 1)
        what = draw.choices(list(EVENTS), list(EVENTS.values()))[0]
        arguments = [number]
        if what == "make":
            recent = range(max(made - 40, 0), made)
            inputs = draw.choices(recent, k=draw.randrange(4)) if made else []
            name, nbytes = script.next()
            arguments = [made, nbytes, draw.randint(0, 9000) * unit, inputs, name]
            made += 1
        elif what == "change_cost":
            arguments.append(draw.randint(0, 9000) * unit)
        elif what == "begin":
            script.begin()
        elif what == "change_inputs":
            arguments.append(draw.randrange(max(made - 60, 0), made + 1))
        passed = draw.randrange(1 << 20) * unit
        results = []
        for world in worlds:
            world.clock += passed
            results.append(getattr(world, what)(*arguments))
        assert results[1:] == results[:-1], what
    seen = [world.seen() for world in worlds]
    assert seen[1:] == seen[:-1]


@pytest.mark.parametrize("seed", range(12))
def test_it_chooses_alike_whatever_happens(make_native, seed):
    """Also with costs, sizes and times whose products no floating-point number holds exactly."""
    draw = random.Random(seed)
    worlds = World(make_policy("h_dtr_eq")), World(*make_native())
    live(draw, worlds, 3000, draw.choice([1, 1000, 1 << 22]))
    assert worlds[1].policy.score_evaluations > 0


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("seed", range(3))
def test_by_every_heuristic(make_native, name, seed):
    draw = random.Random(f"{name} {seed}")
    worlds = World(make_policy(name)), World(*make_native(name))
    live(draw, worlds, 1500, [1, 1000, 1 << 22][seed])
    assert worlds[1].policy.score_evaluations > 0
    if worlds[1].policy.foresight is not None:
        assert 50 < worlds[0].foreseen == worlds[1].foreseen


def test_scores_of_equal_value_go_to_the_first(make_native):
    for made in ((make_policy("h_dtr_eq"),), make_native()):
        world = World(*made)
        for number in range(20):
            world.make(number, 8, 100, [])
        world.clock = 1000
        assert [world.evict(4)[0] for _ in range(4)] == [0, 1, 2, 4]


def test_an_error_or_interrupt_while_choosing_loses_nothing(make_native):
    world = World(*make_native())
    for number in range(10):
        world.make(number, 8, 100 + number, [])
    world.clock = 1000

    def interrupted(version):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        world.policy.select(world.clock, interrupted)
    assert [world.evict(11)[0] for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("name", ["h_dtr_eq", "h_chain(c=e_star,s=.2,next=1,released=alike)"])
def test_it_dies_with_all_that_it_holds(make_native, name):
    world = World(*make_native(name))
    for number in range(50):
        world.make(number, 8, 100, [number - 1] if number else [])
        world.clock += 10
        world.evict(6)
    world.policy.foresight = world  # a cycle
    alive = weakref.ref(world)
    storages = [weakref.ref(storage) for storage in world.storages.values()]
    del world
    gc.collect()
    assert alive() is None
    assert not any(storage() for storage in storages)
