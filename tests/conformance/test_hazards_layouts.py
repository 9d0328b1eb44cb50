"""Geometries, number types, lazy conjugates, sparse, quantized and nested tensors, subclasses."""

import pytest
import torch
from programs import check, check_stress, mlp
from torch import nn
from torch.nn import functional as F

import dtrrun


def test_geometries_and_types():
    def program():
        kept = []
        for step in range(3):
            x = torch.sin(torch.randn(2, 8, 8, 8) + step)
            last = x.to(memory_format=torch.channels_last)
            kept += [last, F.conv2d(last, torch.randn(4, 8, 3, 3)), last * 2, last.relu_()]
            wide = torch.sin(torch.arange(32.0))[:, None].expand(32, 64)
            kept += [wide, wide * 2, wide.sum(0), x[:, ::2, 1:5].transpose(1, 3), x.flip(1)[..., ::3] + 1]
            kept += [x.as_strided((4, 4), (3, 1), 5) * 2, torch.empty(0, 4).cos(), x[:, :0].sum(), x[:0] * 2]
            zero = x.mean()
            kept += [zero, zero + 1, zero.expand(4, 4), x.sum().add_(zero), zero.item()]
            integers = (x * 10).long()
            kept += [integers, integers % 3, (x > 0) & (x < 0.5), (x > 0).any(1), integers.to(torch.uint8)]
            kept += [
                x.half(),
                x.bfloat16() * 2,
                x.double().exp(),
                torch.cat([x, x.half()]),
                x.to(torch.float8_e4m3fn),
            ]
        return kept

    check(program)


def test_calls_that_differ_only_in_where_a_tensor_begins_or_in_its_type():
    def program():
        rows, kept = torch.arange(96.0).reshape(3, 32).sin(), []
        for _ in range(3):
            kept += [row.exp() for row in rows.unbind()]
            for dtype in (torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.int16):
                values = (rows[1] * 99).to(dtype)
                kept += [values, values.neg()]
        return kept

    check(program)


def test_complex_numbers_and_lazy_conjugates():
    def program():
        kept = []
        for step in range(3):
            z = torch.view_as_complex(torch.sin(torch.randn(32, 16, 2) + step))
            conjugate, imaginary = z.conj(), z.conj().imag  # a conjugate view, and a negative view of it
            kept += [z * 2, conjugate.clone(), conjugate @ z.T, imaginary.clone(), imaginary * 2, z.abs()]
            kept += [
                torch.mm(z.conj().T, z),
                torch.fft.ifft(torch.fft.fft(z)),
                imaginary.sum(),
                conjugate,
                imaginary,
            ]
            z.mul_(1j)
            conjugate.add_(1)
            imaginary.neg_()
            kept += [z, torch.resolve_conj(conjugate), torch.resolve_neg(imaginary), torch.stft(
                imaginary.reshape(-1), 64, return_complex=True, window=torch.hann_window(64))]  # fmt: skip
        return kept

    check(program)


def test_complex_numbers_and_lazy_bits_ask_nothing():
    with dtrrun.budget("1GB") as session:
        z = torch.randn(16, 16, dtype=torch.complex64)
        results = [z.conj() @ z, z.conj().imag, torch.fft.fft(z).conj().abs(), z.mH * 2j, z.conj().clone()]
        results.append(torch.stack([z.conj(), z]).sum())
        assert session.interposer.python_calls == {}
    assert torch.equal(results[0], torch.resolve_conj(z.conj()) @ z)


def test_conjugate_made_before_the_session():
    z = torch.randn(32, 32, dtype=torch.complex64)
    conjugate = z.conj()
    check_stress(lambda: [torch.mm(conjugate, z), torch.mm(conjugate + 0, z), torch.mm(z, conjugate) * 2])


