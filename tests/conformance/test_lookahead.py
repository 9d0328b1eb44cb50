"""`observe.lookahead`: which steps are watched, what is known of later ones, and that the bits stay."""

import random

import pytest
import torch
from torch import nn

import dtrrun
from dtrrun.core.foresight import Foresight

WIDTH, ROWS = 64, 256


def network(depth=8):
    layers = [part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def train_one(model, optimizer, layers=None):
    optimizer.zero_grad()
    loss = model[: layers and 2 * layers](torch.randn(ROWS, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def same_steps(ended):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(6):
        yield train_one(model, optimizer)
        ended()


def by_turns(ended):
    models = network(), network(6)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for step in range(9):
        yield train_one(models[step % 2], optimizers[step % 2])
        ended()


def never_the_same(ended):
    model = network(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    order = random.Random(0)
    functions = [torch.tanh, torch.sigmoid, torch.relu, torch.sin, torch.exp, torch.erf, torch.square]
    for _ in range(20):
        optimizer.zero_grad()
        x = torch.randn(ROWS, WIDTH)
        for function in order.choices(functions, k=12):
            x = function(model(x))
        x.mean().backward()
        optimizer.step()
        yield x.sum().item()
        ended()


def batches_of_many_sizes(ended):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for rows in (256, 200, 256, 240, 130, 250, 190):
        optimizer.zero_grad()
        loss = model(torch.randn(rows, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()
        ended()


def losses_and_session(program, budget, **options):
    torch.manual_seed(0)
    seen = []
    with dtrrun.budget(budget, cost="model", **options) as session:

        def ended():
            lookahead = session._lookahead
            if lookahead is not None:
                seen.append((lookahead in session.ledger.observers, len(lookahead.foresight.steps)))

        losses = list(program(ended))
    return losses, session, seen


@pytest.mark.parametrize(
    ("program", "budget", "known"),
    [
        (same_steps, 700_000, 1),
        (by_turns, 900_000, 2),
        (batches_of_many_sizes, 700_000, 1),
        (never_the_same, 1_200_000, 4),
    ],
)
def test_the_bits_stay_and_steps_are_known(program, budget, known):
    plain, _, _ = losses_and_session(program, None)
    losses, session, seen = losses_and_session(program, budget, heuristic="h_next")
    assert losses == plain
    assert session.dtr.eviction.evictions > 20
    assert session.ledger.peak_bytes <= budget
    assert [after for _, after in seen][-1] == known
    assert not session.ledger.observers


def test_two_steps_are_watched_and_no_more_where_all_are_alike():
    _, _, seen = losses_and_session(same_steps, 700_000, heuristic="h_next")
    assert [watching for watching, _ in seen] == [True, True, False, False, False, False]
    assert [steps for _, steps in seen] == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("program", "budget"), [(by_turns, 900_000), (batches_of_many_sizes, 700_000)])
def test_what_is_known_is_used(program, budget, monkeypatch):
    """In the last steps the position is known at every eviction."""
    found = []
    begin = Foresight.begin

    def noted(self):
        found.append((self.looks, self.lost))
        begin(self)

    monkeypatch.setattr(Foresight, "begin", noted)
    losses_and_session(program, budget, heuristic="h_next")
    _, first, *_ = found  # the one before it is the beginning of the session
    assert first[0] == first[1] > 0
    assert sum(looks for looks, _ in found[5:]) > 5
    assert all(lost == 0 for _, lost in found[5:])


def held_until_other_weights_change(ended):
    """As in an unrolled GAN: `held` is needed when the second network's weights change, one step later."""
    first, second = network(), nn.Linear(WIDTH, WIDTH)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (first, second)]
    for _ in range(6):
        held = (second.weight * 2).tanh()
        yield train_one(first, optimizers[0])
        ended()
        optimizers[1].zero_grad()
        loss = second(torch.randn(8, WIDTH)).square().mean()
        loss.backward()
        optimizers[1].step()
        yield loss.item()
        ended()
    assert held.shape


def test_what_is_needed_when_weights_change_in_the_next_step_stays():
    torch.manual_seed(0)
    again = []  # how often `second.weight * 2` has been recomputed, after each step
    rule = "h_chain(c=e_star,s=.2,next=1,released=alike)"
    with dtrrun.budget(700_000, cost="model", heuristic=rule) as session:

        def ended():
            again.append(session.dtr.rematerializer.by_operator.get("aten.mul", [0])[0])

        list(held_until_other_weights_change(ended))
    assert again[3] == 2
    assert again[-1] == 2, "it was evicted although it was known to be needed"
    assert session.dtr.eviction.evictions > 30


def test_steps_that_never_repeat_are_watched_less_and_less():
    _, _, seen = losses_and_session(never_the_same, 1_200_000, heuristic="h_next")
    watching = [watched for watched, _ in seen]
    assert watching[:2] == [True, True]
    assert sum(watching) <= 10
    assert not all(watching[-6:])


def test_without_pressure_nothing_is_watched():
    _, session, seen = losses_and_session(same_steps, 1 << 30, heuristic="h_next")
    assert not any(watching for watching, _ in seen)
    assert session._lookahead.foresight.steps == []
