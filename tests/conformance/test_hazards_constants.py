"""Constants that change (buffers, running statistics) after something was computed from them."""

import weakref

import pytest
import torch
from programs import assert_same, batch, bits, chain, check, check_stress, mlp, plain, run_inside
from torch import nn

import dtrrun
from dtrrun import runtime
from dtrrun.core.ledger import COPIED
from dtrrun.runtime.execute import Executor


def test_mutation_of_a_buffer_on_the_short_cut():
    """A known signature changes a constant on which two results depend, one evicted and one in memory."""

    def program():
        buffer = torch.linspace(0, 1, 64 * 32).reshape(64, 32).clone()
        kept = []
        for step in range(8):
            kept += [buffer * 2, torch.sin(buffer)]
            kept += chain(kept[-1], 2)[1:]
            buffer.mul_(0.9)  # the evicted tensors were computed from the old values
            kept.append(buffer + 1)
            buffer.add_(0.1)
            if step % 2:
                kept.append(buffer.exp())
        return kept, buffer

    values = torch.randn(64, 32).tolist()

    def changing():
        """The same with a constant, which has no recipe."""
        own = torch.tensor(values)
        kept = []
        for _ in range(6):
            kept.append(own * 2)
            own.mul_(0.5)
            kept.append(torch.cos(own))
        return kept, own

    check_stress(program)
    check_stress(changing)
    with dtrrun.budget(None) as session:
        before = torch.zeros(64, 32)
        session.pin(before)
        for _ in range(4):
            old = before.exp()
            before.add_(1.0)
            record = session.callbacks.version_of(old)
            assert record.operation.inputs[0] is not session.callbacks.version_of(before), (
                "an old version was read"
            )


def test_statistics_are_read_before_they_are_updated():
    def program():
        norm = nn.BatchNorm1d(32)
        kept = []
        for step in range(5):
            x = torch.sin(torch.randn(64, 32) + step)
            kept += [norm.running_mean * 2, norm.running_var.sqrt()]
            norm.eval()
            kept.append(norm(x))  # computed from the statistics that the next line updates
            norm.train()
            kept.append(norm(x))
        return kept, list(norm.buffers())

    check_stress(program)


def evicted_at_the_end(session):
    session.dtr.eviction.warn_only = True
    session.set_budget(1)
    assert session.report()["evictions"] > 0


def test_what_statistics_made_is_evicted_after_their_update():
    """It was in memory at the update, so nothing was rescued: from then on it has no recipe."""
    norm = nn.BatchNorm1d(32)
    x = torch.randn(64, 32)
    expected = norm.running_mean * 2
    with dtrrun.budget("1GB") as session:
        made = norm.running_mean * 2
        norm(x)
        other = x * 2
        evicted_at_the_end(session)
        assert torch.equal(made, expected)
        assert torch.equal(other, x * 2)


@pytest.mark.parametrize("made_is", ["in memory", "evicted", "back"])
def test_what_statistics_made_outlives_an_update(made_is):
    norm, x = nn.BatchNorm1d(32), torch.randn(64, 32)
    with dtrrun.budget("1GB") as session:
        for _ in range(3):
            norm(x)
        expected = (norm.running_mean * 2).tolist()
        made = norm.running_mean * 2
        if made_is != "in memory":
            assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(made))
        if made_is == "back":
            made + 1
        norm(x)
        other = x * 2
        evicted_at_the_end(session)
        assert made.tolist() == expected
        assert torch.equal(other, x * 2)
        assert not session.interposer.python_calls


def test_what_is_evicted_outlives_what_it_was_made_from_and_the_constant_below():
    """The mutation makes a constant of the resident tensor, on which the evicted one then depends."""
    constant = torch.tensor(torch.linspace(0, 1, 64).tolist())
    with dtrrun.budget("1GB", cost="model") as session:
        for _ in range(3):
            constant.add_(0.5)
        expected = (constant * 2).exp().tolist()
        between = constant * 2
        made = between.exp()
        assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(made))
        before = sum(session.interposer.python_calls.values())
        constant.add_(0.5)
        assert sum(session.interposer.python_calls.values()) == before
        del between
        assert made.tolist() == expected


def test_a_replay_updates_no_statistics():
    norm, x = nn.BatchNorm1d(32), torch.randn(64, 32)
    with dtrrun.budget("1GB") as session:
        made = [norm(x) for _ in range(3)]
        statistics = [buffer.clone() for buffer in norm.buffers()]
        assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(made[-1]))
        assert torch.equal(made[-1], made[0])
        assert session.report()["rematerializations"] >= 1
        assert all(map(torch.equal, norm.buffers(), statistics))


def test_constants_that_the_program_releases():
    """A recipe keeps constants alive as long as its outputs are evicted."""
    values = torch.randn(64, 32).tolist()

    def program():
        kept = []
        for step in range(6):
            constant = torch.tensor(values)
            kept.append(torch.sin(constant * step))
            kept.append(constant + 1)
            del constant
            kept.append(torch.rand(64, 32))
        return kept

    check_stress(program)


def test_storages_that_grow_and_shrink_are_counted():
    with dtrrun.budget(None) as session:
        session.report()
        before = session.report()["resident_bytes"]
        x = torch.zeros(64)
        x.resize_(64, 64)
        assert session.report()["resident_bytes"] == before + 64 * 64 * 4
        out = torch.empty(0)
        torch.cat([x, x], out=out)
        assert session.report()["resident_bytes"] == before + 3 * 64 * 64 * 4
        del x, out
        assert session.report()["resident_bytes"] == before