def test_sparse_and_quantized():
    def program():
        kept = []
        for step in range(3):
            x = torch.relu(torch.sin(torch.randn(32, 32) + step))
            sparse = x.to_sparse()
            compressed = x.to_sparse_csr()
            built = torch.sparse_coo_tensor(torch.arange(32).repeat(2, 1), torch.cos(x[0]), (32, 32))
            kept += [
                sparse,
                compressed,
                built,
                sparse.to_dense() * 2,
                torch.sparse.mm(built, x),
                compressed @ x,
            ]
            kept += [
                sparse.coalesce().values() * 2,
                sparse.indices(),
                (sparse + built).to_dense(),
                sparse * 2,
            ]
            values = sparse.values()  # an alias of the sparse tensor's memory
            values.mul_(3)
            quantized = torch.quantize_per_tensor(x, 0.1, 2, torch.quint8)
            kept += [
                sparse.to_dense(),
                quantized,
                quantized.dequantize() * 2,
                torch.relu(quantized).int_repr() + 1,
            ]
            mkldnn = x.to_mkldnn()
            kept += [mkldnn.to_dense() * 2, torch.relu(mkldnn).to_dense()]
        return kept

    check_stress(program)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout):
    def program():
        kept = []
        for step in range(3):
            parts = [torch.sin(torch.randn(n, 16) + step) for n in (3, 7, 5)]
            nested = torch.nested.as_nested_tensor(parts, layout=layout)
            twice = (nested * 2).sin()
            padded = torch.nested.to_padded_tensor(twice, 0.0)
            kept += [padded, [part * 2 for part in twice.unbind()], parts, padded.sum()]
        return kept

    check_stress(program)


def test_what_a_jagged_nested_tensor_holds_is_recomputed():
    layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(3))

    def program():
        losses = []
        layers.zero_grad()
        for lengths in ((30, 7, 5), (4, 20)):
            nested = torch.nested.nested_tensor([torch.randn(n, 16) for n in lengths], layout=torch.jagged)
            for layer in layers:
                nested = nested + layer(F.layer_norm(nested, (16,)))
            losses.append(nested.values().square().mean() + torch.nested.to_padded_tensor(nested, 0.0).sum())
            losses[-1].backward()
        return losses, layers

    check(program)
    program()  # whose dummy stays for the process
    with dtrrun.budget(None) as session:
        program()
        assert not {row["reason"] for row in session.report()["pinned"]} & {"handed out", "not replayable"}


class Wrapped(torch.Tensor):
    """A wrapper subclass with its own dispatch."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=False)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(value):
            return value.inner if isinstance(value, cls) else value

        out = func(
            *torch.utils._pytree.tree_map(unwrap, args), **torch.utils._pytree.tree_map(unwrap, kwargs or {})
        )
        return torch.utils._pytree.tree_map(lambda v: cls(v) if isinstance(v, torch.Tensor) else v, out)


class Named(torch.Tensor):
    """A subclass without its own dispatch."""


def test_tensor_subclasses():
    def program():
        kept = []
        for step in range(4):
            wrapped = Wrapped(torch.sin(torch.randn(64, 32) + step))
            made = (wrapped * 2).exp()
            made.add_(1)
            named = torch.sin(torch.randn(64, 32)).as_subclass(Named)
            kept += [
                made.inner,
                (made @ made.t()).inner,
                wrapped.inner,
                (named * 2).exp(),
                named.add_(1).sum(),
            ]
        return kept

    check_stress(program)


class Asked(Wrapped):
    """Asked for its device, layout and sizes, too, by operators that the dispatcher does not know."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            dtype=inner.dtype,
            device=inner.device,
            dispatch_device=True,
            dispatch_layout=True,
            dispatch_sizes_strides_policy="sizes",
        )


def test_subclasses_that_are_asked_for_their_geometry():
    def program():
        kept = []
        for step in range(4):
            asked = Asked(torch.sin(torch.randn(64, 32) + step))
            made = (asked * 2).exp()
            kept += [made.inner, asked.inner, str(made.device), str(made.layout), list(made.shape)]
            kept += [made.dim(), made.numel(), made.is_contiguous(), made.stride(), made.storage_offset()]
        return kept

    check_stress(program)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    """Export traces with tensors that have no memory."""

    def program():
        model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
        x = torch.sin(torch.randn(64, 32))
        exported = torch.export.export(model, (x,), strict=strict)
        return [exported.module()(x), model(x), len(exported.graph.nodes), x * 2]

    check_stress(program)


def test_both_parts_of_a_sparse_tensor_stay_in_memory():
    """What was computed from one comes back before that one escapes, and must not displace the other."""

    def program():
        where = torch.arange(8).reshape(1, 8) * 1
        what = torch.randn(8, 64).sin()
        computed = [where.float() * k for k in range(40)]
        torch.randn(64, 64).exp()
        sparse = torch.sparse_coo_tensor(where, what, (8, 64), check_invariants=False)
        return sparse.clone(), sparse, computed

    check_stress(program)


def test_sparse_gradients_while_all_is_evicted():
    def program():
        table = nn.Embedding(16, 32, sparse=True)
        model = mlp(3)
        for _ in range(3):
            (model(torch.randn(64, 32)).sum() + table(torch.arange(4)).sum()).backward()
        return table.weight.grad, model

    check_stress(program)
