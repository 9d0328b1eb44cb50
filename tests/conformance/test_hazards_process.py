"""Long chains, failures, budgets that are too small, thrashing, and what a session leaves behind."""

import gc
import sys
import weakref

import pytest
import torch
import torch._dynamo.utils
from programs import assert_same, batch, bits, chain, check_stress, in_memory, mlp, plain, run_inside, train
from torch import nn

import dtrrun
from dtrrun.runtime import storage as memory


def locks(session) -> int:
    return sum(record.locks for record in session.ledger.versions.values())


def test_long_chain_is_recomputed_in_bounded_memory():
    def program():
        x = torch.ones(16, 16)
        for step in range(10_000):
            x = x * 1.0001 if step % 2 else x + 0.001
        return x

    expected = plain(program)
    with dtrrun.budget(40_000, over_budget="evict") as session:
        x = program()
        session.set_budget(1)  # evicts even what costs 10,000 operators
        assert not in_memory(x)
        session.set_budget(40_000)
        read = bits([x])
        assert session.report()["rematerializations"] > 9_000
        assert session.report()["peak_bytes"] <= 40_000
    assert bits([x]) == read == expected[: len(read)]


def test_long_chain_of_dead_records_is_freed_without_recursion():
    with dtrrun.budget(40_000):
        x = torch.ones(16, 16)
        for _ in range(30_000):
            x = x + 1.0
        del x
        gc.collect()


FAILING = (
    lambda x, y: x @ x,
    lambda x, y: torch.cat([x, y[0]]),
    lambda x, y: x.view(7, 7),
    lambda x, y: torch.linalg.cholesky(x[:32]),
    lambda x, y: y[torch.tensor([99])],
    lambda x, y: nn.functional.embedding(torch.tensor([500]), x),
    lambda x, y: x.requires_grad_().mul_(2),
    lambda x, y: torch.empty(1 << 62),
)


def test_failing_operators_leave_no_locks():
    def program():
        kept = []
        for step in range(4):
            x = torch.sin(torch.randn(64, 32) + step)
            y = x.exp()
            for failing in FAILING:
                with pytest.raises((RuntimeError, IndexError)):
                    failing(x, y)
            x.requires_grad_(False)
            kept += [x, y, y * 2]
        return kept

    expected = plain(program)
    check_stress(program, expected)
    with dtrrun.budget(1, over_budget="evict") as session:
        result = program()
        assert locks(session) == 0
    del result


def test_budget_too_small_says_what_and_loses_nothing():
    expected = plain(lambda: [chain(torch.randn(64, 64), 4), torch.randn(64, 64) @ torch.ones(64, 64)])
    torch.manual_seed(7)
    size = 64 * 64 * 4
    pinned = nn.Parameter(torch.zeros(64, 64))
    with dtrrun.budget(5 * size) as session:
        kept = chain(torch.randn(64, 64), 4)
        x = torch.randn(64, 64)
        (pinned * 2).sum().backward()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.cat([x] * 4)
        error = caught.value
        assert isinstance(error, dtrrun.BudgetError)
        assert error.operator == "aten.cat"
        assert error.needed_bytes == 4 * size
        assert error.budget_bytes == 5 * size < error.least_budget_bytes
        assert error.least_budget_bytes == sum(error.pinned.values()) + error.needed_bytes
        assert "parameter" in error.pinned
        assert "gradient" in error.pinned
        assert locks(session) == 0
        assert session.report()["error"]["operator"] == "aten.cat"
        assert session.report()["peak_bytes"] <= 5 * size
        session.set_budget(error.least_budget_bytes)
        assert torch.cat([x] * 4).shape == (256, 64)
        session.set_budget(5 * size)
        result = [kept, x @ torch.ones(64, 64)]
    assert_same(expected[:-1], bits([*result, torch.get_rng_state()]), "after the error")


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_budget_error_anywhere_leaves_a_usable_program(where):
    def program(session=None):
        torch.manual_seed(3)
        model = mlp(4)
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        first = train(model, batch, optimizer, 1)
        x, y = batch()
        for parameter in model.parameters():
            parameter.grad = None

        def squeezed(name, act):
            if session is not None and name == where:
                session.set_budget(session.report()["pinned_bytes"] + 2000)
                with pytest.raises(dtrrun.BudgetError):
                    act()
                session.set_budget(None)
                if where == "backward":
                    for parameter in model.parameters():
                        parameter.grad = None
            return None

        squeezed("forward", lambda: model(x))
        loss = nn.functional.l1_loss(model(x), y)
        squeezed("backward", lambda: loss.backward(retain_graph=True))
        loss.backward()
        if where != "step":
            optimizer.step()
        else:
            squeezed("step", lambda: torch._foreach_add([p * 1.0 for p in model.parameters()], 1.0))
        return [first["losses"], loss, model, optimizer]

    expected = bits(program())
    with dtrrun.budget(None, verify=True) as session:
        result = program(session)
        assert locks(session) == 0
    assert session.report()["mismatches"] == []
    assert_same(expected, bits(result), "after the error")


