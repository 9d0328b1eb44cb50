"""An error at one operator after another, in the program and in its rematerializations.

The program catches it and goes on; afterwards all bits are those of a plain run with the same error at the
same operator, nothing is locked, and the accounts are right.
"""

from contextlib import nullcontext

import pytest
import torch
from faults import Attempt, Injector, check_accounts, failing_replays
from programs import assert_same, outcome
from torch import nn

from tests.care import budget

BUDGET_BYTES = 12_000  # out of a peak of about 40,000
ERRORS = (torch.OutOfMemoryError, RuntimeError, KeyboardInterrupt)


def training():
    """In-place and random operators, statistics, several outputs, views; each attempt may fail anywhere."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 16)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=True)
    kept = []
    for step in range(2):
        activations = []
        with Attempt():
            x = torch.randn(32, 16).sin()
            hidden = model(x)
            activations.append(hidden)
            folded = hidden.clone().mul_(0.5)
            activations.append(folded)
            folded[4:8] += hidden[:4]
            folded.add_(step).clamp_(-3, 3)
            first, second = folded.split(16)
            activations += [first, second, first @ second.t(), folded.max(1)]
            optimizer.zero_grad()
            (folded.exp().mean() + activations[4].square().mean()).backward()
            optimizer.step()
        kept += activations
    return {"kept": kept, "model": model, "optimizer": optimizer}


def inside(**options):
    """A budget in which each run replays the same operators: measured costs would differ."""
    return budget(BUDGET_BYTES, over_budget="evict", cost="model", verify=True, **options)


def check_failed(program, expected, injector, **options):
    """Run under dtrrun with one injected error: it leaves no more traces than in the plain run."""
    Attempt.failures = 0
    with inside(**options) as session, injector:
        _, found = outcome(program)
        check_accounts(session)
        assert session.report()["evictions"] > 0
    assert_same(expected, found, "after the error")
    assert session.report()["mismatches"] == []
    assert Attempt.failures == 1


def check_each(check, count, every):
    """Check different operators in each half, to cover more of those that both steps have."""
    half = count // 2
    places = [*range(0, half, every), *range(half + (every - half + 1) % every, count, every)]
    wrong = []
    for at in places:
        try:
            check(at, ERRORS[at % len(ERRORS)])
        except AssertionError as failed:
            wrong.append(f"operator {at}: {str(failed)[:300]}")
    assert not wrong, f"{len(wrong)} of {len(places)}: {wrong[:8]}"


WAYS = pytest.mark.parametrize(
    ("careful", "after", "every"),
    [(False, True, 3), (False, False, 8), (True, True, 8), (True, False, 8)],
    ids=["plain, after", "plain, before", "careful, after", "careful, before"],
)
"""Every third operator where no handler sees it, every eighth elsewhere."""


@WAYS
def test_at_each_operator_of_the_program(careful, after, every):
    def check(at, error):
        with Injector(at, error, after=after):
            _, expected = outcome(training)
        check_failed(training, expected, Injector(at, error, after=after), careful=careful)

    with Injector(-1, RuntimeError) as watched:
        training()
    assert watched.seen > 100
    check_each(check, watched.seen, every)


def rebuilding():
    """Run attempts that read what was evicted; each has the same result when repeated."""
    torch.manual_seed(3)
    norm = nn.BatchNorm1d(16)
    layers = [nn.Linear(16, 16) for _ in range(4)]
    x = torch.randn(32, 16)
    kept = []
    for layer in layers:
        x = norm(nn.functional.dropout(layer(x), 0.2))
        y = x.exp().mul_(0.5).add_(1)
        y[3:9] *= 2
        kept += [x, y, *y.max(1), torch.cat([x, y])]
    again = []
    for one in reversed(kept):
        made = None
        while made is None:
            with Attempt():
                made = one.double() * 2
        again.append(made)
    return kept, again, norm


@WAYS
def test_at_each_operator_of_a_rematerialization(careful, after, every):
    _, expected = outcome(rebuilding)

    def check(at, error):
        with failing_replays(at, error, after=after):
            check_failed(rebuilding, expected, nullcontext(), careful=careful)

    with failing_replays(-1, RuntimeError) as ran, inside(careful=careful):
        rebuilding()
    assert len(ran) > 50
    check_each(check, len(ran), every)
