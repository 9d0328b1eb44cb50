"""PyTorch computes some things in another way when any dispatch mode is on: the program must not see that."""

from __future__ import annotations

import pytest
import torch
from programs import check, check_stress, plain, run_inside

import dtrrun


def gradients_of(function, *shape, kept=4, **made):
    """Losses of `function` on activations, and the gradients of a leaf behind them."""

    def program():
        x = (torch.rand(*shape, **made) - 0.5).requires_grad_()
        losses = []
        for _ in range(kept):
            hidden = torch.tanh(x * 1.5)
            losses.append(function(hidden).abs().sum())
        (gradient,) = torch.autograd.grad(sum(losses), [x], create_graph=True)
        again = torch.autograd.grad(gradient.abs().sum(), [x])
        return losses, gradient, again

    return program


FORMULAS = {
    "prod": lambda x: x.prod(),
    "prod of a dimension": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(0),
    "masked_fill": lambda x: x.masked_fill(x > 0, x.detach().sum()) * x.masked_fill(x > 0, x.sum()),
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x)[1],
    "eigh": lambda x: torch.linalg.eigh(x + x.mT)[0],
    "eig": lambda x: torch.linalg.eig(x)[0],
    "ormqr": lambda x: torch.ormqr(x[:2, :2], x[0, :2], x[:2, :2]),
    "vander": lambda x: torch.linalg.vander(x),
    "max": lambda x: x.max() - 2,  # a negative gradient, and zeros, which have a sign, too
    "min": lambda x: x.min() - 2,
    "median": lambda x: x.median() - 2,
    "nanmedian": lambda x: x.nanmedian() - 2,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_gradient_formulas_that_ask_for_modes(name):
    check_stress(gradients_of(FORMULAS[name], 7, 7, kept=2))


@pytest.mark.parametrize("name", ["prod", "cumprod", "masked_fill"])
def test_and_within_a_budget(name):
    check(gradients_of(FORMULAS[name], 64, 64))


def test_such_a_gradient_raises_what_it_raises_without_a_mode():
    def program():
        x = torch.rand(4, 4, dtype=torch.complex64, requires_grad=True)
        vectors = torch.linalg.eigh(torch.tanh(x) + torch.tanh(x).mH)[1]
        try:
            vectors.imag.sum().backward()
        except RuntimeError as error:
            told = str(error)
        rows = [torch.sin(x.detach().real * step) for step in range(4)]  # the session is usable afterwards
        return told, torch.stack(rows).sum(0), x.grad

    check_stress(program)


def test_a_mode_of_the_programs_own_is_left_alone():
    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    inner = gradients_of(FORMULAS["prod"], 7, 7)

    def program():
        with Counting() as mode:
            found = inner()
        return found, mode.seen > 50

    check_stress(program)


def complex_values(function):
    def program():
        x = torch.rand(6, 6, dtype=torch.complex64).requires_grad_()
        kept = [function(torch.tanh(x * step)) for step in range(1, 5)]
        sum(one.abs().sum() for one in kept).backward()
        return kept, x.grad

    return program


@pytest.mark.parametrize(
    "function",
    [
        torch.linalg.pinv,
        lambda x: torch.linalg.lstsq(x, x.mH, driver="gels").solution,
        lambda x: (x.mH @ x).conj() * x.conj(),
        lambda x: torch.linalg.svdvals(x.mH),
        lambda x: torch.view_as_real(x.conj().resolve_conj()).sum(-1) * x.conj().imag,
    ],
)
def test_conjugates_that_kernels_make_inside(function):
    check_stress(complex_values(function))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x, out: torch.linalg.matrix_rank(x, out=out), torch.int64),
        (lambda x, out: torch.linalg.cond(x, out=out), torch.float32),
        (lambda x, out: torch.linalg.matrix_norm(x, "nuc", out=out), torch.float32),
        (lambda x, out: torch.norm(x, "nuc", out=out), torch.float32),
    ],
)
def test_out_of_composites_that_ask_for_modes(function, dtype):
    def program():
        first = torch.tanh(torch.rand(5, 5))
        out = torch.zeros((), dtype=dtype)
        kept = []
        for step in range(1, 4):
            function(first * step, out=out)
            kept.append(out * 2)
        return kept, out, first

    check_stress(program)