def test_thrashing_is_said_once_and_can_stop(capsys):
    def program():
        model = mlp(8)
        return train(model, batch, torch.optim.SGD(model.parameters(), 0.01), 4)

    expected = plain(program)
    found, report = run_inside(program, 1, over_budget="evict", max_slowdown=1.01)
    assert_same(expected, found, "while warned")
    assert capsys.readouterr().err.count("larger budget would help") == 1
    assert any("times as long as their own work" in warning["text"] for warning in report["warnings"])

    with (
        pytest.raises(SystemExit) as stopped,
        dtrrun.budget(1, over_budget="evict", max_slowdown=1.01, on_thrash="stop") as session,
    ):
        program()
    assert stopped.value.code
    report = session.report()
    assert report["steps"] == len(report["latest_steps"]) == 1
    assert "larger budget would help" in capsys.readouterr().err


@pytest.mark.parametrize(
    "reach",
    [
        pytest.param(lambda one: one.numpy(), id="handed out"),
        pytest.param(lambda one: torch.empty(0).set_(one.untyped_storage()), id="shared"),
        pytest.param(lambda one: one.untyped_storage().resize_(100_000), id="resized"),
    ],
)
def test_a_budget_too_small_for_what_must_come_back_is_reported(reach):
    """What was computed from memory about to change comes back, in calls that need no memory themselves."""
    size = 64 * 64 * 4
    with dtrrun.budget(6 * size) as session:
        constant = torch.randn(64, 64)
        values = [constant * number for number in range(1, 5)]
        more = [torch.randn(64, 64) for _ in range(4)]
        for tensor in more:
            session.pin(tensor)  # so the values are evicted
        assert session.report()["evictions"] >= 3
        with pytest.raises(dtrrun.BudgetError) as caught:
            reach(constant)
        error = session.report()["error"]
        assert error is not None
        assert error["least_budget_bytes"] == caught.value.least_budget_bytes > 6 * size
        assert "dtrrun.budget(" in str(caught.value)  # the error says what to do
    del values, more


def test_tensors_without_memory_take_none(capsys):
    """A large model made on the meta device, as libraries do, costs nothing and is not reported."""

    def program():
        made = [nn.Linear(1 << 15, 1 << 15, device="meta") for _ in range(3)]
        copies = [torch.ones(1 << 10).to("meta") * 2 for _ in range(3)]
        drawn = [torch.randn(1 << 20, 1 << 10, device="meta") + 1 for _ in range(3)]
        real = made[0].weight[:4, :4].to("meta"), torch.empty_like(copies[0], device="cpu").fill_(2.0)
        return [str(t.device) for t in (*copies, *drawn, *real)], real[1], chain(torch.randn(64, 64))

    expected = plain(program)
    assert_same(expected, run_inside(program, 400_000)[0], "inside")
    check_stress(program, expected)
    assert "outside the budget" not in capsys.readouterr().err


def test_tensors_of_another_device_are_said_to_be_outside(capsys, monkeypatch):
    with dtrrun.budget("1GB") as session:
        monkeypatch.setattr(session.ledger.memory, "device_type_of", lambda _: "xpu")
        assert session.dtr.operators.adopt(torch.UntypedStorage(64)).nbytes == 0
        monkeypatch.undo()
        assert session.report()["peak_bytes"] == 0
    assert capsys.readouterr().err.count("tensors on xpu are outside the budget") == 1


def test_an_import_of_deepspeed_is_noticed_once(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", sys)
    with dtrrun.budget("1GB") as session:
        session._tick()
        session._tick()
    assert capsys.readouterr().err.count("DeepSpeed") == 1


def test_the_garbage_collector_runs_as_often_as_without_a_session():
    before = gc.get_threshold()
    with dtrrun.budget("1GB"):
        assert gc.get_threshold() == before


def test_nothing_of_the_program_is_kept_alive():
    """Storages die when the program drops them, evicted or not, whatever was recorded of them."""
    with dtrrun.budget(1, over_budget="evict") as session:
        session.report()
        before = session.report()["live_storages"]
        x = torch.sin(torch.randn(64, 32))
        y = torch.empty(0).set_(x.exp().untyped_storage(), 0, (64, 32), (32, 1))
        z = y * 2 + x.view(-1)[5]
        watched = [weakref.ref(torch._C.TensorBase.untyped_storage(tensor)) for tensor in (x, y, z)]
        del x, y, z
        gc.collect()
        session.report()
        assert [reference() is None for reference in watched] == [True] * 3
        assert session.report()["live_storages"] <= before + 2
        assert session.report()["resident_bytes"] <= 1000


def test_resident_bytes_are_what_the_process_holds():
    """The ledger's count equals the sum over the existing storages, rounded up as the allocator does."""
    with dtrrun.budget(150_000, over_budget="evict") as session:
        model = mlp(4)
        train(model, batch, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        kept = chain(torch.randn(64, 32), 30)
        report = session.report()
        held = sum(record.nbytes for record in session.ledger.scratch)
        storages = {}
        for record in session.ledger.versions.values():
            storage = record()
            if storage is not None:
                is_resident = not memory.is_empty(storage) or record.nbytes == 0
                assert record.resident == is_resident
                storages[record.key] = (storage.nbytes() + 63) // 64 * 64 if is_resident else 0
        assert report["resident_bytes"] == sum(storages.values()) + held
        assert report["evictions"] > 0
        assert report["evicted_bytes"] > 0
        del kept
