"""Parameters in memory that PyTorch does not own: results can be recomputed from them."""

import multiprocessing.sharedctypes

import numpy as np
import pytest
import torch
from programs import bits, check_budget, check_stress, in_memory, mlp, plain, run_inside
from torch import nn
from torch.utils.data import DataLoader, Dataset

import dtrrun
from dtrrun.core.foreign import LostError

ROWS, WIDTH = 128, 16


def from_array(weight: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(weight.numpy().copy())


def from_buffer(weight: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(bytearray(weight.numpy().tobytes()), dtype=weight.dtype).view(weight.shape)


def from_file(weight: torch.Tensor) -> torch.Tensor:
    """Map a part of the file privately, as safetensors does."""
    path = from_file.folder / "weights"
    path.write_bytes(bytes(64) + weight.numpy().tobytes())
    storage = torch.UntypedStorage.from_file(str(path), False, 64 + weight.nbytes)
    path.unlink()
    return torch.asarray(storage[64:], dtype=torch.uint8).view(weight.dtype).view(weight.shape)


def mapped(weight: torch.Tensor) -> torch.Tensor:
    """Load as `torch.load(mmap=True)` does."""
    path = from_file.folder / "saved"
    torch.save(weight, path)
    loaded = torch.load(path, mmap=True)
    path.unlink()
    return loaded


LOADERS = (from_array, from_buffer, from_file, mapped)


@pytest.fixture(autouse=True)
def folder(tmp_path):
    from_file.folder = tmp_path


def loaded(load, *, frozen: bool = False, width: int = WIDTH) -> nn.Module:
    """Return a model whose weights are in memory that PyTorch does not own."""
    model = mlp(6, width)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            foreign = nn.Parameter(load(parameter.detach()), requires_grad=not frozen)
            setattr(module, name, foreign)
    return model


def fine_tuning(load, *, before: nn.Module | None = None):
    def program():
        model = loaded(load) if before is None else before
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(3):
            x = torch.sin(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) + step)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, model

    return program


@pytest.mark.parametrize("load", LOADERS)
def test_loaded_weights_are_recomputed_from(load):
    program = fine_tuning(load)
    expected = plain(program)
    check_stress(program, expected)
    peak = run_inside(program, None)[1]["peak_bytes"]
    found, report = run_inside(program, peak * 6 // 10, cost="model")  # as with PyTorch's own weights
    assert found == expected
    assert report["evictions"] > 0
    assert report["peak_bytes"] <= peak * 6 // 10


@pytest.mark.parametrize("load", LOADERS)
def test_weights_that_were_loaded_before_the_session(load):
    expected = plain(fine_tuning(load))
    torch.manual_seed(7)
    model = loaded(load)
    with dtrrun.budget(10 * ROWS * WIDTH * 4, verify=True) as session:
        found = fine_tuning(load, before=model)()
        assert session.report()["evictions"] > 0
    assert bits(found) == expected[: len(bits(found))]


@pytest.mark.parametrize("load", LOADERS)
def test_frozen_weights(load):
    """Frozen weights, as with adapters, have no gradient but are still parameters."""

    def program():
        model = loaded(load, frozen=True)
        adapter = nn.Parameter(torch.ones(WIDTH))
        kept = []
        for step in range(3):
            x = torch.sin(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) + step) * adapter
            with torch.autocast("cpu", torch.bfloat16, enabled=step == 1):
                kept.append(model(x))
            with torch.no_grad():
                kept.append(model(x))
        sum(one.float().sum() for one in kept).backward()
        return kept, model, adapter.grad

    check_stress(program)
    check_budget(program)


def test_operators_write_to_loaded_weights():
    def program():
        weight = nn.Parameter(from_array(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)))
        x = torch.ones(ROWS, WIDTH)
        kept = []
        for step in range(6):
            kept += [x @ weight, (x @ weight).sin()]
            with torch.no_grad():
                if step % 3 == 0:
                    weight.mul_(0.9)
                elif step % 3 == 1:
                    torch._foreach_add_([weight], 0.1)
                else:
                    weight.copy_(torch.eye(WIDTH) * step)  # fully overwritten, not read: still not evictable
        return kept, weight

    check_stress(program)


def test_arrays_of_batches_are_refilled():
    """It is not a parameter: results computed from it stay, whatever the program does with the array."""

    def program():
        model = loaded(from_array)
        page = np.zeros((ROWS, WIDTH), dtype=np.float32)
        kept = []
        for step in range(3):
            page[:] = np.sin(np.arange(ROWS * WIDTH, dtype=np.float32) + step).reshape(ROWS, WIDTH)
            x = torch.from_numpy(page)
            kept += [x * 2, model(x), x.cos()]
            kept[-2].sum().backward()
        page[:] = -1
        return kept, model

    check_stress(program)