@pytest.mark.parametrize(
    "operator", [torch.ops.aten.native_batch_norm, torch.ops.aten._native_batch_norm_legit]
)
def test_running_statistics_of_a_batch_norm_into_buffers_are_updated_once(operator):
    def program():
        x = torch.rand(8, 4, 5)
        means, variances = torch.zeros(4) * 1, torch.ones(4) * 1
        kept = []
        for step in range(3):
            buffers = [torch.zeros(8, 4, 5) * 1, torch.zeros(4) * 1, torch.zeros(4) * 1]
            operator.out(
                torch.sin(x + step), None, None, means, variances, True, 0.1, 1e-5,
                out=buffers[0], save_mean=buffers[1], save_invstd=buffers[2],
            )  # fmt: skip
            kept.append(buffers)
        return kept, means, variances

    check_stress(program)


def test_what_was_made_from_a_small_constant_can_be_evicted():
    def program():
        rows = [torch.zeros(1000) + torch.tensor([step], dtype=torch.float32) for step in range(8)]
        return [torch.sin(row) for row in rows], rows

    expected = plain(program)
    found, report = run_inside(program, 1, over_budget="warn")
    assert found == expected
    assert "input lost" not in [entry["reason"] for entry in report["pinned"]]


def test_small_constants_are_let_go_of_at_the_end():
    import weakref

    with dtrrun.budget(1 << 20) as session:
        constant = torch.tensor([1.0])
        torch.sin(constant)
        storage = weakref.ref(torch._C.TensorBase.untyped_storage(constant))
        del constant
        assert storage() is not None
        assert session.ledger.small_constants
    assert storage() is None


OUT_OF_RANGE = {
    "more than 1": [0.5, 1.5],
    "less than 0": [-0.5, 0.5],
    "no number": [float("nan"), 0.5],
    "two dimensions": [[-0.5, 1.5]],
}


@pytest.mark.parametrize("points", OUT_OF_RANGE)
def test_quantiles_refuse_what_they_refuse_without_a_mode(points):
    def program():
        x = (torch.rand(3, 7) - 0.5).requires_grad_()
        found = [torch.quantile(torch.tanh(x), torch.rand(2), dim=1)]
        for function in (torch.quantile, torch.nanquantile):
            for out in (None, torch.zeros(2, 3)):
                with torch.set_grad_enabled(out is None):
                    try:
                        found.append(
                            function(torch.tanh(x), torch.tensor(OUT_OF_RANGE[points]) * 1, 1, out=out)
                        )
                    except RuntimeError as error:
                        found.append(str(error))
                found.append(out)
        return found

    check_stress(program)


COMPOSITES = {
    "mH": lambda x: x.mH,
    "reshape": lambda x: x.reshape(24, 6),
    "reshape that copies": lambda x: x.t().reshape(24, 6),
    "flatten": lambda x: x.flatten(),
    "chunk": lambda x: x.chunk(3)[1],
    "narrow": lambda x: x.narrow(0, 2, 3),
    "mT of a chunk": lambda x: x.chunk(2, 1)[0].mT,
    "unsafe_split": lambda x: x.unsafe_split(5)[1],
    "unsafe_split_with_sizes": lambda x: x.unsafe_split_with_sizes([4, 8], 1)[1],
    "unsafe_chunk": lambda x: x.unsafe_chunk(3)[1],
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_views_of_composites_in_inference_mode_are_views_for_autograd(name):
    def program():
        leaf = torch.randn(12, 12, requires_grad=True)
        found = []
        for x in (leaf, leaf * 2):
            with torch.inference_mode():
                y = COMPOSITES[name](x)
            found += [y.requires_grad, y.is_inference(), y._is_view(), y.detach() * 2]
        return found, [torch.sin(leaf.detach() * step) for step in range(4)]

    check_stress(program)
