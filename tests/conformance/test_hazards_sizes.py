"""Operators' memory is known before they run, and all of it is counted."""

from contextlib import nullcontext

import pytest
import torch
from programs import check_stress

import dtrrun

KB = 1000
N = 250 * KB  # floats: one megabyte


def own():
    return torch.Generator().manual_seed(1)


FACTORIES = {
    "randn": lambda: torch.randn(N, generator=own()),
    "rand": lambda: torch.rand(N, generator=own()),
    "randint": lambda: torch.randint(9, (N // 2,), generator=own()),
    "randint, low": lambda: torch.randint(2, 9, (N // 2,), generator=own()),
    "randperm": lambda: torch.randperm(N // 2, generator=own()),
    "normal": lambda: torch.normal(0.0, 1.0, (N,), generator=own()),
    "multinomial": lambda: torch.multinomial(torch.ones(4), N // 2, True, generator=own()),
    "rand, device": lambda: torch.rand(N, generator=own(), device="cpu"),
    "rand, dtype": lambda: torch.rand(N // 2, generator=own(), dtype=torch.float64),
    "rand, out=": lambda: torch.rand(N, generator=own(), out=torch.empty(0)),
    "randperm, out=": lambda: torch.randperm(N // 2, generator=own(), out=torch.empty(0, dtype=torch.int64)),
    "randint, out=": lambda: torch.randint(9, (N // 2,), generator=own(), out=torch.arange(0)),
    "normal_": lambda: torch.empty(N).normal_(generator=own()),
    "arange": lambda: torch.arange(0.0, N),
    "linspace": lambda: torch.linspace(0, 1, N),
    "eye": lambda: torch.eye(500),
    "full": lambda: torch.full((N,), 3.0),
    "tril_indices": lambda: torch.tril_indices(354, 354),
    "hann_window": lambda: torch.hann_window(N),
}  # fmt: skip


@pytest.mark.parametrize("inside", ["nothing", "device", "inference"])
@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_is_made_room_for(name, inside):
    budget = 3_600 * KB
    contexts = {"nothing": nullcontext(), "device": torch.device("cpu"), "inference": torch.inference_mode()}
    with dtrrun.budget(budget) as session, contexts[inside]:
        kept = [torch.full((N,), step + 0.5) for step in range(3)]
        made = FACTORIES[name]()
        report = session.report()
        assert report["peak_bytes"] <= budget
        assert report["evictions"] >= 1
        assert len(made) > 1
    assert [tensor[7].item() for tensor in kept] == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_that_does_not_fit_does_not_run(name):
    with dtrrun.budget(600 * KB) as session:
        with pytest.raises(dtrrun.BudgetError):
            FACTORIES[name]()
        assert session.report()["peak_bytes"] <= 600 * KB


def test_how_long_a_range_is_depends_on_numbers():
    with dtrrun.budget(1200 * KB) as session:
        kept = [torch.full((N // 2,), 1.5), torch.arange(0.0, 10.0)]
        kept.append(torch.arange(0.0, float(N - 1000)))
        assert session.report()["peak_bytes"] <= 1200 * KB


@pytest.mark.parametrize("others", [2, 0])
def test_how_much_numbers_take_depends_on_the_default_dtype(others):
    """others: number of earlier calls of the same kind."""
    with dtrrun.budget(3_300 * KB) as session:
        integers = torch.full((N,), 7, dtype=torch.int32)
        for _ in range(others):
            integers / 2
        kept = [torch.full((N,), 1.5)]
        torch.set_default_dtype(torch.float64)
        try:
            kept.append(integers / 2)
        finally:
            torch.set_default_dtype(torch.float32)
        assert kept[-1].dtype == torch.float64
        assert session.report()["peak_bytes"] <= 3_300 * KB
        assert session.report()["evictions"] == 1


def test_a_tensor_without_dimensions_decides_less_on_a_type():
    """Knowledge from first calls with such a tensor does not apply to first calls with a vector."""
    with dtrrun.budget(3_200 * KB, cost="model") as session:
        halves = torch.full((N,), 1.5, dtype=torch.float16)
        number, vector = torch.tensor(2.0, dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
        for size in (3, 4):
            assert (halves[:size] * number).dtype == torch.float16
        kept = [torch.full((N,), 2.0)]
        kept.append(halves * vector)
        assert kept[-1].dtype == torch.float64
        assert session.report()["peak_bytes"] <= 3_200 * KB
        assert session.report()["evictions"] == 1


READS = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[1]),
    "bool": lambda x: bool(x[2]),
    "int": lambda x: int(x[3]),
    "index": lambda x: [1, 2][x[0].int()],
    "tolist": lambda x: x[:1].tolist(),
    "equal": lambda x: torch.equal(x, x),
    "is_nonzero": lambda x: torch.is_nonzero(x[0]),
    "is_same_size": lambda x: torch.is_same_size(x, x),
    "is_set_to": lambda x: x.is_set_to(x),
    "format": lambda x: f"{x[0]:.3f}",
}


@pytest.mark.parametrize("name", READS)
def test_what_makes_no_tensor_needs_no_room(name):
    with dtrrun.budget(2_100 * KB) as session:
        kept = [torch.full((N,), step * 1.0) for step in range(2)]
        READS[name](kept[0])
        assert session.report()["evictions"] == 0


@pytest.fixture
def unknown():
    """An operator whose output shapes PyTorch cannot predict."""
    with torch.library._scoped_library("dtrrun_test_sizes", "DEF") as library:
        library.define("first(Tensor x) -> Tensor")
        library.define("most(Tensor x) -> (Tensor, Tensor)")
        library.impl("first", lambda x: x[:1] + 1, "CPU")
        library.impl("most", lambda x: (x[:1] + 1, x + 1), "CPU")
        yield torch.ops.dtrrun_test_sizes


def test_a_guess_that_was_too_high_is_lowered(unknown):
    with dtrrun.budget(3_200 * KB) as session:
        x = torch.full((N,), 1.0)
        unknown.first(x)  # at most a megabyte, as far as is known
        kept = [torch.full((N,), 2.0), torch.full((N,), 3.0)]
        assert session.report()["evictions"] == 0
        for _ in range(5):
            unknown.first(x)
        assert session.report()["evictions"] == 0
    assert kept[0][0].item() == 2


def test_a_guess_that_was_too_low_is_raised(unknown):
    with dtrrun.budget(3_200 * KB) as session:
        x = torch.full((N,), 1.0)
        unknown.most(x)
        kept = [torch.full((N,), 2.0), torch.full((N,), 3.0)]
        unknown.most(x)
        assert session.report()["evictions"] >= 1
        assert session.report()["peak_bytes"] <= 3_200 * KB
    assert kept[0][0].item() == 2


def square():
    return torch.eye(500)


def test_what_is_made_beside_what_is_written():
    """The operator writes to the running statistics, and also makes a new tensor."""
    with dtrrun.budget(5_200 * KB) as session:
        kept = [torch.full((N,), step + 0.5) for step in range(4)]
        x, statistics = torch.ones(N // 10, 10), (torch.zeros(10), torch.ones(10))
        made = torch.ops.aten._batch_norm_with_update(x, None, None, *statistics, 0.1, 1e-5)[0]
        assert session.report()["peak_bytes"] <= 5_200 * KB
    assert len(made)
    assert [tensor[7].item() for tensor in kept] == [0.5, 1.5, 2.5, 3.5]


FEW = {
    "nll_loss": lambda x: torch.nn.functional.nll_loss(x.view(-1, 10), torch.zeros(N // 10).long()),
    "index": lambda x: x[torch.arange(9)],
    "huber_loss": lambda x: torch.nn.functional.huber_loss(x, x),
}


@pytest.mark.parametrize("name", FEW)
def test_small_results_of_large_inputs_need_little_room(name):
    with dtrrun.budget(2_500 * KB) as session:
        kept = [torch.full((N,), step * 1.0) for step in range(2)]
        FEW[name](kept[0])
        assert session.report()["evictions"] == 0


UNPLAIN = {
    "coo": lambda: torch.ones(50_000).view(500, 100).to_sparse_coo().clone(),
    "csr": lambda: (square() + 1).to_sparse_csr(),
    "csc": lambda: (square() + 1).to_sparse_csc(),
    "bsr": lambda: (square() + 1).to_sparse_bsr(10),
    "bsc": lambda: (square() + 1).to_sparse_bsc(10),
    "mkldnn": lambda: square().to_mkldnn(),
}  # fmt: skip
TAKE = {"coo": 1_000, "csr": 5_002, "csc": 5_002, "bsr": 1_020, "bsc": 1_020, "mkldnn": 1_000}  # kB


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", UNPLAIN)
def test_tensors_without_plain_storage_are_counted(name):
    if name == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this PyTorch has no oneDNN")
    before = UNPLAIN[name]()
    with dtrrun.budget(None) as session:
        kept = [UNPLAIN[name]() for _ in range(4)]
        known = session.report()["resident_bytes"]
        assert known == pytest.approx(4 * TAKE[name] * KB, rel=0.05)
        views = [one.detach() for one in kept]
        assert session.report()["resident_bytes"] == known
        before.to_dense().sum()
        assert session.report()["resident_bytes"] == pytest.approx(5 * TAKE[name] * KB, rel=0.05)
        assert session.dtr.eviction.pinned_by_reason()["no plain storage"] > 3 * TAKE[name] * KB
        del kept, views, before
        torch.ones(1).add(1)
        assert session.report()["resident_bytes"] < 10 * KB


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", UNPLAIN)
def test_a_budget_that_they_do_not_fit_in(name):
    with dtrrun.budget(6 * TAKE[name] * KB):
        kept = []
        with pytest.raises(dtrrun.BudgetError, match="no plain storage"):
            kept += [UNPLAIN[name]() for _ in range(8)]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_plain_tensors_make_room_for_them():
    def program():
        x = torch.eye(64) + 0.5
        kept = [x * step for step in range(4)]
        kept += [torch.sparse.mm(x.to_sparse(), x), (x * 2).to_sparse_csr().to_dense()]
        return kept

    check_stress(program)


def test_an_lstm_without_gradients_has_no_workspace():
    """It used to require room for one before its first call: 17 times its results."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch has no oneDNN here")
    layer, x = torch.nn.LSTM(32, 64), torch.randn(64, 100, 32)
    budget = 6 * 64 * 100 * 64 * 4
    with dtrrun.budget(budget) as session, torch.no_grad():
        layer(x)
        assert session.report()["peak_bytes"] <= budget
    with pytest.raises(dtrrun.BudgetError), dtrrun.budget(budget):
        layer(x)


def test_an_operator_in_place_enlarges_what_it_writes_to():
    """`addbmm_` does so if its target must be expanded. Known calls take what they took before."""

    def program():
        first, second = torch.randn(5, 5, 5), torch.randn(5, 5, 10)
        kept = []
        for step in range(3):
            total = torch.ones(1) + step
            kept += [total.addbmm_(first, second), total * 2]
            torch.randn(64).exp()
        return kept

    check_stress(program)
