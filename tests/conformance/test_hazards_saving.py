"""Checkpoints and copies during training: reading a model hands nothing out for good."""

import copy
import ctypes
import io
import pickle
from types import SimpleNamespace

import pytest
import torch
from programs import check_stress, plain, run_inside
from torch import nn

import dtrrun


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)
    )


def looked_at(module, model):
    """Read addresses as a function of that module does: they tell which tensors share a storage."""
    namespace = {"__name__": module}
    exec("def look(x): return x.data_ptr(), x.untyped_storage().data_ptr()", namespace)
    return [namespace["look"](value) for value in model.state_dict().values()]


def loaded(value, **options):
    file = io.BytesIO()
    torch.save(value, file, **options)
    file.seek(0)
    return torch.load(file, weights_only=False)


READ = {
    "save": lambda model, optimizer: loaded([model.state_dict(), optimizer.state_dict()]),
    "save a module": lambda model, optimizer: loaded(model),
    "save in the old format": lambda model, optimizer: loaded(
        model.state_dict(), _use_new_zipfile_serialization=False
    ),
    "pickle": lambda model, optimizer: pickle.dumps([model.state_dict(), optimizer.state_dict()]),
    "look whether it is shared": lambda model, optimizer: [value.is_shared() for value in model.parameters()],
    "safetensors": lambda model, optimizer: looked_at("safetensors.torch", model),
    "copy a module": lambda model, optimizer: copy.deepcopy(model),
    "copy a state": lambda model, optimizer: copy.deepcopy([model.state_dict(), optimizer.state_dict()]),
    "copy and load": lambda model, optimizer: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "assign": lambda model, optimizer: convnet().load_state_dict(loaded(model.state_dict()), assign=True),
}


def step(model, optimizer):
    loss = model(torch.randn(8, 1, 16, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_what_was_read_is_recomputed_from_all_the_same(read):
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    with dtrrun.budget("1GB") as session:
        step(model, optimizer)
        kept = read(model, optimizer)
        assert not any(record.escaped or record.locks for record in session.ledger.versions.values())
        hidden = model(torch.randn(8, 1, 16, 16))
        assert session.ledger.version_of(torch._C.TensorBase.untyped_storage(hidden)).operation is not None
    del kept


@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_a_training_goes_on_within_its_budget(read):
    """What it read must not take memory that the following steps need."""

    def program():
        torch.manual_seed(0)
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        losses = []
        for turn in range(5):
            if turn == 2:
                losses.append(read(model, optimizer) and 0)
            losses.append(step(model, optimizer))
        return losses, model

    expected = plain(program)
    found, report = run_inside(program, 120_000)
    assert found == expected
    assert report["mismatches"] == []


@pytest.mark.parametrize("way", ["load", "copy"])
def test_what_was_loaded_can_be_recomputed_from(way):
    with dtrrun.budget("1GB") as session:
        model = loaded(convnet()) if way == "load" else copy.deepcopy(convnet())
        hidden = model(torch.randn(8, 1, 16, 16))
        assert session.ledger.version_of(torch._C.TensorBase.untyped_storage(hidden)).operation is not None


def test_memory_that_was_loaded_cannot_be_given_back():
    """It is part of what was read from the file: recomputed from, but never evicted."""

    def program():
        x, y = loaded([torch.arange(64.0), torch.arange(64.0)])
        before = x * 2
        x.zero_()
        y.add_(1)
        y.copy_(before + y)
        x.copy_(y)
        y.fill_(3)
        return before, x, y, x + y

    check_stress(program)
    with dtrrun.budget(None) as session:
        (x,) = loaded([torch.arange(64.0)])
        x.zero_()
        version = session.callbacks.version_of(x)
        assert version.pin == "loaded or copied"
        assert not session.dtr.eviction.evict_if_possible(version)


def test_what_a_reader_was_handed_stays_where_it_is():
    """The reader may write all of it to a file later, using only the addresses."""
    with dtrrun.budget(1, over_budget="evict") as session:
        x = torch.full((1024,), 3.0) * 2
        ((address, _),) = looked_at("safetensors.torch", SimpleNamespace(state_dict=lambda: {"x": x}))
        kept = [torch.full((1024,), 1.0) + turn for turn in range(8)]
        assert session.report()["evictions"] > 0
        assert ctypes.c_float.from_address(address).value == 6
        assert torch._C.TensorBase.data_ptr(x) == address
    del kept


def test_other_modules_are_handed_memory_for_good():
    model = convnet()
    with dtrrun.budget("1GB") as session:
        looked_at("train", model)
        records = session.ledger.versions.values()
        assert all(record.escaped for record in records if record.pin == "parameter")


def test_a_storage_that_the_program_takes_is_handed_out():
    class Keeper:
        def __deepcopy__(self, memo):
            return Keeper()

    with dtrrun.budget("1GB") as session:
        x, y = torch.ones(64), torch.ones(64)
        copy.deepcopy([x, Keeper()])
        y.untyped_storage()
        exposed = [
            session.ledger.version_of(torch._C.TensorBase.untyped_storage(tensor)).escaped
            for tensor in (x, y)
        ]
    assert exposed == [False, True]


@pytest.mark.parametrize("read", [loaded, copy.deepcopy])
def test_what_was_saved_can_be_evicted_afterwards(read):
    with dtrrun.budget("1GB") as session:
        x = torch.full((64,), 3.0) * 2
        read([x])
        record = session.ledger.version_of(torch._C.TensorBase.untyped_storage(x))
        assert (record.operation is not None, record.locks) == (True, 0)


def test_nothing_stays_locked_when_saving_fails():
    class Broken:
        def __reduce__(self):
            raise RuntimeError("cannot be pickled")

    with dtrrun.budget("1GB") as session:
        x = torch.ones(64) * 2
        with pytest.raises(RuntimeError, match="cannot be pickled"):
            torch.save([x, Broken()], io.BytesIO())
        x.untyped_storage()
        assert not any(record.locks for record in session.ledger.versions.values())
        assert session.ledger.version_of(torch._C.TensorBase.untyped_storage(x)).escaped
