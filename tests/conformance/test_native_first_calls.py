"""First calls: what they allocate is known before, by formulas, without Python once a family is known."""

from collections import Counter

import pytest
import torch
from faults import check_accounts
from programs import in_memory
from torch import nn
from torch.nn import functional as F

import dtrrun
from dtrrun.runtime.storage import storage_of
from tests.database.predicted import Prediction, Watch, told, worst

pytestmark = pytest.mark.usefixtures("extension")


def fill(*size, dtype=torch.float32):
    return torch.linspace(-2, 2, torch.Size(size).numel()).reshape(size).to(dtype)


def backward(function, *tensors):
    leaves = [tensor.requires_grad_() for tensor in tensors]
    return torch.autograd.grad(function(*leaves).square().sum(), leaves)


CALLS = {
    "pointwise": lambda n: fill(n, 7).sigmoid(),
    "broadcast": lambda n: fill(n, 1, 3) + fill(5, 1),
    "of a number": lambda n: fill(n) * 2.5 + 1,
    "integers and a number": lambda n: fill(n, dtype=torch.int64) * 2.5,
    "integers over a number": lambda n: fill(n, dtype=torch.int32) // 2,
    "a weak type": lambda n: fill(n, dtype=torch.float16) * torch.tensor(2.0, dtype=torch.float64),
    "both weak": lambda n: [torch.tensor(1.5) + torch.tensor(2, dtype=torch.float64) for _ in range(n)],
    "comparison": lambda n: fill(n, 3) > 0,
    "where": lambda n: torch.where(fill(n, 3) > 0, fill(n, 3), 0.0),
    "other type": lambda n: fill(n, 5).to(torch.bfloat16),
    "out of an expanded one": lambda n: fill(1, n).expand(6, n).exp(),
    "transposed": lambda n: fill(n, 4).t().neg(),
    "nothing": lambda n: fill(n, 0).exp() + fill(1, 0),
    "softmax": lambda n: fill(n, 9).softmax(1),
    "mm": lambda n: fill(n, 3) @ fill(3, n + 1),
    "addmm": lambda n: F.linear(fill(n, 3), fill(5, 3), fill(5)),
    "bmm": lambda n: fill(2, n, 3) @ fill(2, 3, 4),
    "baddbmm": lambda n: torch.baddbmm(fill(n, 1), fill(2, n, 3), fill(2, 3, 4)),
    "in 64 bits": lambda n: fill(n, 3, dtype=torch.float64) @ fill(3, n, dtype=torch.float64),
    "cat": lambda n: torch.cat([fill(n, 3), fill(2, 3), fill(n + 1, 3)]),
    "cat of different types": lambda n: torch.cat([fill(n), fill(2, dtype=torch.float64)]),
    "stack": lambda n: torch.stack([fill(n)] * n),
    "sum": lambda n: fill(n, 3, 4).sum((0, -1), keepdim=True) + fill(n, 3, 4).sum(1).sum(),
    "sum of integers": lambda n: fill(n, 3, dtype=torch.int32).sum(0),
    "mean in another type": lambda n: fill(n, 3).mean(0, dtype=torch.float64),
    "embedding": lambda n: backward(lambda w: F.embedding(torch.arange(n) % 3, w), fill(n, 4)),
    "gradients of views": lambda n: backward(lambda x: x[1:, 2:] + x[0, 1], fill(n, 5)),
    "gradients of products": lambda n: backward(lambda x, y: x @ y, fill(n, 3), fill(3, n)),
    "in place": lambda n: fill(n, 3).add_(1).mul_(fill(3)).relu_(),
    "of some": lambda n: assigned(fill(n, 5), (torch.arange(n) > 1, slice(1, 3))),
    "of some by place": lambda n: assigned(fill(4, n), (slice(None), torch.arange(n) % 2)),
    "filled": lambda n: torch.empty_like(fill(n)).fill_(3),
    "chunks": lambda n: torch.unsafe_chunk(fill(2 * n), 2),
    "complex": lambda n: torch.complex(fill(n), fill(n)) * 2,
    "masked": lambda n: fill(n, 3).masked_fill(fill(n, 3) > 0, 5),
    "in double precision": lambda n: in_double_precision(n),
    "convolution": lambda n: backward(
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
        fill(2, 3, n, n + 1),
        fill(4, 3, 3, 2),
        fill(4),
    ),
    "convolution in groups": lambda n: backward(
        lambda x, w: F.conv1d(x, w, dilation=2, groups=2), fill(2, 4, 2 * n), fill(6, 2, 2)
    ),
    "transposed convolution": lambda n: backward(
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, output_padding=1),
        fill(2, 3, n, n),
        fill(3, 4, 3, 3),
        fill(4),
    ),
    "transposed in three dimensions": lambda n: backward(
        lambda x, w: F.conv_transpose3d(x, w, stride=2, output_padding=1),
        fill(1, 2, n, n, 2),
        fill(2, 3, 3, 3, 3),
    ),
    "convolution of a constant": lambda n: backward(
        lambda w: F.conv2d(fill(2, 3, n, n), w), fill(4, 3, 2, 2)
    ),
    "normalised": lambda n: trained(nn.BatchNorm1d(n), fill(6, n)),
    "normalised by known statistics": lambda n: trained(nn.BatchNorm1d(n).eval(), fill(6, n)),
    "normalised by its own": lambda n: trained(nn.BatchNorm1d(n, track_running_stats=False), fill(6, n)),
    "normalised by rows": lambda n: trained(nn.LayerNorm((n, 2)), fill(3, n, 2)),
    "normalised by groups": lambda n: trained(nn.GroupNorm(n, 2 * n), fill(3, 2 * n, 4)),
    "pools": lambda n: backward(
        lambda x: F.avg_pool2d(F.max_pool2d(x, 2, 1), 3, 2, 1, ceil_mode=True), fill(2, 3, n, n + 1)
    ),
    "made": lambda n: [
        torch.zeros(n, 3).add_(1),
        torch.ones(n, dtype=torch.int64) * 2,
        torch.full((2, n), 7.0).exp(),
        torch.full((2, n), True).logical_not(),
    ],
    "counted": lambda n: [torch.arange(n) + 1, torch.arange(-n, n, 2) + 1, torch.arange(n, -1, -1) + 1],
    "counted by fractions": lambda n: [torch.arange(0.0, 1.0, step) * 2 for step in (0.1, 1 / n, 0.5)],
    "drawn": lambda n: drawn(n),
    "read before they change": lambda n: read_before_it_changes(n),
    "a module's parameters": lambda n: list(module(nn.Linear(n, 3)).state_dict().values()),
}
SIZES = (3, 4, 40)  # the last one's results take more than the least block


