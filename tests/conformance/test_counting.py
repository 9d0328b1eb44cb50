"""While memory is ample, operators are only counted. Peaks are the same, and so are bits once it is short."""

import threading
import warnings
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dtrrun
from dtrrun.runtime.dispatch.interposer import Interposer
from dtrrun.runtime.operators import KERNELS
from tests.conformance.programs import assert_same, bits

STEPS = 7


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 16, sparse=True)
        self.recurrent = nn.LSTM(16, 16, dropout=0.1, num_layers=2)
        self.norm = nn.BatchNorm1d(16)
        self.convolution = nn.Conv1d(1, 4, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        made = self.embedding(x).view(4, -1, 16)
        made = self.norm(self.recurrent(made)[0].flatten(0, 1))
        made = F.dropout(F.relu(self.convolution(made.unsqueeze(1)), inplace=True), 0.2, self.training)
        return self.head(made.flatten(1))


def training(rows=32):
    """Return a function that trains for a step with a given number of rows, and what it leaves behind."""
    torch.manual_seed(0)
    net, kept = Net(), []
    dense = [one for name, one in net.named_parameters() if "embedding" not in name]
    optimizers = torch.optim.AdamW(dense), torch.optim.SparseAdam(list(net.embedding.parameters()))

    def step(times=1):
        x = torch.randint(50, (rows * times, 5))
        loss = F.cross_entropy(net(x), torch.tensor(x.sum(1).tolist()) % 10)
        for one in optimizers:
            one.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(dense, 1.0)
        for one in optimizers:
            one.step()
        larger = torch.empty(0, dtype=torch.long)
        torch.add(x, 1, out=larger)
        larger.resize_(3).fill_(1)
        with torch.no_grad():
            parts = torch.cat(net(x).softmax(1).split(5)).to_sparse()
        kept.append((loss, larger, parts.sum().item(), float(torch.complex(loss, loss).detach().conj().imag)))

    return step, [net, optimizers[0], kept]


def peaks_of(step, size, times=(1,) * STEPS):
    """Return the peak of each step under dtrrun, the peaks of them all, and whether operators were
    only counted at the end."""
    peaks = []
    with dtrrun.budget(size) as session:
        session.ledger.small_constants = deque(maxlen=0)  # in full, some are kept for recipes
        session.on_step(lambda figures: peaks.append(figures["peak_bytes"]))
        for one in times:
            step(one)
        ledger = session.ledger
        return peaks, (ledger.peak_bytes, ledger.plain_peak_bytes), ledger.counting


def check_counted(make, size, monkeypatch):
    """Check that counting leaves a plain run's bits, and the peaks of one in full. make: as `training`."""
    step, state = make()
    for _ in range(STEPS):
        step(1)
    expected = bits(state)
    step, state = make()
    counted, figures, counts = peaks_of(step, size)
    assert counts
    assert_same(expected, bits(state), "counted")
    monkeypatch.setattr(Interposer, "count_only", lambda self, **_: None)
    full, in_full, _ = peaks_of(make()[0], size)
    assert (counted, figures) == (full, in_full)


@pytest.mark.parametrize("size", [None, "1GB"])
def test_peaks_are_those_of_the_full_way(size, monkeypatch):
    check_counted(training, size, monkeypatch)


def test_what_is_counted_has_no_version():
    step, _ = training()
    with dtrrun.budget(None) as session:
        torch.ones(8, 8) * 2 + 1  # the first call of each operator is handled in full
        for _ in range(5):
            step()
        before = {key for key, _ in session.ledger.versions.items()}
        x = torch.ones(8, 8)
        for _ in range(10):
            x = x * 2 + 1
        session.ledger.collect_dead()
        assert session.ledger.counting
        assert not {key for key, _ in session.ledger.versions.items()} - before
        assert session.ledger.census_bytes >= 256


FILLED = {
    "numbers": lambda: torch.tensor([1.0, 2.0] * 100),
    "of gradients": lambda: torch.tensor([1.0] * 200, requires_grad=True),
    "array": lambda: torch.tensor(np.ones(200)),
    "shared array": lambda: torch.as_tensor(np.ones(200)),
    "nothing": lambda: torch.tensor([]),
    "one": lambda: torch.tensor(7),
}


@pytest.mark.parametrize("size", [None, "1GB"])
@pytest.mark.parametrize("kind", FILLED)
def test_what_is_filled_by_address_is_counted_as_in_full(kind, size, monkeypatch):
    def program():
        torch.manual_seed(0)
        net, kept = nn.Linear(200, 1), []
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(times):
            for _ in range(times):
                kept.append(FILLED[kind]())
                _ = kept[-1] * 2 + (kept[-1] == 7)
            net(torch.ones(3, 200)).sum().backward()
            optimizer.step()

        return step, [net, kept]

    check_counted(program, size, monkeypatch)


def test_numbers_have_no_version():
    step, _ = training()
    with dtrrun.budget(None) as session:
        torch.tensor([1.0])
        for _ in range(5):
            step()

        def counted():
            session.ledger.collect_dead()
            return session.ledger.census_bytes

        before = {key for key, _ in session.ledger.versions.items()}, counted()
        made = [torch.tensor([float(i)] * 100) for i in range(10)]
        assert counted() - before[1] == 10 * 448
        assert not {key for key, _ in session.ledger.versions.items()} - before[0]
        del made
        assert counted() == before[1]


def test_a_step_that_takes_more_than_the_budget_is_kept_inside():
    def all_steps(step):
        for times in (1, 1, 1, 1, 24, 1, 24):
            step(times)

    step, state = training()
    all_steps(step)
    expected = bits(state)
    plain = max(peaks_of(training()[0], None, (1, 1, 24))[0])
    step, state = training()
    with dtrrun.budget(plain * 2 // 3) as session:
        for times in (1, 1, 1, 1):
            step(times)
        assert session.ledger.counting
        for times in (24, 1, 24):
            step(times)
        report = session.report()
        assert not session.ledger.counting
        assert report["evictions"] > 0
        assert report["peak_bytes"] <= plain * 2 // 3
        assert_same(expected, bits(state), "inside")


def test_half_of_the_budget_is_ample_if_the_last_steps_have_taken_as_much():
    repeated = [1] * 12
    plain = peaks_of(training()[0], None, repeated)[0]
    step, _ = training()
    counting = []
    with dtrrun.budget(max(plain) * 5 // 2) as session:
        for times in repeated:
            step(times)
            counting.append(session.ledger.counting)
        step(2)
        for _ in range(6):
            step(1)
            assert not session.ledger.counting
    assert not any(counting[:7])
    assert all(counting[8:])


def layers():
    """Like `training`, without operators that take much by themselves."""
    torch.manual_seed(0)
    net, kept = nn.Sequential(*(part for _ in range(16) for part in (nn.Linear(32, 32), nn.Tanh()))), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(times=1):
        loss = net(torch.randn(64 * times, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(loss)

    return step, [net, kept]


def test_a_step_that_takes_far_more_than_those_before_is_kept_inside():
    steps = [1] * 20 + [6, 1, 6]
    step, state = layers()
    for times in steps:
        step(times)
    expected = bits(state)
    usual, large = (max(peaks_of(layers()[0], None, [1, 1, times])[0]) for times in (1, 6))
    budget = usual * 9 // 4
    assert budget < large * 3 // 4
    step, state = layers()
    with dtrrun.budget(budget) as session:
        for times in steps[:20]:
            step(times)
        assert session.ledger.counting
        for times in steps[20:]:
            step(times)
        report = session.report()
        assert not session.ledger.counting
        assert report["evictions"] > 0
        assert report["peak_bytes"] <= budget
        assert_same(expected, bits(state), "inside")


def evicted_at_every_moment(make):
    """Return what `make` makes in a session whose first steps are only counted, if all is evicted then."""
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with dtrrun.budget(None, over_budget="evict") as session:
        parts = make()
        made = [next(parts)]
        for _ in range(3):
            (weight * 2).sum().backward()
            optimizer.step()
        assert session.ledger.counting
        made.append(next(parts))
        assert session.ledger.counting
        session.set_budget(1)
        made += parts
        return bits(made)


def test_what_native_code_reads_stays_when_counting_ends_meanwhile():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            assert session.ledger.counting
            assert not any(session.ledger.version_of(one.untyped_storage()).locks for one in tensors)
            session.set_budget(1)
            _ = torch.ones(5) + 1
            assert not session.ledger.counting
            versions = [session.ledger.version_of(one.untyped_storage()) for one in tensors]
            assert all(one is None or one.resident for one in versions)
            return tensors[0] + tensors[1]

    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with dtrrun.budget(None, over_budget="evict") as session:
        with_recipe = torch.ones(1000) * 2
        for _ in range(4):
            (weight * 2).sum().backward()
            optimizer.step()
        torch.ones(1000) * 2
        known = torch.ones(1000) + 2
        assert Reads.apply(with_recipe, known).sum() == 5000


def test_recipes_do_not_outlive_changes_that_are_only_counted():
    def make():
        x = torch.ones(8, 8)
        x.mul_(2)  # a constant from now on
        y = x + 1
        yield y
        x.mul_(3)
        yield x
        yield y * 2

    assert_same(bits(list(make())), evicted_at_every_moment(make), "evicted")


def test_what_was_filled_meanwhile_is_not_blank():
    """Kernels of the compiler fill new memory in parts, one of them while operators are only counted."""

    def make():
        y = torch.ones(2, 64)
        for _ in range(2):
            y[0].copy_(y[1])  # the first call of an operator is new
        yield y
        x = torch.empty_strided((2, 64), (64, 1))  # a new one, too: handled in full
        x[0].copy_(y[0])
        yield y
        getattr(torch.ops, KERNELS).fill_second(y[0] * 2, x)
        yield x + 1
        yield x

    def fill_second(x, out):
        out[1].copy_(x)

    with torch.library._scoped_library(KERNELS, "FRAGMENT") as library:
        library.define("fill_second(Tensor x, Tensor(a!) out) -> ()")
        library.impl("fill_second", fill_second, "CPU")
        assert_same(bits(list(make())), evicted_at_every_moment(make), "evicted")


def test_what_was_counted_is_named_when_the_budget_is_too_small():
    step, _ = training()
    with dtrrun.budget("40MB") as session:
        for _ in range(4):
            step()
        assert session.ledger.counting
        kept = [torch.ones(1 << 18) * one for one in range(8)]  # 8 MB, a fifth
        assert session.ledger.counting
        with pytest.raises(dtrrun.BudgetError, match=r"only counted +8\.\d+ MB"):
            kept += [torch.full((1 << 18,), 2.0).numpy() for _ in range(40)]


@pytest.mark.parametrize("random", [False, True])
def test_an_operator_that_there_is_no_room_for_is_refused_before_it_has_run(random):
    step, _ = training()
    make = torch.randn if random else torch.ones
    with dtrrun.budget("40MB") as session:
        for _ in range(4):
            step()
            make(8, 8)  # a call of an operator that is new is never counted
        assert session.ledger.counting
        with pytest.raises(dtrrun.BudgetError):
            make(5000, 5000)
        assert session.report()["peak_bytes"] < 10_000_000
        assert make(2000, 3000).sum() != 0  # 24 MB: more than a quarter, so counting has ended
        assert not session.ledger.counting
        assert 24_000_000 < session.report()["peak_bytes"] <= 40_000_000


@contextmanager
def kernel_in_python(when_stopped):
    """Context: `mm` has a kernel in Python, registered by PyTorch, which calls the former one.

    when_stopped: called if that raises an error, in place of which its result is returned.
    """
    registry = pytest.importorskip("torch._native.registry")
    if not hasattr(registry, "_install_aten_override"):
        pytest.skip("registers kernels in Python in another way")
    former = torch.library.get_kernel("aten::mm", "CPU")

    def kernel(keys, x, y):
        try:
            return former.call_boxed(keys, x, y)
        except Exception:
            return when_stopped(x, y)

    registry._install_aten_override("mm", "CPU", kernel)
    try:
        yield
    finally:
        registry._destroy_aten_override("mm", "CPU")


def product_in_python(when_stopped):
    """Return what is made, 24 MB, by a kernel in Python that is only counted, and so is stopped."""
    small, tall, wide = torch.ones(4, 4), torch.ones(2000, 4), torch.ones(4, 3000)
    stopped = []

    def note(x, y):
        stopped.append(session.ledger.counting)
        return when_stopped()

    step, _ = training()
    with kernel_in_python(note), dtrrun.budget("40MB") as session:
        for _ in range(4):
            step()
            small @ small
        tall.sum(), wide.sum()  # what is new to the session is never counted
        assert session.ledger.counting
        try:
            return tall @ wide
        finally:
            assert stopped == [True]
            assert (tall @ wide == 4).all()  # counting has ended before, or does now


def raise_another():
    raise LookupError("not what was raised")


@pytest.mark.parametrize("when_stopped", [raise_another, lambda: torch.zeros(()).expand(2000, 3000)])
def test_a_kernel_is_recognised_as_stopped_whatever_it_makes_of_that(when_stopped):
    made = product_in_python(when_stopped)
    assert made.shape == (2000, 3000)
    assert (made == 4).all()


def test_an_interrupt_is_not_lost_in_a_kernel_that_has_been_stopped():
    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        product_in_python(interrupt)


def test_a_kernel_that_is_stopped_warns_once():
    bounds, tall = torch.arange(4.0, dtype=torch.double), torch.ones(1, 2000, dtype=torch.double)
    step, _ = training()
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with dtrrun.budget("40MB") as session, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(4):
                step()
                torch.searchsorted(bounds, bounds, out_int32=True)
            assert session.ledger.counting
            del told[:]
            torch.searchsorted(bounds, tall.expand(4, 2000), out_int32=True)
            assert len(told) == 1
            assert session.ledger.counting
            # 6 MB of results, and then, after the warning, a copy of 12 MB.
            torch.searchsorted(bounds, tall.expand(750, 2000), out_int32=True)
            assert len(told) == 2
    finally:
        torch.set_warn_always(before)


def test_two_threads_are_counted_at_once():
    together = threading.Barrier(2)

    def work(net, x):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        together.wait()
        for _ in range(50):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    def nets():
        torch.manual_seed(0)
        return [
            (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(16, 8)) for _ in range(2)
        ]

    def run(work_all):
        both = nets()
        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(work_all, *one) for one in both]:
                done.result()
        return bits([net.state_dict() for net, _ in both])

    plain = run(work)
    with dtrrun.budget("1GB") as session:
        found = run(work)
        assert session.ledger.counting
        steps = list(session.steps.latest)
        assert [step["index"] for step in steps] == list(range(101 - len(steps), 101))
        assert all(step["peak_bytes"] for step in steps)
        assert session.report()["peak_bytes"] < 100_000
    assert_same(plain, found, "in two threads")


def test_a_later_session_counts_what_an_earlier_one_has_counted():
    step, _ = training()
    data = []
    with dtrrun.budget(None):
        for _ in range(4):
            step()
        data.append(torch.ones(1 << 20) + 1)  # 4 MB, counted
        data.append(torch.ones(1 << 20))
        data[1] += data[0]
    with dtrrun.budget(None) as session:
        for _ in range(4):
            step()
            torch.ones(8) + 1
        assert session.ledger.counting
        before = session.report()["peak_bytes"]
        total = [(one + 1)[-1].item() for one in data]
        assert session.ledger.counting
        assert session.report()["peak_bytes"] >= (12 << 20)  # both, and a sum
        assert before < (4 << 20)
        data.clear()
        session.ledger.collect_dead()
        assert session.ledger.resident_bytes < before
    assert total == [3, 4]


def linear(x, weight):
    return torch.relu(F.linear(x, weight)).square().mean()


def in_double(x, weight):
    torch.set_default_dtype(torch.float64)
    try:
        return (linear(x, weight) * torch.rand(()) + torch.ones(())).to(torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under(context):
    def run(x, weight):
        with context():
            return linear(x, weight).float()

    return run


CONTEXTS = {
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16)),
    "a mode": under(Mode),
    "a device": under(lambda: torch.device("cpu")),
    "double": in_double,
    "checkpoint": lambda x, weight: checkpoint(linear, x, weight, use_reentrant=False),
    "vmap": lambda x, weight: torch.vmap(lambda row: torch.tanh(weight @ row))(x).mean(),
    "a generator": lambda x, w: linear(
        x + torch.rand(x.shape, generator=torch.Generator().manual_seed(3)), w
    ),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("size", [None, "1GB"])
def test_contexts_of_the_program(context, size, monkeypatch):
    def make():
        torch.manual_seed(0)
        weight = torch.randn(64, 64, requires_grad=True)
        optimizer = torch.optim.Adam([weight])

        def step(_times):
            optimizer.zero_grad()
            CONTEXTS[context](torch.randn(32, 64), weight).backward()
            optimizer.step()
            with torch.inference_mode():
                linear(torch.randn(32, 64), weight).item()

        return step, [weight, optimizer]

    check_counted(make, size, monkeypatch)


def test_less_is_ample_once_memory_outside_of_tensors_has_been_taken():
    step, _ = training()
    with dtrrun.budget("40MB") as session:
        for _ in range(4):
            step()
        kept = [torch.ones(1 << 16) * 2 for _ in range(34)]  # 8.9 MB
        outside = torch.UntypedStorage(30_500_000)
        taken = outside.nbytes()
        assert session.ledger.counting
        session.ledger.step_peak_bytes = 0
        with pytest.raises(dtrrun.BudgetError):
            kept.extend(torch.ones(1 << 16) * 2 for _ in range(8))  # 2.1 MB
        session.ledger.collect_dead()
        assert session.ledger.step_peak_bytes + taken <= 40_000_000
