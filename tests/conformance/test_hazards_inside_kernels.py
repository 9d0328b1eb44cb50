"""Hidden actions of kernels and composite operators: conjugates, views, running statistics."""

from __future__ import annotations

import pytest
import torch
from programs import check_stress


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
