"""Inside a budget, operators of backward passes are only counted if they make little. Bits are the same."""

import threading
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dtrrun
from dtrrun.core.ledger import COUNTED
from tests.conformance.programs import assert_same, bits

STEPS, LENGTH, ROWS, WIDTH = 8, 40, 64, 96


class Scaled(torch.autograd.Function):
    """Its backward pass is Python code that keeps what it has made, and writes to it later.

    It also writes to a buffer, from which something was computed that has been evicted.
    """

    kept = None

    @staticmethod
    def forward(ctx, x, noted, derived):
        ctx.save_for_backward(x)
        ctx.noted, ctx.derived = noted, derived
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        made = grad * 2 + x.sign() * 1e-3
        if Scaled.kept is not None and Scaled.kept.shape == made.shape:
            made = made + Scaled.kept.mul_(0.5)
        Scaled.kept = made.clone()
        ctx.noted.mul_(0.5)
        return made + ctx.derived.mean(), None, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Dropout(0.1))
        self.head = nn.Linear(WIDTH, 10)
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("noted", torch.randn(32, WIDTH))

    def forward(self, x):
        made = []
        derived = self.noted.exp()
        h = c = Scaled.apply(self.first.expand(ROWS, WIDTH), self.noted, derived)
        for one in x:
            h, c = self.cell(one, (h, c))
            made.append(h)
        h = torch.stack(made[-8:]).mean(0) + torch.cat(made[:2], 1)[:, :WIDTH]
        h = checkpoint(self.inner, h, use_reentrant=False)
        return self.head(h)


def training(penalty=False, twice=False, hooks=False):
    """Return a function that trains for a step, and what it leaves behind.

    Its argument is called before weights change.
    """
    torch.manual_seed(0)
    Scaled.kept = None
    net, kept = Net(), []
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    if hooks:
        net.cell.weight_ih.register_hook(lambda grad: grad.clamp_(-1, 1) + grad.mean())
        net.inner[0].register_full_backward_hook(
            lambda module, given, made: kept.append(made[0].sum().item())
        )

    def step(before_update=lambda: None):
        optimizer.zero_grad()
        for _ in range(1 + twice):
            loss = F.cross_entropy(net(torch.randn(LENGTH, ROWS, WIDTH)), torch.arange(ROWS) % 10)
            if penalty:
                first = torch.autograd.grad(loss, list(net.head.parameters()), create_graph=True)
                loss = loss + sum(one.square().sum() for one in first)
            loss.backward()
        kept.append(loss.item())
        before_update()
        optimizer.step()

    return step, [net, optimizer, kept]


def counts_in(make, size, steps=STEPS):
    """Train inside a budget. Return how many operators of each step were only counted, what is left, and the
    report. make: as `training`."""
    step, state = make()
    counts = []
    with dtrrun.budget(size, heuristic="h_dtr_eq") as session:

        def note():
            session.ledger.collect_dead()
            counts.append(session.ledger.operators_counted)

        for _ in range(steps):
            step(note)
    assert session.report()["peak_bytes"] <= size
    return counts, bits(state), session.report()


def peak_of(make):
    with dtrrun.budget(None) as session:
        step, _ = make()
        for _ in range(2):
            step()
    return session.report()["peak_bytes"]


PROGRAMS = {
    "plain": training,
    "hooks": partial(training, hooks=True),
    "accumulated, of gradients of gradients": partial(training, penalty=True, twice=True),
}


@pytest.mark.parametrize("share", [0.7, 0.6])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_bits(name, share):
    make = PROGRAMS[name]
    step, state = make()
    for _ in range(STEPS):
        step()
    size = int(peak_of(make) * share)
    counts, found, report = counts_in(make, size)
    assert counts[:3] == [0, 0, 0]
    assert max(counts) > 400
    assert report["rematerializations"] > 0
    assert_same(bits(state), found, name)


def keeping():
    """Return, as `training` does, a step that at last keeps what its backward pass makes."""
    torch.manual_seed(0)
    scale = nn.Parameter(torch.ones(1))
    optimizer, steps, kept = torch.optim.SGD([scale], lr=1e-3), count(), []

    def step(before_update=lambda: None):
        place = next(steps)
        gradients = []
        x = torch.randn(16, 256) * scale
        for _ in range(240):
            x = (x * 1.01).tanh()
            if place >= STEPS - 1:
                x.register_hook(lambda grad: gradients.append(torch.outer(grad[0, :64], grad[1, :64])))
        optimizer.zero_grad()
        x.sum().backward()
        before_update()
        kept.append(sum((one.sum().item() for one in gradients), 0.0))
        optimizer.step()

    return step, [scale, kept]


def test_what_is_counted_and_stays_takes_a_64th_of_the_budget():
    """The last step keeps far more. Most of that can be evicted."""
    size = peak_of(keeping) // 2
    most = []
    step, (_, kept) = keeping()
    with dtrrun.budget(size, heuristic="h_dtr_eq") as session:
        ledger = session.ledger

        def note():
            ledger.collect_dead()
            entered = sum(one.nbytes for one in ledger.versions.values() if one.pin == COUNTED)
            most.append((ledger.operators_counted, ledger.census_bytes + entered))

        for _ in range(STEPS):
            step(note)
    assert [counted > 200 for counted, _ in most[:-1]] == [False] * 3 + [True] * (STEPS - 4)
    assert max(nbytes for _, nbytes in most[:-1]) < size // 64
    assert size // 128 < most[-1][1] <= size // 64
    assert session.report()["peak_bytes"] <= size
    assert kept[-1] != 0


def test_what_autograd_records_is_handled_in_full():
    weight = nn.Parameter(torch.ones(16, 256))
    optimizer, counts = torch.optim.SGD([weight], lr=1e-3), []
    with dtrrun.budget("1MB") as session:
        for _ in range(STEPS):
            x = weight
            for _ in range(20):
                x = (x * 1.01).tanh()
            (found,) = torch.autograd.grad(x.sum(), [weight], create_graph=True)
            session.ledger.collect_dead()
            counts.append(session.ledger.operators_counted)
            weight.grad = found.detach().clone()
            optimizer.step()
    assert counts == [0] * STEPS


def test_what_a_counted_kernel_reads_is_not_evicted_meanwhile():
    """Another thread makes room, and the only thing that can be evicted is read at that moment."""
    mb = 1 << 20
    ready, found, done = threading.Event(), [], []
    weight = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=1e-3)

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, large):
            ctx.large = large
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            ready.set()
            found.extend(torch.mm(row, ctx.large) for _ in range(20))
            return grad * 2, None

    def other():
        ready.wait()
        done.append(session.dtr.eviction.try_room(60 * mb))

    base, row = torch.ones(5 * 1024, 2 * 1024), torch.ones(1, 5 * 1024)
    with dtrrun.budget(110 * mb) as session:
        for place in range(6):
            ready.clear()
            thread = threading.Thread(target=other)
            if place == 5:
                thread.start()
            optimizer.zero_grad()
            Reads.apply(weight, base * 3).sum().backward()
            if place == 5:
                thread.join()
            session.ledger.collect_dead()
            counts = session.ledger.operators_counted
            optimizer.step()
    assert counts > 0
    assert len(done) == 1
    assert {one for made in found for one in made.flatten().tolist()} == {3 * 5 * 1024}