def assigned(tensor, places):
    tensor[places] = 2.0
    return tensor


def module(made):
    for parameter in made.parameters():
        nn.init.constant_(parameter, 0.5)
    return made


def trained(layer, x):
    module(layer)
    made = backward(lambda *leaves: layer(leaves[0]), x, *layer.parameters())
    return [*made, *layer.state_dict().values()]


def read_before_it_changes(n):
    layer, leaf, empty = nn.BatchNorm1d(n), torch.ones(n), torch.empty(n)
    kept = [one * 2 for one in (*layer.buffers(), leaf, empty.fill_(3))]
    made = trained(layer, fill(6, n))
    for tensor in leaf, empty:
        nn.init.constant_(nn.Parameter(tensor), 0.5)
    return [*kept, *made, leaf * 3, empty * 3]


def drawn(n):
    torch.manual_seed(n)
    made = [torch.rand(n, 3) + 1, torch.randn(n) * 2, torch.empty(n, 2).normal_()]
    return made + [torch.randperm(n * one) for one in (10, 40, 20)]


def in_double_precision(n):
    torch.set_default_dtype(torch.float64)
    try:
        return torch.arange(n) / 2
    finally:
        torch.set_default_dtype(torch.float32)


def run(call, *, limit, sizes=SIZES):
    """Return the results, the predictions, and what went to Python in the last call."""
    predictions: list[Prediction] = []
    with dtrrun.budget(limit, cost="model", over_budget="evict") as session:
        session.ledger.observers.append(Watch(session.ledger, predictions, ""))
        results = []
        for size in sizes:
            before = Counter(session.interposer.python_calls)
            results.append(call(size))
        in_python = Counter(session.interposer.python_calls) - before
        check_accounts(session)
    return results, predictions, in_python


@pytest.mark.parametrize("limit", ["1GB", 1])
@pytest.mark.parametrize("name", CALLS)
def test_what_first_calls_allocate_is_known_before(name, limit):
    expected = [CALLS[name](size) for size in SIZES]
    results, predictions, _ = run(CALLS[name], limit=limit)
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)
    assert predictions
    assert [told(one) for one in worst(predictions)] == []


NATIVE = ["pointwise", "broadcast", "mm", "bmm", "cat", "sum", "in place", "softmax", "convolution"]
NATIVE += ["convolution in groups", "transposed convolution", "normalised", "normalised by its own"]
NATIVE += ["normalised by rows", "normalised by groups", "pools", "made", "counted", "a module's parameters"]


@pytest.mark.parametrize("name", NATIVE)
def test_once_a_family_is_known_first_calls_are_native(name):
    *_, in_python = run(CALLS[name], limit="1GB", sizes=(3, 5, 8))
    assert set(in_python) <= {"aten.linspace"}