WEIGHTS_BYTES = 5 * 16 * 16 * 4
ACTIVATIONS_BYTES = 8 * 16 * 512 * 4


def held_over_steps(then=lambda session, held: None, session=None):
    """Train while holding the graph of an evaluation, which takes much more memory than the weights."""
    layers = [layer for _ in range(5) for layer in (nn.Conv1d(16, 16, 1, bias=False), nn.Tanh())]
    net = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.randn(8, 16, 512)
    held = net(x)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (net(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    then(session, held)
    return losses, held, net


def test_a_graph_that_is_held_while_its_weights_change_stays_recomputable():
    """The old weights are copied, and freed with the last recipe that reads them."""

    def then(session, held):
        pinned = session.dtr.eviction.pinned_by_reason()
        assert pinned[COPIED] == WEIGHTS_BYTES
        assert pinned.get("input mutated", 0) < ACTIVATIONS_BYTES
        evicted_at_the_end(session)

    torch.manual_seed(7)
    expected = bits(held_over_steps())
    budget_bytes = 12 * ACTIVATIONS_BYTES
    with dtrrun.budget(budget_bytes, cost="model") as session:
        torch.manual_seed(7)
        losses, held, net = held_over_steps(then, session)
        evicted_at_the_end(session)
        assert session.report()["peak_bytes"] <= budget_bytes
        assert_same(expected, bits([losses, held, net]), "recomputed from the old weights")
        del held
        session.ledger.collect_dead()
        session.dtr.deallocation.free_all_unread_scratch()
        session.ledger.collect_dead()
        assert COPIED not in session.dtr.eviction.pinned_by_reason()


def test_gradients_through_a_graph_that_was_held_while_its_weights_changed():
    """Autograd refuses if it has saved the weight itself, and otherwise uses the old activations."""

    def program():
        first, second = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        seen = []
        for step in range(4):
            x = torch.randn(512, 8)
            inner = torch.tanh(x @ first)
            held = torch.tanh(inner @ second)
            (held * 2).sum().backward(retain_graph=True)
            with torch.no_grad():
                for one in (first, second):
                    one -= 0.01 * one.grad
                    one.grad = None
            inner.square().sum().backward()
            seen += [first.grad.clone(), inner.detach(), held.detach() * step]
            try:
                held.sum().backward()
            except RuntimeError as error:
                seen.append("modified by an inplace operation" in str(error))
        return seen, first, second

    check(program)


def test_nothing_is_copied_in_an_ordinary_step():
    """The loss and outputs are still referenced when the weights change; copies would cost more than they."""
    copied = []

    def program():
        net = mlp(4, 64, lambda: nn.BatchNorm1d(64))
        optimizer = torch.optim.AdamW(net.parameters())
        losses = []
        for _ in range(4):
            net.train()
            x, y = batch(64, 64)
            outputs = net(x)
            loss = nn.functional.mse_loss(outputs, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if session := runtime._active:
                copied.append(session.ledger.copied_bytes)
            losses.append(loss)
            net.eval()
            with torch.no_grad():
                losses.append(nn.functional.mse_loss(net(x), y))
        return losses, outputs, net

    check_stress(program)
    assert set(copied) == {0}


def test_nothing_is_copied_after_a_backward_pass_for_what_it_has_let_go_of(monkeypatch):
    """When a hook changes a constant, copies of the weights would be worth it; not when they change."""
    copied = []
    scale, weights = torch.ones(64), [torch.randn(64, 64).div_(8).requires_grad_() for _ in range(6)]

    def count(self, storage, copy=Executor.copy):
        copied.append(storage.nbytes())
        return copy(self, storage)

    def program():
        optimizer = torch.optim.SGD(weights, lr=0.01)
        x, others = torch.randn(2048, 64), [torch.ones(1) for _ in range(500)]
        for _ in range(4):
            inner = x
            for weight in weights:
                inner = torch.tanh(inner @ weight)
            inner.register_hook(lambda gradient: scale.mul_(1.5) * 0 + gradient)
            loss = (inner * scale).square().sum()
            optimizer.zero_grad()
            loss.backward()
            del inner, loss
            optimizer.step()
        return others

    monkeypatch.setattr(Executor, "copy", count)
    with dtrrun.budget(3_000_000, cost="model") as session:
        program()
    assert session.report()["evictions"] > 0
    assert weights[0].nbytes not in copied
    assert scale.nbytes in copied


def test_what_was_made_from_a_small_constant_can_be_evicted():
    def program():
        rows = [torch.zeros(1000) + torch.tensor([step], dtype=torch.float32) for step in range(8)]
        return [torch.sin(row) for row in rows], rows

    expected = plain(program)
    found, report = run_inside(program, 1, over_budget="evict")
    assert found == expected
    assert "input lost" not in [entry["reason"] for entry in report["pinned"]]


def test_small_constants_are_let_go_of_at_the_end():
    with dtrrun.budget(1 << 20) as session:
        constant = torch.tensor([1.0])
        torch.sin(constant)
        storage = weakref.ref(torch._C.TensorBase.untyped_storage(constant))
        del constant
        assert storage() is not None
        assert session.ledger.small_constants
    assert storage() is None
