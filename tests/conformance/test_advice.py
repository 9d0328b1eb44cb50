"""A user whose budget is too small, and who follows the error's advice, soon has a budget that trains."""

import gc
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtrrun
from dtrrun import bindings
from dtrrun.runtime.observe import expected, rehearsal
from dtrrun.runtime.observe.expected import Estimate, Plain, Refused, Sizes, advised_budget
from dtrrun.runtime.observe.hints import unnamed
from dtrrun.runtime.observe.training_memory import Training
from dtrrun.sizes import parse_size
from tests.bench import advised
from tests.bench.advice import attempt


class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(block(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(block(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))

    def forward(self, x):
        skips = []
        for layer in self.down:
            skips.append(layer(x))
            x = F.max_pool2d(skips[-1], 2)
        x = skips.pop()
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return x


def block(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.SiLU())


def unet():
    """A model that needs most of its memory for activations."""
    model = UNet()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(2):
        model(torch.randn(4, 3, 48, 48)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def wide():
    """A model that needs most of its memory for parameters, gradients, optimizer state and temporaries."""
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8))
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3, weight_decay=1e-4, momentum=0.9, foreach=True)
    for _ in range(2):
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluated():
    """A program that needs most of its memory for an evaluation, with a larger batch than in training."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU()),
        *(nn.AvgPool2d(5), nn.Flatten(), nn.Linear(256, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        F.cross_entropy(model(torch.randn(8, 1, 24, 24)), torch.arange(8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(96, 1, 24, 24)).argmax(1).tolist()


def attempts(program, budget):
    """Run it in the budget, then in those that the errors advise. Return all budgets: the last is enough."""
    tried = []
    while len(tried) < 5:
        tried.append(budget)
        try:
            torch.manual_seed(1)
            with dtrrun.budget(budget):
                program()
            return tried
        except dtrrun.BudgetError as error:
            budget = parse_size(re.search(r'Try dtrrun\.budget\("(.*?)"\)', str(error))[1])
    pytest.fail(f"still too small: {tried}")


@pytest.mark.parametrize("percent", [60, 40, 20])
@pytest.mark.parametrize("program", [unet, wide, evaluated])
def test_following_the_advice(program, percent):
    with dtrrun.budget(None) as session:
        program()
    peak = session.report()["peak_bytes"]
    tried = attempts(program, peak * percent // 100)
    assert len(tried) <= 3
    assert tried == sorted(tried)
    assert tried[-1] <= 1.1 * peak


def test_what_is_to_come_is_added():
    """The advice in the first backward pass covers more than the operator or the parameters alone."""
    parameters = 4 * (64 * 512 + 512 * 512 + 512 * 8)
    tried = attempts(wide, 3 * parameters // 2)
    assert tried[1] >= 6 * parameters  # gradients, two tensors of state and two temporary tensors


def test_parameters_that_the_session_has_not_seen_yet():
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    x = torch.ones(2000, 256)
    with pytest.raises(dtrrun.BudgetError) as caught, dtrrun.budget(1_000_000):
        model(x)
    assert caught.value.expected_bytes >= 2 * 8 * 4 * 256 * 256 + 2 * 4 * 2000 * 256


def test_temporary_memory_of_an_optimizer_is_not_counted_twice():
    """The advice does not count twice what the optimizer's temporaries, now constants, already take."""
    with dtrrun.budget(None) as session:
        wide()
    peak = session.report()["peak_bytes"]
    assert attempts(wide, peak * 98 // 100)[1] <= 1.1 * peak


SECOND = [
    *((advised.adapters, 20), (advised.convolutions, 10), (advised.convolutions, 60)),
    *((advised.evaluated, 30), (advised.evaluated, 80), (advised.growing, 60), (advised.growing, 70)),
    *((advised.logits, 30), (advised.logits, 70), (advised.momentum, 30), (advised.unused, 80)),
]


@pytest.mark.parametrize(("program", "percent"), SECOND)
def test_the_second_budget_is_enough_and_no_more_than_the_peak_and_one_operator(
    program, percent, monkeypatch
):
    with monkeypatch.context() as patches, dtrrun.budget(None) as session:
        patches.setattr(session.interposer, "count_only", lambda **_: None)  # all operators have signatures
        program()
    peak = session.report()["peak_bytes"]
    operator = max(Sizes(one, set()).nbytes for one in session.callbacks.signatures.all())
    gc.collect()  # its parameters would otherwise count in the next attempt
    tried = attempts(program, peak * percent // 100)
    assert len(tried) == 2
    assert tried[1] <= 1.02 * (peak + operator)


@pytest.mark.parametrize(
    ("program", "percent"), [(advised.attention, 60), (advised.mlp, 70), (advised.penalty, 80)]
)
def test_what_it_takes_without_a_budget_is_known_inside_one(program, percent):
    """The ledger counts what is evicted, and not what is held or recomputed for dtrrun's own use."""
    with dtrrun.budget(None) as session:
        program()
    peak = session.ledger.plain_peak_bytes
    assert peak == session.report()["peak_bytes"]
    gc.collect()
    with dtrrun.budget(peak * percent // 100) as session:
        program()
    assert session.dtr.eviction.evictions
    assert session.ledger.plain_peak_bytes == peak


def refused(program, budget, known=0):
    error, _ = attempt(program, budget, known)
    assert error is not None
    return error


def peak_of(program):
    return attempt(program, None)[1].report()["peak_bytes"]


@pytest.mark.parametrize(
    ("program", "percent"), [(advised.logits, 40), (advised.growing, 50), (advised.weights, 60)]
)
def test_advice_is_at_most_what_earlier_runs_have_taken(program, percent):
    with dtrrun.budget(None) as session:
        program()
    peak = session.report()["peak_bytes"]
    error = refused(program, peak * percent // 100, peak)
    assert error.least_bytes <= error.likely_bytes <= error.expected_bytes <= error.plain_bytes == peak
    gc.collect()
    with dtrrun.budget(error.expected_bytes):
        program()
    larger = refused(program, peak * percent // 100, error.budget_bytes + 1)  # another program's
    assert larger.plain_bytes == 0 or larger.expected_bytes <= larger.plain_bytes


def test_the_rest_of_a_backward_pass_is_rehearsed(monkeypatch):
    """The simulator finds a budget far below the guess, though a first step is advised to take that."""
    bindings.load()  # a session does not build it
    with dtrrun.budget(None) as session:
        advised.attention()
    peak = session.report()["peak_bytes"]
    with_it = refused(advised.attention, peak // 5)
    monkeypatch.setattr("dtrrun.bindings.is_there", lambda: False)
    without = refused(advised.attention, peak // 5)
    assert with_it.likely_bytes < 0.9 * without.likely_bytes
    gc.collect()
    with dtrrun.budget(with_it.expected_bytes):
        advised.attention()


def test_a_backward_pass_beside_the_host_is_rehearsed(monkeypatch, tmp_path):
    """What an operator waits with while one of its inputs comes back may leave, too."""

    def inside(nbytes):
        with dtrrun.budget(nbytes, cost="model", host_budget=f"1GB:{tmp_path}"):
            advised.logits()

    def advice():
        with pytest.raises(dtrrun.BudgetError, match="_log_softmax_backward_data") as found:
            inside(9_800_000)
        return found.value.expected_bytes

    bindings.load()
    with_it = advice()
    monkeypatch.setattr("dtrrun.bindings.is_there", lambda: False)
    assert with_it < 0.8 * advice()
    gc.collect()
    inside(with_it)


def test_weights_that_a_first_step_could_compute_again_stay_in_later_ones():
    """Both budgets are enough for all steps, and take no longer than is said."""
    bindings.load()
    error = refused(advised.by_hand, peak_of(advised.by_hand) * 3 // 10)
    assert error.least_bytes < error.likely_bytes < error.expected_bytes
    for budget in (error.likely_bytes, error.expected_bytes):
        again, session = attempt(advised.by_hand, budget)
        assert again is None
    ledger = session.ledger
    assert ledger.clock < 1.5 * error.expected_slowdown * (ledger.clock - ledger.recomputed_cost)


def test_a_budget_close_to_one_that_was_slow_is_not_advised(monkeypatch):
    """What ran before the rest that is rehearsed would be as slow again."""
    monkeypatch.setattr(expected, "expected_budget", lambda refused: Estimate(900, 1100, 1500, slowdown=1.2))
    ledger = SimpleNamespace(budget_bytes=1000, limit=1000, overhead={}, constants_leave=False)
    error = dtrrun.BudgetError("aten.mm", 10, 1000, 1010)
    found = Refused(ledger, (), Training([], [], True, "cpu"), error)
    quick = advised_budget(found, Plain(now=2000, so_far=4000))
    assert (quick.expected, quick.likely, quick.slowdown) == (1100, 1100, 1.2)
    slow = advised_budget(found, Plain(now=2000, so_far=4000, slowdown=13.0))
    assert (slow.expected, slow.likely, slow.slowdown) == (4000, 2000, 1.0)


def numbers(pattern, text):
    """Return the groups that match, in bytes if they are sizes."""
    found = re.fullmatch(pattern, text)
    assert found, text
    return [int(one) if one.isdecimal() else parse_size(one.replace(" ", "")) for one in found.groups()]


@pytest.mark.parametrize("percent", [30, 50])
def test_as_many_more_calls_fit_as_are_said(percent):
    """Nobody knows for how long results will grow, so the advice says how far it reaches."""
    error = refused(advised.growing, peak_of(advised.growing) * percent // 100)
    pattern = (
        r"at least: enough for this call of aten.cat and (\d+) more, each of which makes (.*) more than the "
        "one before; every further one takes (.*)"
    )
    more, each, takes = numbers(pattern, error.basis)
    assert more >= 3
    batches = round(error.needed_bytes / each) + more
    for beyond in (0, 3):
        with dtrrun.budget(error.expected_bytes + beyond * takes):
            advised.growing(batches + beyond)
    assert attempt(lambda: advised.growing(batches + 3), error.expected_bytes)[0] is not None


def test_as_many_more_steps_fit_as_are_said():
    def keeping(steps):
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        kept = []
        for _ in range(steps):
            out = model(torch.randn(512, 256))
            kept.append(out.detach())
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    error, session = attempt(lambda: keeping(20), 7_000_000)
    done = session.steps.count
    pattern = "at least: enough for (.*) more steps, each of which leaves (.*) more in memory"
    more, _ = numbers(pattern, error.basis)
    assert more >= 3
    with dtrrun.budget(error.expected_bytes):
        keeping(done + more)


@pytest.mark.parametrize(
    ("program", "percent", "steps"),
    [(advised.inference, 10, 0), (advised.evaluated, 20, 2), (advised.growing, 20, 1)],
)
def test_what_takes_more_than_the_advised_budget_is_not_what_it_is_for(program, percent, steps):
    error, session = attempt(program, peak_of(program) * percent // 100)
    begins = expected.STEPS.format(expected.THIS) if steps else expected.SO_FAR
    assert error.basis.startswith(begins)
    assert error.basis in str(error)
    again, later = attempt(program, error.expected_bytes)
    assert again is not None
    assert later.steps.count == steps  # all of them: what does not fit is another batch, or larger results
    assert later.ledger.age > session.ledger.age


@pytest.mark.parametrize(("percent", "less"), [(30, True), (90, False)])
def test_it_is_said_that_a_program_may_take_less_without_a_budget(percent, less):
    peak = peak_of(advised.logits)
    error = refused(advised.logits, peak * percent // 100)
    assert (error.expected_bytes > peak, expected.LESS in error.basis) == (less, less)


def test_no_backward_pass_is_expected_before_there_is_anything_to_train():
    """While a program makes its data, gradients are recorded by default."""

    def program():
        data = torch.rand(512, 1024)
        data = (data - data.mean()) / data.std()
        model = nn.Linear(1024, 8)
        model(data).sum().backward()

    peak = peak_of(program)
    error = refused(program, peak * 6 // 10)
    assert error.expected_bytes <= peak
    assert error.basis.startswith(expected.SO_FAR)


def test_what_stays_in_memory_needs_no_margin():
    """Once an optimizer makes its state, all that stays is known: here, nearly all that the program takes."""
    _, session = attempt(advised.weights, None)
    peak = session.report()["peak_bytes"]
    error, _ = attempt(advised.weights, peak // 2)
    assert error.expected_bytes <= 1.02 * peak
    assert attempt(advised.weights, error.expected_bytes)[0] is None


def test_what_goes_wrong_in_a_rehearsal_is_not_hidden(monkeypatch):
    """From users neither: their error says what is missing from it."""

    def broken(self, *arguments):
        raise KeyError("storage")

    bindings.load()
    monkeypatch.setattr(rehearsal.Rehearsal, "backward", broken)
    budget = peak_of(advised.attention) // 5
    with monkeypatch.context() as patch:
        patch.setattr("dtrrun.runtime.session.unnamed", unnamed)
        error = refused(advised.attention, budget)
    assert error.expected_bytes == 0
    assert "dtrrun could not work out which budget to try (KeyError: 'storage')" in str(error)
    with pytest.raises(KeyError):
        attempt(advised.attention, budget)
