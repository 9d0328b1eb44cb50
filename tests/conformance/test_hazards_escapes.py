"""Memory that is read or handed out without an operator, and changes made through it."""

import copy
import ctypes
import io
import pickle

import numpy as np
import pytest
import torch
from programs import assert_same, bits, chain, check, check_stress, in_memory, mlp
from torch import nn

import dtrrun


def evicted(step: int = 0) -> torch.Tensor:
    """Return a tensor that under stress is already evicted."""
    x = torch.sin(torch.randn(16, 32) + step)
    torch.cos(torch.randn(16, 32))
    return x


def pickled(x):
    return pickle.loads(pickle.dumps(x))


def saved(x):
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    return torch.load(file)["x"]


def by_address(x):
    return bytes((ctypes.c_char * x.numel() * 4).from_address(x.data_ptr())).hex()


# DLPack's C exchange: which entries of the table export a tensor, and what they write.
EXPORTS = {"with its memory": 3, "for a call": 5}
_export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)


def exchange() -> list[int]:
    """Return the table as seen by a consumer that keeps the functions."""
    find = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    address = find(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")
    return [word or 0 for word in (ctypes.c_void_p * 7).from_address(address)]


def exported(x, kind, table=None):
    """Return what a consumer without Python reads."""
    made = (ctypes.c_void_p * 8)()
    assert _export((table or exchange())[EXPORTS[kind]])(x, ctypes.addressof(made)) == 0
    address = made[0] if kind == "for a call" else ctypes.c_void_p.from_address(made[0] + 32).value
    return bytes((ctypes.c_char * (x.numel() * x.element_size())).from_address(address)).hex()


EXCHANGE = "__dlpack_c_exchange_api__"
needs_exchange = pytest.mark.skipif(not hasattr(torch.Tensor, EXCHANGE), reason="new in PyTorch 2.10")

READS = {
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().tolist(),
    "numpy of a part": lambda x: x[3, ::2].numpy().tolist(),
    "asarray": lambda x: np.asarray(x).tolist(),
    "array": lambda x: np.array(x).tolist(),
    "ufunc": lambda x: np.exp(x).tolist(),
    "dlpack to numpy": lambda x: np.from_dlpack(x).tolist(),
    "dlpack": lambda x: torch.from_dlpack(x).clone(),
    "to_dlpack": lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)).clone(),
    "data_ptr": by_address,
    "untyped_storage": lambda x: x.untyped_storage()[64:96].tolist(),
    "storage": lambda x: x.storage()[5],
    "pickle": pickled,
    "save and load": saved,
    "save of a view": lambda x: saved(x[2:4]),
    "deepcopy": copy.deepcopy,
    "copy": lambda x: copy.copy(x).clone(),
    "item": lambda x: x[3, 4].item(),
    "float, bool, int": lambda x: (float(x[0, 0]), bool(x[0, 1] > 0), int(x[0, 2] * 9), complex(x[0, 3])),
    "index": lambda x: [10, 20, 30][(x[0, 0] > 0).long()],
    "repr": lambda x: repr(x[:2]),  # reads one element after another
    "print": lambda x: print(x[:2], file=io.StringIO()),
    "format": lambda x: f"{x[0, 0]:.4f} {x[0, 1]}",
    "iteration": lambda x: [float(row.sum()) for row in x],
    "contains": lambda x: 2.0 in x,
    "equal and allclose": lambda x: (
        torch.equal(x, x * 1),
        torch.allclose(x, x + 1e-9),
        bool((x == x).all()),
    ),
    "tensor of scalars": lambda x: torch.tensor([x[0, 0], x[0, 1], x.sum()]),
    "tensor of rows of scalars": lambda x: torch.tensor([[x[0, 0], x[0, 1]], [x[1, 0], 2.0]]),
    "as_tensor of scalars": lambda x: torch.as_tensor([x.sum(), x.mean()]),
    "stack of tensor()": lambda x: torch.stack([x.sum().detach(), x.mean()]),
    "new_tensor": lambda x: x.new_tensor([x[0, 0], 3.0]),
    "legacy constructor": lambda x: torch.FloatTensor([x[0, 0], x[0, 1]]),
    "numpy of scalars": lambda x: np.array([x[0, 0], x[0, 1]]).tolist(),
    "python range": lambda x: list(range((x > 0).sum())),
    "size from a tensor": lambda x: torch.zeros((x > 0).sum(), 2).shape,
    "slice by tensors": lambda x: x[(x[0] > 0).sum() // 4 :],
    "tensor_split by a tensor": lambda x: torch.tensor_split(x, torch.tensor([2, 5]) * 2 // 1),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long() + 1, dim=0),
    "bincount": lambda x: torch.bincount((x.flatten() * 5).long().clamp(min=0)),
    "unique": lambda x: torch.unique((x * 3).round(), return_counts=True),
    "masked_select": lambda x: (x[x > 0], x.nonzero(), torch.where(x > 0)),
}


@pytest.mark.parametrize("read", READS)
def test_reads(read):
    def program():
        kept = []
        for step in range(3):
            x = evicted(step)
            y = x * 2
            kept += [READS[read](x), x, y, READS[read](evicted(step)), READS[read](y)]
        return kept

    check_stress(program)


@needs_exchange
@pytest.mark.parametrize("kind", EXPORTS)
def test_exports_by_functions_in_c(kind):
    """They work for consumers that keep them, during the session and after it."""
    before = exchange()
    with dtrrun.budget(None):
        during = exchange()
    assert during != before
    assert exchange() == before
    x = torch.arange(512.0)

    def program():
        kept = []
        for step in range(3):
            for table in (during, None):
                y = evicted(step)
                kept += [exported(y, kind, table), y, y * 2, exported(evicted(step), kind, table)]
        return kept

    check_stress(program)
    assert exported(x, kind, during) == exported(x, kind, before) == x.numpy().tobytes().hex()


def test_reading_a_scalar_for_the_generator():
    def program():
        generator = torch.Generator().manual_seed(3)
        kept = []
        for step in range(3):
            states = [generator.get_state().clone(), torch.get_rng_state().clone() + 0]
            evicted(step)
            kept += [torch.rand(8, 32, generator=generator), torch.rand(8, 32), *states]
            evicted(step)
            generator.set_state(states[0])
            torch.set_rng_state(states[1])
            kept += [torch.rand(8, 32, generator=generator), torch.rand(8, 32)]
        return kept

    check_stress(program, host=False)  # a generator that is set reads its state by address


def test_composite_operators_that_read_lengths():
    def program():
        kept = []
        for step in range(2):
            logits = torch.log_softmax(torch.randn(12, 4, 8, requires_grad=True), 2)
            targets = torch.randint(1, 8, (4, 5)) + 0
            lengths, others = torch.full((4,), 12) - 1, torch.full((4,), 5) - torch.arange(4)
            evicted(step)
            loss = nn.functional.ctc_loss(logits, targets, lengths, others)
            bag = nn.functional.embedding_bag(torch.arange(6) % 4, evicted(step), torch.tensor([0, 4]) + 0)
            kept += [loss, bag, torch.quasirandom.SobolEngine(3, scramble=True, seed=step).draw(8)]
        return kept

    check_stress(program, by_address=True)


WRITES = {
    "numpy": lambda x: x.numpy().__setitem__((2, 3), 9.0),
    "numpy of an alias": lambda x: x.view(-1)[5:].numpy().fill(4.0),
    "dlpack": lambda x: torch.from_dlpack(x).mul_(3),
    "address": lambda x: ctypes.memset(x.data_ptr(), 0, 64),
    "apply_": lambda x: x.apply_(lambda value: value + 1),
    "map_": lambda x: x.map_(x + 1, lambda one, other: one * other),
    "storage": lambda x: x.untyped_storage().fill_(1),
    "typed storage": lambda x: x.storage().__setitem__(7, 2.0),
    "data": lambda x: x.data.mul_(2),
    "detach": lambda x: x.detach().zero_(),
    "shared memory": lambda x: x.share_memory_().add_(1),
    "setitem": lambda x: x.__setitem__((slice(None), 0), 5.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes(write):
    def program():
        kept = []
        for step in range(3):
            x = evicted(step)
            y, z = x.exp(), x[1] * 2  # computed from the earlier content
            evicted()
            WRITES[write](x)
            after = x * 3
            evicted()
            WRITES[write](x)
            kept += [x, y, z, after, x + 1]
        return kept

    check_stress(program)


def test_arrays_stay_valid_and_are_written_to_later():
    def program():
        kept = []
        for step in range(4):
            x = evicted(step)
            array = x.numpy()
            y = x * 2
            evicted(step)
            array += 1  # long after it was handed out; the program sees the change through x
            z = x * 2
            array[:] = 0.5
            kept += [x, y, z, array.sum()]
        return kept

    check_stress(program)


def test_arrays_of_tensors_that_were_used_before():
    def program():
        kept = []
        for step in range(4):
            x = evicted(step)
            before = x.exp()
            array, storage = x.numpy(), before.untyped_storage()
            y = x * 2  # computed from memory that is already handed out
            z = y.cos()
            w = before + 1
            evicted(step)
            array += 1
            storage[0] = 7
            kept += [x, before, y, z, w, x * 3]
        return kept

    check_stress(program)


TOUCHES = {
    "numpy": lambda x: x.numpy(),
    "copy": lambda x: copy.copy(x),
    "apply_": lambda x: x.apply_(abs),
    "tolist": lambda x: x.tolist(),
    "data_ptr": lambda x: x.data_ptr(),
    "C exchange": lambda x: exported(x, "for a call"),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_budget_error_in_an_escape_leaves_no_trace(touch):
    if touch == "C exchange" and not hasattr(torch.Tensor, EXCHANGE):
        pytest.skip("this PyTorch has no such table")
    x = torch.randn(64, 64)
    expected = bits([x, x * 2, x * 3])
    with dtrrun.budget(1 << 20) as session:
        tensors = [x, x * 2, x * 3]
        session.set_budget(x.nbytes + 100)
        # Evicted tensors do not fit; before a write to x, what was computed from it would have to come back.
        for one in tensors[touch == "tolist" :]:
            with pytest.raises(dtrrun.BudgetError):
                TOUCHES[touch](one)
            records = session.ledger.versions.values()
            assert not any(record.locks or record.escaped for record in records)
        session.set_budget(1 << 20)
        assert_same(expected, bits(tensors), "after the errors")


def test_budget_error_in_a_function_with_out_leaves_no_locks():
    x, out = torch.randn(64, 64), torch.zeros(())
    with dtrrun.budget(1 << 20) as session:
        y = torch.sin(x)
        session.set_budget(x.nbytes + 500)  # y is evicted, and does not fit beside x
        with pytest.raises(dtrrun.BudgetError):
            torch.linalg.matrix_norm(y, "nuc", out=torch.zeros(()))
        with pytest.raises(dtrrun.BudgetError):
            torch.linalg.cond(y, out=out)
        assert not any(record.locks for record in session.ledger.versions.values())
        session.set_budget(None)


def test_what_an_operator_has_read_before_it_is_handed_out():
    """Its storage has a later version by then, which may be written to as well."""

    def program():
        kept = []
        for step in range(4):
            x = torch.sin(torch.randn(64, 32))
            kept.append(x * 2)
            array = x.numpy()
            kept += chain(x, 3)[1:]
            array[5] = step
            kept.append(x + 1)
        return kept

    check_stress(program)


def test_memory_that_is_not_ours():
    def program():
        kept = []
        for step in range(4):
            source = np.full((16, 32), step + 0.5, dtype=np.float32)
            x = torch.from_numpy(source)
            buffer = torch.frombuffer(bytearray(source.tobytes()), dtype=torch.float32)
            as_tensor = torch.as_tensor(source)
            y, z, w = x.sin(), buffer.exp(), as_tensor.cos() + torch.tensor(source)
            deeper = y.tanh()
            evicted()
            source[:] = 100 + step  # the array is the loader's page for the next batch
            x.mul_(2)
            kept += [x, y, z, w, deeper, torch.from_numpy(source) * 1]
        return kept

    check_stress(program)


def test_storages_that_the_program_made():
    def program():
        kept = []
        for step in range(3):
            storage = torch.UntypedStorage(4096).fill_(step)
            x = torch.tensor([]).set_(storage, 0, (32, 32), (32, 1))
            y = (x + 1).sin()
            deeper = y.exp()
            evicted()
            storage.fill_(64)
            kept += [x, y, deeper, x * 2]
        return kept

    check_stress(program)


def test_sharing_a_model_and_saving_it():
    def program():
        model, target = mlp(2), mlp(2)
        model.share_memory()
        y = model(evicted())
        y.sum().backward()
        file = io.BytesIO()
        torch.save([model.state_dict(), y.detach()], file)
        file.seek(0)
        state, output = torch.load(file)
        target.load_state_dict(state)
        return model, target, output, copy.deepcopy(model), pickled(model), target(evicted())

    check_stress(program)


def test_a_budget_with_escapes_in_it():
    def program():
        kept = []
        for step in range(10):
            x = evicted(step) if step % 3 else torch.from_numpy(evicted(step).numpy() * 2)
            kept += [x, (x * 2).exp()]
        return kept, [x.sum().item() for x in kept]

    check(program)


PATCHED = [(torch.Tensor, name) for name in dir(torch.Tensor) if name not in ("__weakref__", "__dict__")] + [
    (torch, "compile"),
    (torch.autograd.Function, "apply"),
    (torch.optim.Optimizer, "add_param_group"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch.autograd.function.BackwardCFunction, "apply"),
    (torch.autograd.function.BackwardCFunction, "saved_tensors"),
]


def test_everything_is_as_before_after_the_session():
    import _thread
    import inspect

    places = [*PATCHED, (_thread, "start_new_thread")]
    before = [inspect.getattr_static(owner, name, None) for owner, name in places]
    own = set(vars(torch.Tensor))
    model = mlp(2)
    with dtrrun.budget(1, over_budget="evict") as session:
        y = model(torch.randn(64, 32))
        y.sum().backward()
        mlp(2)
        assert torch.Tensor.numpy is not before[[name for _, name in places].index("numpy")]
    assert session.report()["evictions"] > 0
    assert session.report()["evicted_bytes"] == 0
    for (owner, name), original in zip(places, before, strict=True):
        assert inspect.getattr_static(owner, name, None) is original, name
    assert set(vars(torch.Tensor)) == own
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert not nn.modules.module._global_parameter_registration_hooks
    assert in_memory(y)


def test_the_session_ends_cleanly_when_the_program_raises():
    kept = []

    def program():
        kept.extend(evicted(step) for step in range(4))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), dtrrun.budget(1, over_budget="evict"):
        program()
    assert all(x.isfinite().all() and in_memory(x) for x in kept)  # each comes back as it is read
    with dtrrun.budget(1, over_budget="evict"):
        with pytest.raises(RuntimeError, match="already running"), dtrrun.budget(1):
            pass
        kept.append(evicted())
    assert in_memory(kept[-1])


def test_storages_that_the_program_resizes():
    """FSDP does this: empty a storage while it is not needed, then refill it by an operator."""

    def program():
        kept = []
        gathered = torch.sin(torch.randn(64, 64))
        early = gathered * 3
        storage = gathered.untyped_storage()
        for step in range(4):
            kept += chain(gathered, 3) if step else [early]
            storage.resize_(0)
            kept += chain(torch.cos(torch.randn(64, 64)), 3)
            storage.resize_(64 * 64 * 4)
            gathered.copy_(torch.randn(64, 64) + step)
        return [*kept[::2], gathered, gathered * 2]

    check(program)


def test_a_storage_is_handed_out_only_where_it_can_be_kept():
    asked = {
        "its size": (lambda x: x.untyped_storage().nbytes() + x._typed_storage()._size(), False),
        "its identity": (lambda x: {x.untyped_storage()._cdata}, False),
        "its address": (lambda x: x.untyped_storage().data_ptr(), True),
        "a change": (lambda x: x.untyped_storage().fill_(0), True),
        "itself, in a list": (lambda x: [x.untyped_storage()], True),
        "itself, from a helper": (lambda x: next(map(torch.Tensor.untyped_storage, (x,))), True),
    }
    with dtrrun.budget(None) as session:
        for what, (ask, is_kept) in asked.items():
            x = torch.randn(64).sin()
            made = ask(x)
            assert bool(session.report()["pinned"]) is is_kept, (what, made)
            del x, made


def test_the_account_follows_a_storage_that_the_program_resizes():
    size = 1 << 20
    with dtrrun.budget(4 * size) as session:
        x = torch.zeros(size // 4)
        storage = x.untyped_storage()
        storage.resize_(0)
        assert session.report()["resident_bytes"] == 0
        kept = chain(torch.ones(size // 4), 2)
        storage.resize_(2 * size)  # one of the chain has to be evicted
        assert session.report()["resident_bytes"] <= 4 * size
        assert session.report()["evictions"] == 1
        with pytest.raises(dtrrun.BudgetError):
            storage.resize_(5 * size)
        assert storage.nbytes() == 2 * size
        del x, storage
        assert session.report()["resident_bytes"] <= 3 * size
    assert torch.equal(kept[2], torch.sin(kept[1] * 1.1 + 1))
    assert "resize_" not in torch.UntypedStorage.__dict__


def test_the_state_of_the_random_generator():
    """It is restored from a tensor that an operator made and that is evicted by then."""

    def program():
        before = torch.get_rng_state()
        state = before.flip(0).flip(0)
        torch.cos(torch.randn(16, 32))
        torch.set_rng_state(state)
        first = torch.randn(4)
        torch.cos(torch.randn(16, 32))
        torch.random.set_rng_state(new_state=state)
        return first, torch.randn(4), before, state

    check_stress(program)
