"""Functions made of several operators that PyTorch's operator database lacks, or has in few forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Made = tuple[Callable[..., Any], list[torch.Tensor]]
"""A function, and the tensors that it takes; modules have their own parameters."""


def _float(*sizes: int) -> torch.Tensor:
    return torch.randn(sizes)


def _of(function: Callable[..., Any], *sizes: tuple[int, ...], **options: Any) -> Made:
    return partial(function, **options), [_float(*size) for size in sizes]


def _module(make: Callable[..., nn.Module], sizes: list[tuple[int, ...]], *args: Any, **options: Any) -> Made:
    return make(*args, **options), [_float(*size) for size in sizes]


def _definite(function: Callable[..., Any], **options: Any) -> Made:
    x = _float(6, 6)
    return partial(function, **options), [x @ x.mT + torch.eye(6)]


def _attention(x: torch.Tensor, module: nn.Module) -> Any:
    return module(x, x, x)


def _self_attention() -> Made:
    return partial(_attention, module=nn.MultiheadAttention(8, 2, batch_first=True)), [_float(3, 5, 8)]


def _encoder_layer(train: bool) -> Made:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return layer.train(train), [_float(3, 5, 8)]


def _packed(x: torch.Tensor, lstm: nn.Module) -> Any:
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([2, 2, 1]), batch_first=True)
    result, state = lstm(packed)
    return nn.utils.rnn.pad_packed_sequence(result, batch_first=True), state


def _drawn(function: Callable[..., Any], *args: Any) -> Any:
    """Draw twice from a generator passed by position: the second draw shows whether it advanced."""
    generator = torch.Generator().manual_seed(3)
    first = function(*args, generator)
    return [first, function(*args, generator), generator.get_state()]


def _draws(function: Callable[..., Any], *args: torch.Tensor) -> Made:
    return partial(_drawn, function), [arg.abs().clamp(0.1, 0.9) for arg in args]


COMPOSITES: dict[str, Callable[[], Made]] = {
    "nn.GRU": lambda: _module(nn.GRU, [(2, 3, 8)], 8, 8),
    "nn.GRU bidirectional": lambda: _module(nn.GRU, [(2, 3, 4)], 4, 4, bidirectional=True),
    "nn.LSTM": lambda: _module(nn.LSTM, [(2, 3, 8)], 8, 8),
    "nn.LSTM projected": lambda: _module(nn.LSTM, [(2, 3, 8)], 8, 8, proj_size=4),
    "nn.LSTM packed": lambda: (partial(_packed, lstm=nn.LSTM(8, 8, batch_first=True)), [_float(3, 2, 8)]),
    "nn.RNN": lambda: _module(nn.RNN, [(2, 3, 8)], 8, 8),
    "nn.RNN relu": lambda: _module(nn.RNN, [(2, 3, 8)], 8, 8, nonlinearity="relu"),
    "nn.LSTMCell": lambda: _module(nn.LSTMCell, [(3, 8)], 8, 8),
    "nn.GRUCell": lambda: _module(nn.GRUCell, [(3, 8)], 8, 8),
    "nn.RNNCell": lambda: _module(nn.RNNCell, [(3, 8)], 8, 8),
    "nn.Bilinear": lambda: _module(nn.Bilinear, [(3, 8), (3, 6)], 8, 6, 4),
    "nn.MultiheadAttention": _self_attention,
    "nn.MultiheadAttention eval": lambda: (
        partial(_attention, module=nn.MultiheadAttention(8, 2, batch_first=True).eval()),
        [_float(3, 5, 8)],
    ),
    "nn.TransformerEncoderLayer": lambda: _encoder_layer(True),
    "nn.TransformerEncoderLayer eval": lambda: _encoder_layer(False),
    "nn.TransformerEncoder eval": lambda: (
        nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
        ).eval(),
        [_float(3, 5, 8)],
    ),
    "nn.TransformerDecoderLayer": lambda: _module(
        nn.TransformerDecoderLayer, [(3, 5, 8), (3, 4, 8)], 8, 2, 16, dropout=0.0, batch_first=True
    ),
    "nn.Linear": lambda: _module(nn.Linear, [(3, 8)], 8, 6),
    "nn.Conv2d": lambda: _module(nn.Conv2d, [(2, 3, 8, 8)], 3, 4, 3, padding=1),
    "nn.Conv2d same": lambda: _module(nn.Conv2d, [(2, 3, 8, 8)], 3, 4, 3, padding="same"),
    "nn.ConvTranspose2d": lambda: _module(nn.ConvTranspose2d, [(2, 3, 8, 8)], 3, 4, 3, stride=2),
    "nn.BatchNorm2d": lambda: _module(nn.BatchNorm2d, [(2, 3, 8, 8)], 3),
    "nn.InstanceNorm2d": lambda: _module(nn.InstanceNorm2d, [(2, 3, 8, 8)], 3, affine=True),
    "nn.GroupNorm": lambda: _module(nn.GroupNorm, [(2, 4, 8, 8)], 2, 4),
    "nn.LayerNorm": lambda: _module(nn.LayerNorm, [(3, 8)], 8),
    "nn.RMSNorm": lambda: _module(nn.RMSNorm, [(3, 8)], 8),
    "nn.Dropout": lambda: _module(nn.Dropout, [(3, 8)], 0.5),
    "nn.PReLU": lambda: _module(nn.PReLU, [(3, 8)], 8),
    "F.interpolate bicubic": lambda: _of(
        F.interpolate, (2, 3, 7, 7), scale_factor=1.7, mode="bicubic", align_corners=False
    ),
    "F.interpolate bicubic antialias": lambda: _of(
        F.interpolate, (2, 3, 7, 7), size=(5, 4), mode="bicubic", antialias=True
    ),
    "F.interpolate bilinear": lambda: _of(F.interpolate, (2, 3, 7, 7), scale_factor=1.7, mode="bilinear"),
    "F.grid_sample": lambda: _of(F.grid_sample, (2, 3, 7, 7), (2, 5, 5, 2), align_corners=False),
    "F.cosine_similarity": lambda: _of(F.cosine_similarity, (5, 8), (5, 8)),
    "F.scaled_dot_product_attention causal": lambda: _of(
        F.scaled_dot_product_attention, (2, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8), is_causal=True
    ),
    "F.cross_entropy smoothed": lambda: _of(
        lambda x: F.cross_entropy(x, torch.arange(5) % 3, label_smoothing=0.1), (5, 3)
    ),
    "torch.stft": lambda: _of(
        lambda x: torch.stft(x, 16, window=torch.hann_window(16), return_complex=True).abs(), (2, 64)
    ),
    "torch.istft": lambda: _of(
        lambda x: torch.istft(
            torch.stft(x, 16, window=torch.ones(16), return_complex=True), 16, window=torch.ones(16)
        ),
        (2, 64),
    ),
    "torch.einsum": lambda: _of(lambda a, b: torch.einsum("ij,jk->ik", a, b), (4, 5), (5, 6)),
    "torch.einsum three": lambda: _of(
        lambda a, b, c: torch.einsum("bij,bjk,kl->bil", a, b, c), (2, 4, 5), (2, 5, 6), (6, 3)
    ),
    "torch.tensordot": lambda: _of(torch.tensordot, (4, 5, 3), (5, 3, 6), dims=2),
    "torch.matmul": lambda: _of(torch.matmul, (2, 1, 4, 5), (3, 5, 6)),
    "torch.matmul folded": lambda: _of(torch.matmul, (7, 4, 5), (5, 6)),
    "torch.inner": lambda: _of(torch.inner, (4, 5), (6, 5)),
    "torch.cov": lambda: _of(torch.cov, (4, 9)),
    "torch.corrcoef": lambda: _of(torch.corrcoef, (4, 9)),
    "torch.cdist": lambda: _of(torch.cdist, (4, 5), (6, 5)),
    "torch.cdist mm": lambda: _of(torch.cdist, (30, 5), (30, 5), compute_mode="use_mm_for_euclid_dist"),
    "torch.trapezoid": lambda: _of(torch.trapezoid, (4, 5)),
    "torch.meshgrid": lambda: _of(lambda a, b: torch.meshgrid(a, b, indexing="xy"), (4,), (5,)),
    "torch.combinations": lambda: _of(torch.combinations, (5,)),
    "torch.var_mean": lambda: _of(torch.var_mean, (4, 5), dim=1),
    "linalg.multi_dot": lambda: _of(lambda *all: torch.linalg.multi_dot(all), (4, 5), (5, 6), (6, 3)),
    "linalg.pinv": lambda: _of(torch.linalg.pinv, (5, 4)),
    "linalg.pinv hermitian": lambda: _definite(torch.linalg.pinv, hermitian=True),
    "linalg.svdvals": lambda: _of(torch.linalg.svdvals, (6, 4)),
    "torch.svd without vectors": lambda: _of(lambda x: torch.svd(x, compute_uv=False)[1], (6, 4)),
    "torch.svd": lambda: _of(lambda x: torch.svd(x)[1], (6, 4)),
    "linalg.eigvalsh": lambda: _definite(torch.linalg.eigvalsh),
    "linalg.eigvals": lambda: _of(torch.linalg.eigvals, (6, 6)),
    "linalg.cond": lambda: _of(torch.linalg.cond, (6, 6)),
    "linalg.cond nuclear": lambda: _of(torch.linalg.cond, (6, 6), p="nuc"),
    "linalg.matrix_norm 2": lambda: _of(torch.linalg.matrix_norm, (6, 4), ord=2),
    "linalg.matrix_norm nuclear": lambda: _of(torch.linalg.matrix_norm, (6, 4), ord="nuc"),
    "linalg.norm": lambda: _of(torch.linalg.norm, (6, 4), ord=2),
    "linalg.matrix_rank": lambda: _of(torch.linalg.matrix_rank, (6, 4)),
    "linalg.matrix_power": lambda: _of(lambda x: torch.linalg.matrix_power(x, 5), (5, 5)),
    "linalg.matrix_exp": lambda: _of(torch.linalg.matrix_exp, (5, 5)),
    "linalg.solve": lambda: _of(torch.linalg.solve, (5, 5), (5, 3)),
    "linalg.det": lambda: _of(torch.linalg.det, (5, 5)),
    "linalg.slogdet": lambda: _of(torch.linalg.slogdet, (5, 5)),
    "linalg.cholesky": lambda: _definite(torch.linalg.cholesky),
    "linalg.inv": lambda: _definite(torch.linalg.inv),
    "linalg.vander": lambda: _of(torch.linalg.vander, (5,)),
    "torch.poisson": lambda: _draws(torch.poisson, _float(4, 5)),
    "torch.bernoulli": lambda: _draws(_bernoulli, _float(4, 5)),
    "torch.binomial": lambda: _draws(torch.binomial, torch.full((4, 5), 9.0), _float(4, 5)),
    "torch.rand generator": lambda: _draws(lambda x, g: x + torch.rand(4, 5, generator=g), _float(4, 5)),
    "torch.normal generator": lambda: _draws(lambda x, g: torch.normal(x, x, generator=g), _float(4, 5)),
    "aten._standard_gamma": lambda: _draws(torch._standard_gamma, _float(4, 5)),
    "aten._sample_dirichlet": lambda: _draws(torch._sample_dirichlet, _float(4, 5)),
    "Tensor.normal_": lambda: _draws(
        lambda x, g: x.detach().clone().normal_(0.0, 1.0, generator=g), _float(4, 5)
    ),
    "factories": lambda: _of(_factories, (4, 5)),
    "scalars": lambda: _of(_scalars, (4, 5)),
    "indices": lambda: _of(_indices, (4, 5)),
}
"""By name, a function that makes the function and its inputs anew."""


def _bernoulli(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.bernoulli(x, generator=generator)


def _factories(x: torch.Tensor) -> Any:
    """Make tensors that take their dtype and device from the program's defaults."""
    made = [
        *(torch.ones(3), torch.zeros(3), torch.arange(5.0), torch.arange(5) / 3, torch.linspace(0, 1, 5)),
        *(torch.rand(4), torch.randn(4), torch.full((3,), 0.3), torch.eye(3), torch.scalar_tensor(0.1)),
        *(torch.tensor([0.1, 0.2]), torch.tensor(0.1), torch.as_tensor([0.1]), torch.asarray([0.1])),
        *(torch.hann_window(5), torch.logspace(0, 1, 4), torch.tril_indices(3, 3), torch.randperm(5)),
        *(x.new_tensor([0.1, 0.2]), x.new_ones(3), torch.complex(torch.ones(2), torch.ones(2))),
    ]
    return [[str(one.device), str(one.dtype)] for one in made], made, [(one + one) / 7 for one in made]


def _scalars(x: torch.Tensor) -> Any:
    """Use Python numbers, and tensors without dimensions, in type promotion."""
    whole = torch.arange(4, device="cpu")
    return [
        x * 0.1,
        x.double() * 0.1,
        whole * 0.1,
        whole / 3,
        whole.sum() / 7,
        x + whole[1],
        whole.float().mean(),
    ]


def _indices(x: torch.Tensor) -> Any:
    taken = torch.tensor([2, 0, 3], device="cpu")
    y = x.clone()
    y[taken] = 0.5
    y[:, 1] += 2.0
    y[x > 0] = 0.25
    return [
        x[taken],
        x[[0, 2]],
        x[x > 0],
        x[taken, 1:3],
        x.take_along_dim(taken[:, None], 0),
        y,
        torch.where(x > 0),
    ]
