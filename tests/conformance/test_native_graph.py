"""The native graph: its nodes have the same attributes as in Python, its map of versions acts as a dict."""

import ctypes
import gc
import random
import threading
import weakref

import pytest
import torch
from faults import check_accounts
from programs import living_nodes

import dtrrun
from dtrrun import bindings
from dtrrun.bindings import graph_of, make_policy
from dtrrun.core.graph import Operation, Signature, Version
from dtrrun.core.observer import Observer
from dtrrun.extensions import build
from dtrrun.runtime import session as session_module
from tests import walks_model


@pytest.fixture
def graph(extension):
    return graph_of(extension)


class Storage:
    """Stands for one of PyTorch's."""


def attributes(node, names):
    return {name: getattr(node, name, None) for name in names if not name.startswith("__")}


def test_nodes_begin_as_the_simulators_do(graph):
    storage, told = torch.UntypedStorage(8), []
    graphs = bindings.graph(), graph
    versions = [one.new_version(storage, told.append, 64, 3, 500) for one in graphs]
    assert [one.key for one in versions] == [id(storage), graph.key_of(storage)]
    signatures = [one.signature(None, ()) for one in graphs]
    operations = [
        one.new_operation("call", signature, [version], [version])
        for one, signature, version in zip(graphs, signatures, versions, strict=True)
    ]
    for version, signature, operation in zip(versions, signatures, operations, strict=True):
        assert attributes(version, set(Version.__annotations__) - {"key"}) == {
            **dict.fromkeys(Version.__annotations__.keys() - {"key"}),
            "nbytes": 64,
            "age": 3,
            "last_access": 500,
            "extent": -1,
            "resident": True,
            "has_storage": True,
            "readers": 1,
            **dict.fromkeys(("cost", "mutations", "locks", "device", "period"), 0),
            **dict.fromkeys(
                ("escaped", "away", "fixed", "has_left", "superseded", "used", "released"), False
            ),
        }
        assert attributes(operation, Operation.__annotations__) == {
            "recorded": "call",
            "tensors": [version],
            "inputs": [version],
            "outputs": None,
            "places": [0],
            "signature": signature,
            "secured": False,
            "constants": (),
            "kept_inputs": (),
        }
        assert version() is storage


def test_python_has_the_same_object_for_a_version_whenever_it_looks(graph, extension):
    policy = make_policy("h_dtr_eq", extension=extension)
    before = extension.living()
    version = graph.new_version(torch.UntypedStorage(8), None, 64, 3, 500)
    version.operation = graph.new_operation(None, graph.signature(None, ()), [], [])
    version.uses, address, look = (1, 2), id(version), version.weak()
    policy.insert(version)  # from now on C++ keeps it, too
    del version
    assert (id(look()), look().uses, look().nbytes) == (address, (1, 2), 64)
    policy.discard(look())
    assert look() is None
    assert extension.living() == before


def test_nobody_finds_a_version_that_is_being_freed(graph):
    found = []

    class Recorded:
        def __del__(self) -> None:
            found.append(look())

    version = graph.new_version(torch.UntypedStorage(8), None, 64, 3, 500)
    version.operation = graph.new_operation(Recorded(), graph.signature(None, ()), [], [])
    look = version.weak()
    del version
    assert found == [None]