def test_parameters_and_state_become_constants_natively():
    with dtrrun.budget("1GB", cost="model") as session:
        layer = module(nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(layer.parameters(), 0.1, foreach=False)
        before = Counter(session.interposer.python_calls)
        for _ in range(3):
            optimizer.zero_grad()
            layer(fill(6, 4)).square().sum().backward()
            optimizer.step()
        assert not Counter(session.interposer.python_calls) - before
        state = [*layer.parameters(), *layer.buffers()]
        versions = [session.ledger.version_of(storage_of(tensor)) for tensor in state]
        pins = ["parameter"] * 2 + ["running statistics"] * 2 + ["updated in place"]
        assert [(one.pin, one.operation, one.escaped) for one in versions] == [
            (pin, None, False) for pin in pins
        ]
        check_accounts(session)


IMPOSSIBLE = {
    "empty": lambda: torch.empty(1 << 62),
    "bytes": lambda: torch.zeros(1 << 40, 1 << 21),
    "elements": lambda: torch.zeros(1 << 40, 1 << 40),
    "negative": lambda: torch.ones(-3),
    "counted": lambda: torch.arange(-(1 << 63), (1 << 63) - 1),
    "expanded": lambda: torch.ones(1).expand(1 << 31, 1 << 30).exp(),
    "broadcast": lambda: torch.ones(1, 1).expand(1 << 33, 1) + torch.ones(1, 1).expand(1, 1 << 33),
    "padded": lambda: F.conv2d(fill(1, 2, 5, 5), fill(2, 2, 3, 3), padding=1 << 40),
    "pooled": lambda: F.max_pool2d(fill(1, 2, 5, 5), 3, padding=1 << 62),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_memory_holds_is_an_error_of_pytorchs(name):
    with pytest.raises(RuntimeError) as alone:
        IMPOSSIBLE[name]()
    with dtrrun.budget("100MB") as session:
        torch.empty(3), torch.zeros(3, 3), torch.ones(3), torch.arange(-3, 3), torch.ones(3).exp()
        (
            torch.ones(3) + torch.ones(3),
            F.conv2d(fill(1, 2, 5, 5), fill(2, 2, 3, 3)),
            F.max_pool2d(fill(1, 2, 5, 5), 3),
        )
        with pytest.raises(RuntimeError) as inside:
            IMPOSSIBLE[name]()
        assert (inside.type, str(inside.value)) == (alone.type, str(alone.value))
        check_accounts(session)


def elementwise_repeat(session):
    """Make the interposer believe that a result of `repeat` has the size of its input."""
    make = session.interposer.formula_of
    session.interposer.formula_of = lambda func: "elementwise" if "repeat" in str(func) else make(func)


def test_a_formula_that_does_not_fit_is_not_used_again():
    """The first call shows it."""
    predictions: list[Prediction] = []
    with dtrrun.budget("1GB", cost="model") as session:
        elementwise_repeat(session)
        for size, times in ((3, 2), (4, 1), (500, 2)):  # the second one would fit
            torch.ones(size).repeat(times)
            session.ledger.observers[:] = [Watch(session.ledger, predictions, "")]
        assert session.interposer.native_calls["aten.repeat"] == 3
        assert [one.real for one in predictions if "repeat" in one.operator] == [64, 4032]
        assert [told(one) for one in worst(predictions)] == []
        check_accounts(session)


@pytest.mark.parametrize("budget", ["1GB", 3_300_000])
def test_what_is_larger_than_a_formula_says_is_corrected_and_made_room_for(budget):
    """Room is made afterwards, so that the next operator finds it."""
    with dtrrun.budget(budget, cost="model") as session:
        elementwise_repeat(session)
        torch.ones(3).repeat(1)  # fits it
        others, x = torch.full((250_000,), 2.0), torch.full((250_000,), 1.0)
        made = x.repeat(2)
        assert session.interposer.native_calls["aten.repeat"] == 2
        [known] = [one for one in session.callbacks.signatures.all() if one.output_bytes >= 2_000_000]
        assert (known.operator.name, known.output_bytes, known.guessed) == ("aten.repeat", 2_000_000, False)
        assert session.ledger.resident_bytes <= session.ledger.limit
        assert in_memory(others) == (budget == "1GB")
        check_accounts(session)
    assert made.sum() == 500_000


def multiply(x):
    for size in range(1, 6):
        x[:size] * 2


def test_what_is_known_natively_is_forgotten_with_the_rest():
    with dtrrun.budget("1GB", cost="model") as session:
        x = torch.ones(8)
        multiply(x)
        signatures = session.callbacks.signatures
        known = signatures.all()
        signatures.forget()
        assert not signatures.all()
        multiply(x)
        names = [one.operator.name for one in signatures.all()]
        assert names == [one.operator.name for one in known if one.operator.name == "aten.mul"]
