"""Programs without an optimizer that marks their steps: how far their recipes reach back."""

import pytest
import torch
from programs import assert_same, check_stress, living_nodes, plain, run_inside

import dtrrun
from dtrrun.runtime import session as session_module

WIDTH, ROWS, LAYERS = 64, 1024, 10


def weights():
    return [torch.randn(WIDTH, WIDTH) * 0.1 for _ in range(LAYERS)]


def batch():
    x = torch.randn(ROWS, WIDTH)
    return x, torch.sin(x)


def forward(ws, x):
    for w in ws:
        x = torch.tanh(x @ w)
    return x


def loss_of(ws, x, y):
    return (forward(ws, x) - y).square().mean()


def in_a_list(steps=8):
    """Make new weights each step, with `torch.autograd.grad`."""
    ws, losses = weights(), []
    for _ in range(steps):
        ws = [w.requires_grad_() for w in ws]
        loss = loss_of(ws, *batch())
        ws = [(w - 0.1 * g).detach() for w, g in zip(ws, torch.autograd.grad(loss, ws), strict=True)]
        losses.append(loss.detach())
    return losses, ws


def by_torch_func(steps=8):
    """The same, with momentum, with `torch.func.grad`."""
    ws, losses = weights(), []
    momentum = [torch.zeros_like(w) for w in ws]
    for _ in range(steps):
        gradients, loss = torch.func.grad_and_value(loss_of)(ws, *batch())
        momentum = [0.9 * m + g for m, g in zip(momentum, gradients, strict=True)]
        ws = [w - 0.1 * m for w, m in zip(ws, momentum, strict=True)]
        losses.append(loss)
    return losses, ws


def by_hand(steps=8):
    """Change leaves that belong to no module in place under `no_grad`."""
    ws, losses = [w.requires_grad_() for w in weights()], []
    for _ in range(steps):
        loss = loss_of(ws, *batch())
        loss.backward()
        with torch.no_grad():
            for w in ws:
                w -= 0.1 * w.grad
                w.grad = None
        losses.append(loss.detach())
    return losses, ws


def inner_loops(steps=3):
    """MAML: the inner steps are differentiated, so only the outer pass ends a step."""
    ws, losses = weights()[:4], []
    for _ in range(steps):
        ws, total = [w.requires_grad_() for w in ws], 0.0
        for _ in range(2):
            fast = ws
            for _ in range(2):
                gradients = torch.autograd.grad(loss_of(fast, *batch()), fast, create_graph=True)
                fast = [w - 0.05 * g for w, g in zip(fast, gradients, strict=True)]
            total = total + loss_of(fast, *batch())
        gradients = torch.autograd.grad(total, ws)
        ws = [(w - 0.1 * g).detach() for w, g in zip(ws, gradients, strict=True)]
        losses.append(total.detach())
    return losses, ws


def inner_transforms(steps=3):
    """The same with nested transforms of `torch.func`."""

    def outer(ws, batches):
        total = 0.0
        for x, y in batches:
            fast = ws
            for _ in range(2):
                fast = [w - 0.05 * g for w, g in zip(fast, torch.func.grad(loss_of)(fast, x, y), strict=True)]
            total = total + loss_of(fast, x, y)
        return total

    ws = weights()[:4]
    for _ in range(steps):
        gradients = torch.func.grad(outer)(ws, [batch(), batch()])
        ws = [w - 0.1 * g for w, g in zip(ws, gradients, strict=True)]
    return ws


def rows_of_a_jacobian(steps=2):
    """Make many passes through one graph."""
    w, kept = weights()[0].requires_grad_(), []
    for _ in range(steps):
        x = torch.randn(16, WIDTH, requires_grad=True)
        y = forward([w] * 6, x)
        kept += [torch.autograd.grad(y[:, j].sum(), x, retain_graph=True)[0] for j in range(8)]
        y.sum().backward()
        kept += [x.grad, w.grad]
    return kept


PROGRAMS = [in_a_list, by_torch_func, by_hand, inner_loops, inner_transforms, rows_of_a_jacobian]


@pytest.mark.parametrize("program", PROGRAMS)
def test_everything_evicted(program, monkeypatch):
    monkeypatch.setitem(globals(), "ROWS", 16)
    monkeypatch.setitem(globals(), "LAYERS", 2)
    check_stress(lambda: program(steps=2))


@pytest.mark.parametrize(
    ("program", "share", "most"),
    [
        (in_a_list, 0.6, 250),
        (by_torch_func, 0.5, 300),
        (by_hand, 0.5, 200),
        (inner_loops, 0.5, 200),
        (inner_transforms, 0.5, 160),
    ],
)
def test_inside_a_budget_a_step_is_recomputed_and_not_the_program(program, share, most):
    """most: storages, with h_dtr_eq; the second takes 380 if gradients are evicted, or kept for replays."""
    expected = plain(program)
    _, counted = run_inside(program, None)
    budget = int(counted["peak_bytes"] * share)
    found, report = run_inside(program, budget, cost="model", heuristic="h_dtr_eq")
    assert_same(expected, found, "inside the budget")
    assert 0 < report["rematerializations"] < most


def test_the_records_of_a_loop_without_gradients_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(session_module, "COMPACT_EVERY", 100)
    monkeypatch.setattr(session_module, "PUBLISH_NS", 0)

    def program(turns):
        x, rows = torch.randn(64, 64), []
        for _ in range(turns):
            x = torch.tanh(x * 1.1 + 0.01)
            rows.append(x[0].clone())
        return x, rows[-5:]

    turns = 4000  # long enough for several checks of the clock
    expected = plain(lambda: program(turns))
    with dtrrun.budget("1GB") as session:
        torch.manual_seed(7)
        before = living_nodes(session)[1]
        x, rows = program(turns)
        assert living_nodes(session)[1] - before < turns  # each has four operators
        session.dtr.eviction.warn_only = True
        session.set_budget(1)
    assert plain(lambda: (x, rows))[:-2] == expected[:-2]


def test_what_is_carried_over_comes_back_before_its_history_goes():
    """It is evicted when the step ends."""
    with dtrrun.budget(None) as session:
        before = living_nodes(session)[1]
        ws, state = weights(), torch.zeros(ROWS, WIDTH)
        for _ in range(20):
            ws = [w.requires_grad_() for w in ws]
            x, y = batch()
            state = 0.9 * state + forward(ws, x).detach()
            with session.callbacks.lock:
                record = session.callbacks.version_of(state)
                session.dtr.eviction.evict_if_possible(record)
            gradients = torch.autograd.grad(loss_of(ws, x, y), ws)
            ws = [w.detach() - 0.1 * g for w, g in zip(ws, gradients, strict=True)]
        assert session.report()["evictions"] > 0
        assert living_nodes(session)[1] - before < 20 * LAYERS


def test_what_dies_just_before_its_history_is_cut_keeps_its_recipe():
    """As when another thread drops it: an evicted tensor is computed from it."""
    source = torch.randn(64, 64)
    expected = (source.sin() * 2).exp()
    # With measured costs, an eviction would sometimes keep its input.
    with dtrrun.budget(None, cost="model") as session:
        old = source.sin()
        session.dtr.history.end_period()
        carried = old * 2
        result = carried.exp()
        record = session.callbacks.version_of(result)
        assert session.dtr.eviction.evict_if_possible(record)
        del old
        session.ledger.collect_dead()
        del carried
        assert session.ledger.dead
        session.dtr.history.cut()
        assert torch.equal(result, expected)