def test_a_signature_is_pythons_with_its_figures_elsewhere(graph):
    signature = graph.signature("operator", ("geometry",))
    assert isinstance(signature, Signature)
    assert vars(signature).keys() < vars(Signature("operator", ("geometry",))).keys()
    assert attributes(signature, vars(Signature("operator", ()))) == vars(
        Signature("operator", ("geometry",))
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_map_is_a_dict(graph, seed):
    draw = random.Random(seed)
    storages = [Storage() for _ in range(200)]
    ledger = graph.extension.Ledger()
    theirs, ours = {}, ledger.versions
    for _ in range(3000):
        storage = draw.choice(storages)
        key = id(storage)
        assert (key in ours) == (key in theirs)
        assert ours.get(key) is theirs.get(key)
        if draw.random() < 0.55:
            theirs[key] = ours[key] = graph.new_version(storage, None, 8, 0, 0)
        elif key in theirs:
            del theirs[key], ours[key]
        else:
            with pytest.raises(KeyError):
                del ours[key]
            with pytest.raises(KeyError):
                ours[key]
        assert len(ours) == len(theirs)
    assert list(ours.items()) == list(theirs.items())
    assert list(ours.values()) == list(theirs.values())
    assert list(reversed(ours.values())) == list(reversed(theirs.values()))


def test_the_map_does_not_change_during_iteration(graph):
    storages = [Storage() for _ in range(3)]
    versions = graph.extension.Ledger().versions
    for storage in storages:
        versions[id(storage)] = graph.new_version(storage, None, 8, 0, 0)
    walk = iter(versions.values())
    next(walk)
    del versions[id(storages[1])]
    with pytest.raises(RuntimeError, match="changed"):
        next(walk)


def test_the_map_takes_native_versions_alone(extension, graph):
    storage = Storage()
    versions = graph.extension.Ledger().versions
    with pytest.raises(TypeError):
        versions[id(storage)] = bindings.graph().new_version(storage, None, 8, 0, 0)
    with pytest.raises(TypeError):
        versions[id(storage) + 16] = graph.new_version(storage, None, 8, 0, 0)
    version = graph.new_version(storage, None, 8, 0, 0)
    with pytest.raises(TypeError):
        version.operation = bindings.load().Operation()
    with pytest.raises(TypeError):
        make_policy("h_dtr_eq", extension=extension).insert(
            bindings.graph().new_version(storage, None, 8, 0, 0)
        )


class Named(torch.UntypedStorage):
    """A kind of storage that a program might make."""


@pytest.mark.parametrize("kind", [torch.UntypedStorage, Named])
def test_a_death_is_told_once_the_last_has_let_go(graph, kind):
    ledger = graph.extension.Ledger()
    versions = ledger.versions
    storage = kind(64)
    tensor = torch.tensor([], dtype=torch.uint8).set_(storage)
    version = versions[graph.key_of(storage)] = graph.new_version(storage, ledger.on_death, 64, 0, 0)
    assert version() is storage
    del storage
    gc.collect()
    assert version() is not None
    assert not ledger.dead
    tensor = tensor[3:]
    assert not ledger.dead
    del tensor
    assert version() is None
    assert ledger.dead
    assert list(versions.values()) == [version]
    ledger.collect_dead()
    assert not ledger.dead
    assert len(versions) == 0


def test_a_death_while_an_error_passes(graph):
    ledger = graph.extension.Ledger()
    versions = ledger.versions

    def lets_go():
        storage = torch.UntypedStorage(8)
        versions[graph.key_of(storage)] = graph.new_version(storage, ledger.on_death, 8, 0, 0)
        raise KeyError("the program's")

    with pytest.raises(KeyError, match="the program's"):
        lets_go()
    gc.collect()
    assert ledger.dead


def test_versions_storages_and_maps_may_die_in_any_order(graph):
    for order in ("vsm", "vms", "svm", "smv", "mvs", "msv"):
        ledger = graph.extension.Ledger()
        alive = {"m": ledger.versions, "s": torch.UntypedStorage(8)}
        alive["v"] = graph.new_version(alive["s"], ledger.on_death, 8, 0, 0)
        del ledger
        alive["m"][graph.key_of(alive["s"])] = alive["v"]
        for name in order:
            del alive[name]
            gc.collect()
            if "v" in alive:
                assert (alive["v"]() is None) == (not {"s", "m"} <= alive.keys())


def test_a_superseded_version_has_no_storage_any_more(graph):
    ledger = graph.extension.Ledger()
    versions = ledger.versions
    storage = torch.UntypedStorage(8)
    first = versions[graph.key_of(storage)] = graph.new_version(storage, ledger.on_death, 8, 0, 0)
    second = versions[graph.key_of(storage)] = graph.new_version(storage, ledger.on_death, 8, 0, 0)
    assert first() is None
    assert second() is storage
    del storage
    assert second() is None
    assert ledger.dead
    ledger.collect_dead()
    assert len(versions) == 0


def test_a_long_chain_is_freed_without_a_long_stack(extension, monkeypatch):
    monkeypatch.setattr(session_module, "COMPACT_EVERY", 1 << 60)
    with dtrrun.budget("1GB") as session:
        before = living_nodes(session)
        x = torch.zeros(1)
        for _ in range(200_000):
            x = x + 1
        assert living_nodes(session)[1] - before[1] > 150_000
        assert x.item() == 200_000
        del x
        session.ledger.collect_dead()
        assert living_nodes(session)[1] - before[1] < 10


@pytest.mark.parametrize("seed", range(20))
def test_what_loses_its_recipe_is_what_the_model_finds(seed):
    """It happens at the end of a step, or of an iteration of the outer loop."""
    draw = random.Random(seed)
    carried, mutated = [], []
    with dtrrun.budget(4000, cost="model", over_budget="evict") as session:
        foreign = session.dtr.recipes.foreign
        weights = [torch.tensor([1.0] * 8) for _ in range(4)]  # constants
        kept = [weight * 2 for weight in weights]
        for at in range(300):
            kind = draw.random()
            if kind < 0.1:
                draw.choice(weights).add_(1)
            elif kind < 0.2:
                draw.choice(kept).mul_(draw.choice(kept))
            elif kind < 0.4:
                del kept[draw.randrange(len(kept))]
            kept.append(draw.choice(kept + weights) * draw.choice(kept + weights))
            if at % 10 == 9:
                session.ledger.collect_dead()
                ages = [session.ledger.age - draw.randrange(100) for _ in range(2)]
                ledger, versions = session.ledger, session.ledger.versions
                carried += walks_model.carried(versions.values(), ages[0])
                assert ledger.carried(ages[0]) == walks_model.carried(versions.values(), ages[0])
                trusted = foreign.trusted()
                found = walks_model.mutated(versions.values(), ages[1], trusted)
                mutated += found
                assert ledger.mutated(ages[1], trusted) == found
    assert len(carried) > 10
    assert len(mutated) > 1


def test_a_trusted_constant_is_no_lost_input():
    with dtrrun.budget(1000, over_budget="evict") as session:
        foreign, mutated = session.dtr.recipes.foreign, session.ledger.mutated
        weight = torch.nn.Parameter(torch.from_numpy(torch.ones(64).numpy().copy()))
        kept = [weight * number for number in range(8)]
        assert foreign.trusted() == [session.callbacks.version_of(weight)]
        assert mutated(0, foreign.trusted()) == []
        assert mutated(0, []) != []
        assert len(kept) == 8


def test_results_have_no_storage_in_python(extension):
    """PyTorch could not release these without the GIL, and the garbage collector would visit them."""

    def storages():
        return sum(type(one) is torch.UntypedStorage for one in gc.get_objects())

    with dtrrun.budget(None) as session:
        x = torch.ones(8) * 2
        x * 2  # the first call
        before = storages()
        kept = [x * 2 for _ in range(100)]
        assert storages() == before
        assert session.callbacks.version_of(kept[0])().nbytes() == 32
        assert len(session.ledger.versions) > 100
        del kept
        session.ledger.collect_dead()
        assert len(session.ledger.versions) < 100


def test_what_the_program_notes_on_a_storage_stays(extension):
    with dtrrun.budget(None):
        made = torch.ones(8) * 2
        made = made * 2  # handled natively
        made.untyped_storage().note = "the program's"
        gc.collect()
        storage = made.untyped_storage()
        del made
        assert storage.note == "the program's"
        told = weakref.ref(storage)
        del storage
        assert told() is None


def test_a_storage_outlives_its_session(extension):
    """Its death concerns no session then, or a version of the next session, which may track it too."""
    x = torch.arange(LARGE / 4)
    with dtrrun.budget(None):
        first, second = x * 2, x * 3
    del first
    with dtrrun.budget(None) as session:
        ledger = session.ledger
        second.add_(1)
        third = x * 4
        assert ledger.resident_bytes == 3 * LARGE
        del second
        ledger.collect_dead()
        assert ledger.resident_bytes == 2 * LARGE
    del ledger, session
    assert torch.equal(third, x * 4)
    told = weakref.ref(third.untyped_storage())
    del third
    assert told() is None


def of_another_class(tensor):
    """Give a tensor's storage its own table of virtual functions, as an object of a derived class has."""
    storage = build.load(print).storage_of(tensor)  # PyTorch has no Python object for it
    first = ctypes.c_void_p.from_address(storage._cdata)
    words = ctypes.c_void_p * 8  # two words precede those of virtual functions
    tables.append(words.from_buffer_copy(words.from_address(first.value - 16)))
    first.value = ctypes.addressof(tables[-1]) + 16
    return tensor


tables = []
LARGE = 1 << 16
"""Bytes. Small constants are kept alive."""


@pytest.mark.parametrize("of", [torch.clone, of_another_class], ids=["PyTorch's", "another class"])
def test_storages_of_another_class_are_counted_as_well(extension, of):
    """A weak reference in Python reports their death, and their operators fall back to Python."""
    x = of(torch.arange(LARGE / 4))
    with dtrrun.budget(None, cost="model") as session:
        ledger = session.ledger
        y = x * 2
        version = session.callbacks.version_of(x)
        gc.collect()
        ledger.collect_dead()
        assert ledger.resident_bytes == 2 * LARGE
        assert version() is not None
        ledger.begin_pressure()
        assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(y))
        assert ledger.resident_bytes == LARGE
        x.add_(1)  # y comes back first
        assert torch.equal(y, torch.arange(LARGE / 4) * 2)
        for _ in range(3):
            y = x * 2
            x.add_(1)  # a recipe reads the old value of x
        assert torch.equal(x, torch.arange(LARGE / 4) + 4)
        check_accounts(session)
        assert ledger.resident_bytes == 2 * LARGE
        del x
        ledger.collect_dead()
        assert ledger.resident_bytes == LARGE


def test_deaths_in_other_threads(extension):
    with dtrrun.budget(None) as session:
        x = torch.ones(8)
        x * 2
        session.ledger.collect_dead()
        before = session.ledger.resident_bytes
        kept = [x * 2 for _ in range(1000)]
        assert session.ledger.resident_bytes == before + 1000 * 64
        threads = [threading.Thread(target=kept[place::4].clear) for place in range(4)]
        for one in threads:
            one.start()
        del kept
        for one in threads:
            one.join()
        del threads, one
        session.ledger.collect_dead()
        assert session.ledger.resident_bytes == before


@pytest.mark.parametrize("observed", [False, True])
def test_gradients_are_summed_in_place_as_without_us(extension, observed):
    """PyTorch does so if it knows of no other reference to their storages."""
    looks = Observer()
    looks.finished = lambda call, outputs: [storage.nbytes() for storage, _ in call.results]
    with dtrrun.budget(None) as session:
        if observed:
            session.ledger.observers.append(looks)
        for _ in range(3):
            x = torch.ones(8, requires_grad=True) * 1
            (x * 2 + x * 3 + x * 4).sum().backward()
        calls = session._native.native_calls()
    assert calls["aten.add_"] >= 2
    assert calls["aten.add"] <= 3 * 2