def descent(keep: bool):
    """Gradient descent in NumPy, on the array underneath a parameter."""

    def program():
        array = np.linspace(-1, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
        weight = nn.Parameter(torch.from_numpy(array))
        x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)
        losses, kept = [], []
        for _ in range(4):
            y = (x @ weight).tanh()
            loss = (y @ weight).square().mean()
            weight.grad = None
            loss.backward()
            if keep:
                kept.append(y.detach().sin())
                y = y.detach()
            losses.append(loss.item())
            array -= 0.1 * weight.grad.numpy()
        return losses, weight, kept

    return program


def test_a_program_writes_to_the_array_of_a_parameter():
    check_stress(descent(keep=False))
    program = descent(keep=True)
    expected = plain(program)
    peak = run_inside(program, None)[1]["peak_bytes"]
    assert run_inside(program, peak)[0] == expected


def changed_there_and_back(array, weight, x):
    before = x @ weight
    kept = array.copy()
    array += 1
    between = x @ weight
    array[:] = kept
    return before, between, x @ weight


def test_an_array_is_changed_and_changed_back():
    """Finite differences: results made in between must not be recomputed from the array's later content."""

    def program():
        array = np.linspace(-1, 1, WIDTH * WIDTH, dtype=np.float32).reshape(WIDTH, WIDTH)
        return changed_there_and_back(array, nn.Parameter(torch.from_numpy(array)), torch.ones(ROWS, WIDTH))

    expected = plain(program)
    assert run_inside(program, "40MB")[0] == expected
    with dtrrun.budget("40MB") as session:
        found = program()
        session.dtr.eviction.warn_only = True
        session.set_budget(1)
        assert bits(list(found)) == expected[: len(bits(list(found)))]


def test_what_is_lost_is_never_wrong():
    """If the array changes after an eviction, the operator that needs what is lost raises a clear error."""
    array = np.ones((WIDTH, WIDTH), dtype=np.float32)
    weight = nn.Parameter(torch.from_numpy(array))
    for order in ("needed first", "used first"):
        with dtrrun.budget("40MB", over_budget="evict") as session:
            y = torch.ones(ROWS, WIDTH) @ weight
            deeper = y.sin()
            session.set_budget(1)
            assert session.report()["evictions"] > 0
            session.set_budget(40_000_000)
            array += 1
            if order == "used first":
                x = torch.ones(ROWS, WIDTH) @ weight
                assert x[0, 0] == WIDTH * array[0, 0]
            for lost in (y, deeper):
                with pytest.raises(LostError, match="has overwritten what it was computed from"):
                    lost + 1
            del y, deeper, lost
            again = torch.ones(ROWS, WIDTH) @ weight  # the program can go on
            assert again[0, 0] == WIDTH * array[0, 0]


def test_a_pin_keeps_what_the_program_will_need():
    array = np.ones((WIDTH, WIDTH), dtype=np.float32)
    weight = nn.Parameter(torch.from_numpy(array))
    with dtrrun.budget("40MB", over_budget="evict") as session:
        y = torch.ones(ROWS, WIDTH) @ weight
        session.pin(y)
        session.pin(weight)
        session.set_budget(1)
        array += 1
        assert (y == WIDTH).all()
        assert (torch.ones(ROWS, WIDTH) @ weight == 2 * WIDTH).all()


def by_torch(weight):
    return weight.share_memory_()


def by_multiprocessing(weight):
    raw = multiprocessing.sharedctypes.RawArray("f", weight.numel())
    shared = torch.frombuffer(raw, dtype=torch.float32).view(weight.shape)
    return shared.copy_(weight)


@pytest.mark.parametrize("share", [by_torch, by_multiprocessing])
def test_memory_that_other_processes_have(share):
    """As in Hogwild: what another process has changed is never mistaken for what it was."""
    check_stress(fine_tuning(share))
    weight = nn.Parameter(share(torch.ones(WIDTH, WIDTH)))
    theirs = weight.detach().numpy()  # as another process has it
    with dtrrun.budget("40MB", over_budget="evict") as session:
        y, kept = torch.ones(ROWS, WIDTH) @ weight, torch.ones(ROWS, WIDTH) @ weight * 2
        session.set_budget(1)
        assert not in_memory(y)
        session.set_budget(40_000_000)
        assert (y == WIDTH).all()
        theirs *= 2
        z = torch.ones(ROWS, WIDTH) @ weight
        assert (z == 2 * WIDTH).all()
        assert (y == WIDTH).all()
        with pytest.raises(LostError):
            kept.sum()
        session.set_budget(1)
        assert in_memory(z)  # from now on, what is computed from it stays


