"""Storages made while no operator is running respect the budget, whichever way they are made.

The bytes are counted in the heap's blocks, independently of the ledger.
"""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import multiprocessing, nn

import dtrrun
from tests.conformance.programs import bits

pytestmark = pytest.mark.usefixtures("extension")

COUNT = 1 << 18
NBYTES = 4 * COUNT


def saved(value, **how):
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def scripted():
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(512, 512, bias=False)), file)
    return file.getvalue()


def numbers():
    return torch.arange(COUNT, dtype=torch.float32)


def given(make, use):
    """Return a way that starts with something made before the session."""
    return lambda: (lambda value: lambda: use(value))(make())


def done(value, method, *given):
    getattr(value, method)(*given)
    return value


def module():
    return nn.Linear(512, 512, bias=False)


def loaded(data):
    return torch.load(io.BytesIO(data), weights_only=False)


WAYS = {
    "UntypedStorage(n)": lambda: lambda: torch.UntypedStorage(NBYTES),
    "on a device": lambda: lambda: torch.UntypedStorage(NBYTES, device="cpu"),
    "of numbers": given(lambda: [1] * NBYTES, torch.UntypedStorage),
    "TypedStorage(n)": lambda: lambda: torch.TypedStorage(COUNT, dtype=torch.float32),
    "TypedStorage of numbers": given(
        lambda: [1.0] * COUNT, lambda some: torch.TypedStorage(some, dtype=torch.float32)
    ),
    "FloatStorage(n)": lambda: lambda: torch.FloatStorage(COUNT),
    "FloatTensor(n)": lambda: lambda: torch.FloatTensor(COUNT),
    "FloatTensor of numbers": given(lambda: [1.0] * COUNT, torch.FloatTensor),
    "Tensor(n)": lambda: lambda: torch.Tensor(COUNT),
    "new(n)": given(numbers, lambda x: x.new(COUNT)),
    "new of numbers": given(lambda: [1.0] * COUNT, lambda some: torch.ones(1).new(some)),
    "tensor of numbers": given(lambda: [1.0] * COUNT, torch.tensor),
    "tensor of an array": given(lambda: numbers().numpy(), torch.tensor),
    "asarray": given(lambda: [1.0] * COUNT, torch.asarray),
    "new_tensor": given(lambda: [1.0] * COUNT, lambda some: torch.ones(1).new_tensor(some)),
    "clone": given(lambda: torch.UntypedStorage(NBYTES), lambda storage: storage.clone()),
    "copy": given(lambda: torch.FloatStorage(COUNT), copy.copy),
    "deepcopy of a storage": given(lambda: torch.UntypedStorage(NBYTES), copy.deepcopy),
    "deepcopy of a tensor": given(numbers, copy.deepcopy),
    "deepcopy of a module": given(module, copy.deepcopy),
    "another type": given(lambda: torch.IntStorage(COUNT), lambda storage: storage.float()),
    "from a buffer": given(
        lambda: bytearray(NBYTES), lambda some: torch.UntypedStorage.from_buffer(some, dtype=torch.uint8)
    ),
    "resize_": lambda: lambda: torch.UntypedStorage(0).resize_(NBYTES),
    "resize_ of a typed one": lambda: lambda: done(torch.FloatStorage(0), "resize_", COUNT),
    "resize_ of a tensor's": lambda: lambda: torch.ones(1).untyped_storage().resize_(NBYTES),
    "resize_ of a tensor": lambda: lambda: torch.ones(1).resize_(COUNT),
    "load": given(lambda: saved(numbers()), loaded),
    "load in the old format": given(lambda: saved(numbers(), _use_new_zipfile_serialization=False), loaded),
    "load of a storage": given(lambda: saved(torch.FloatStorage(COUNT)), loaded),
    "unpickle": given(lambda: pickle.dumps(numbers()), pickle.loads),
    "jit.load": given(scripted, lambda data: torch.jit.load(io.BytesIO(data))),
}


def most_made_by(extension, way, budget_bytes):
    """Return the peak bytes of blocks while a session evicts all it may and `way` is done six times."""
    make = way()
    with dtrrun.budget(budget_bytes) as session:
        base = torch.ones(COUNT)
        kept = [base + i for i in range(5)]  # these can be evicted
        gc.collect()
        others = extension.heap_figures()[0] - 6 * NBYTES  # blocks of the test run itself
        extension.heap_most()
        made = []
        refused = False
        try:
            for _ in range(6):
                made.append(make())
        except torch.OutOfMemoryError:
            refused = True
        assert session.report()["evictions"] >= 4
        assert session.report()["over_budget"] == 0
        most = extension.heap_most() - others
        del made
        if refused:  # what was made has been freed
            assert torch.zeros(COUNT).sum() == 0
    assert bits([kept]) == bits([[base + i for i in range(5)]])
    return most, refused


@pytest.mark.parametrize("name", WAYS)
def test_the_budget_holds(extension, name):
    most, _ = most_made_by(extension, WAYS[name], budget := 7 * NBYTES)
    assert most <= budget


def test_the_error_says_what_takes_the_memory():
    with dtrrun.budget(3 * NBYTES):
        held = [torch.UntypedStorage(NBYTES), torch.UntypedStorage(NBYTES)]
        with pytest.raises(torch.OutOfMemoryError, match=r"storages that are no tensor's 2\.1 MB"):
            torch.zeros(2 * COUNT)
        with pytest.raises(torch.OutOfMemoryError, match=r"a storage needs 2\.1 MB more"):
            torch.UntypedStorage(2 * NBYTES)
        del held
        torch.zeros(2 * COUNT)


def test_an_optimizer_s_state_is_copied_inside_the_budget(extension):
    """Trainers do this at a checkpoint."""
    gc.collect()
    net = nn.Sequential(*[nn.Linear(256, 256) for _ in range(10)])
    optimizer = torch.optim.Adam(net.parameters())
    kept = []
    others = extension.heap_figures()[0]
    with dtrrun.budget(18_000_000) as session:
        net(torch.randn(8, 256)).sum().backward()
        optimizer.step()
        extension.heap_most()
        kept.append(copy.deepcopy(optimizer.state_dict()))
        with pytest.raises(torch.OutOfMemoryError):
            kept.append(copy.deepcopy(optimizer.state_dict()))
        assert session.report()["over_budget"] == 0
        assert extension.heap_most() - others <= 18_000_000


def test_shared_memory_has_room_before_it_is_made():
    with dtrrun.budget(4 * NBYTES) as session:
        base = torch.ones(COUNT)
        kept = [base + 1, base + 2, base + 3]
        torch.UntypedStorage._new_shared(2 * NBYTES)
        assert session.report()["evicted_bytes"] == 2 * NBYTES
        kept[2].share_memory_()  # takes the old and the new memory at once
        assert session.report()["evicted_bytes"] == 2 * NBYTES
        with pytest.raises(torch.OutOfMemoryError):
            torch.UntypedStorage._new_shared(4 * NBYTES)
        assert multiprocessing.get_sharing_strategy()
    assert kept[0].sum() == 2 * COUNT


def test_pytorch_s_allocator_is_as_it_was_after_a_session(extension):
    before = extension.heap_figures()[0]
    kept = torch.UntypedStorage(NBYTES)
    with dtrrun.budget("1GB"):
        inside = torch.UntypedStorage(NBYTES)
        assert extension.heap_figures()[0] == before + NBYTES
    after = torch.UntypedStorage(NBYTES)
    assert extension.heap_figures()[0] == before + NBYTES
    del inside
    assert extension.heap_figures()[0] == before
    del kept, after