class Batches(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, place):
        return torch.sin(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) + place), torch.full((ROWS,), place)


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
def test_what_workers_of_a_loader_have_made_is_recomputed_from(strategy, monkeypatch):
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", strategy)

    def program():
        model = mlp(6, WIDTH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for x, y in DataLoader(Batches(), batch_size=None, num_workers=1):
            assert x.is_shared()
            loss = nn.functional.cross_entropy(model(x * 2), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, model

    check_stress(program)
    check_budget(program)
    with dtrrun.budget("40MB") as session:
        for x, y in DataLoader(Batches(), batch_size=None, num_workers=1):
            for one in (x, y):
                assert session.callbacks.version_of(one * 2).operation is not None


class Refilled(Dataset):
    """Returns the same memory each time."""

    def __init__(self):
        self.made, self.is_read = torch.empty(ROWS, WIDTH), multiprocessing.Event()

    def __len__(self):
        return 2

    def __getitem__(self, place):
        if place == 1:
            self.is_read.wait()
        return self.made.fill_(place + 1)


def test_a_worker_that_writes_again_to_what_it_has_made():
    refilled = Refilled()
    with dtrrun.budget("40MB", over_budget="evict") as session:
        batches = iter(DataLoader(refilled, batch_size=None, num_workers=1))
        first = next(batches)
        evicted = first * 3
        session.set_budget(1)
        assert not in_memory(evicted)
        session.set_budget(40_000_000)
        kept = first * 2
        refilled.is_read.set()
        assert next(batches)[0, 0] == 2
        assert first[0, 0] == 2  # without dtrrun, too
        assert torch.equal(kept, torch.full_like(kept, 2))
        with pytest.raises(LostError):
            evicted.sum()


def test_memory_that_a_program_shares_with_the_workers_of_a_loader():
    """Workers may write to it: nothing is recomputed from it."""
    refilled = Refilled()
    refilled.made.share_memory_()
    refilled.is_read.set()
    with dtrrun.budget("40MB") as session:
        for batch in DataLoader(refilled, batch_size=None, num_workers=1):
            assert session.callbacks.version_of(batch * 2).operation is None


def test_a_mapped_model_is_shared_later():
    model = loaded(from_file)
    with dtrrun.budget("40MB", over_budget="evict") as session:
        x = torch.ones(ROWS, WIDTH)
        y = model(x).detach()
        expected = bits([y])
        session.set_budget(1)
        session.set_budget(40_000_000)
        model.share_memory()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.numpy()[:] = 0
        assert bits([y]) == expected
        model(x)
        session.set_budget(1)
        assert bits([y]) == expected


def test_two_storages_over_the_same_memory():
    """An operator that writes through one changes the other, whose version does not show it."""

    def program(load_twice):
        def run():
            x = torch.ones(ROWS, WIDTH)
            first, second = (nn.Parameter(one) for one in load_twice(torch.ones(WIDTH, WIDTH)))
            kept = [x @ first]
            kept += [x @ second, x @ first]
            with torch.no_grad():
                first.mul_(2)
            return [*kept, x @ second]

        return run

    def arrays(weight):
        array = weight.numpy()
        return torch.from_numpy(array), torch.from_numpy(array)

    def slices(weight):
        path = from_file.folder / "twice"
        path.write_bytes(weight.numpy().tobytes())
        storage = torch.UntypedStorage.from_file(str(path), False, weight.nbytes)
        whole = (torch.asarray(storage[:], dtype=torch.uint8) for _ in range(2))
        return (one.view(torch.float32).view(weight.shape) for one in whole)

    for twice in (arrays, slices):
        expected = plain(program(twice))
        for careful in (False, True):
            found, _ = run_inside(program(twice), 1, over_budget="evict", careful=careful)
            assert found == expected


def test_the_program_has_the_storage_itself():
    """It can write through it to a file's private mapping: nothing is recomputed from that meanwhile."""
    path = from_file.folder / "held"
    path.write_bytes(torch.ones(WIDTH, WIDTH).numpy().tobytes())
    x = torch.ones(ROWS, WIDTH)
    with dtrrun.budget(40_000_000, over_budget="evict") as session:
        storage = torch.UntypedStorage.from_file(str(path), False, 4 * WIDTH * WIDTH)
        weight = nn.Parameter(
            torch.asarray(storage, dtype=torch.uint8).view(torch.float32).view(WIDTH, WIDTH)
        )
        y = x @ weight
        session.set_budget(1)
        storage.fill_(0)
        assert (y == WIDTH).all()
        assert session.callbacks.version_of(x @ weight).operation is None
        del storage
        assert session.callbacks.version_of(x @ weight).operation is not None


def test_checksums_are_for_evictions():
    weight = nn.Parameter(from_array(torch.ones(WIDTH, WIDTH)))
    with dtrrun.budget(None) as session:
        y = torch.ones(ROWS, WIDTH) @ weight
        assert session.callbacks.version_of(y).operation is None
        session.set_budget(40_000_000)
        y = torch.ones(ROWS, WIDTH) @ weight
        assert session.callbacks.version_of(y).operation is not None
