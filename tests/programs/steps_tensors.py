"""Steps without side effects: operators of all kinds, views, and tensors made from nothing."""

from __future__ import annotations

import torch
from torch.nn import functional

from tests.programs.language import PLACES, World, fit, matrix, step

MOST = 1 << 14  # elements: what `gram` makes of more would take gigabytes, after several of them


def gram(x: torch.Tensor) -> torch.Tensor:
    if x.numel() > MOST:
        x = x.reshape(-1)[:MOST]
    return matrix(x) @ matrix(x).t()


UNARY = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "neg": torch.neg,
    "abs": torch.abs,
    "square": torch.square,
    "gelu": functional.gelu,
    "dropout": lambda x: functional.dropout(x, 0.4),
    "softmax": lambda x: functional.softmax(x.reshape(-1), 0),
    "log_softmax": lambda x: functional.log_softmax(x.reshape(-1), 0),
    "cumsum": lambda x: x.reshape(-1).cumsum(0),
    "flip": lambda x: x.reshape(-1).flip(0),
    "roll": lambda x: x.roll(1),
    "clone": torch.clone,
    "contiguous": lambda x: x.contiguous(),
    "sum": torch.sum,
    "mean": torch.mean,
    "norm": lambda x: x.norm(),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "zeros_like": torch.zeros_like,
    "rand_like": torch.rand_like,
    "triu": lambda x: matrix(x).triu(),
    "outer": lambda x: torch.outer(x.reshape(-1)[:12], x.reshape(-1)[:12]),
    "gram": gram,
    "repeat": lambda x: x.reshape(-1)[:40].repeat(3),
    "pad": lambda x: functional.pad(matrix(x), (1, 1)),
    "fft": lambda x: torch.fft.fft(x.reshape(-1).float()),
}

BINARY = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(x > y, x, y * 2),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.1),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y, x], -1),
    "mse_loss": functional.mse_loss,
    "matmul": lambda x, y: (
        matrix(x).t() @ matrix(y)[: len(matrix(x))].sum(0, keepdim=True).expand_as(matrix(x))
    ),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", matrix(x)[:4], matrix(y)[:4]),
}


def overlapping(x: torch.Tensor) -> torch.Tensor:
    """Return a view within the tensor: the rest of its storage may never have been written."""
    if not x.is_contiguous() or x.numel() < 16:
        raise ValueError("too small")
    return x.as_strided((3, 4), (2, 3), x.storage_offset() + 1)


VIEWS = {
    "tail": lambda x: x[1:],
    "stride": lambda x: x[::2],
    "column": lambda x: x[..., 0],
    "columns": lambda x: x[..., 1::3],
    "transpose": lambda x: x.transpose(0, -1),
    "flat": lambda x: x.reshape(-1),
    "view": lambda x: x.view(-1, 2),
    "expand": lambda x: x[:1].expand(3, *x.shape[1:]),
    "as_strided": lambda x: overlapping(x),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "diagonal": lambda x: x.diagonal(),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.squeeze(),
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "select": lambda x: x[1],
    "empty": lambda x: x[:0],
    "split": lambda x: x.split(3)[1],
    "unbind": lambda x: x.unbind(-1)[0],
    "movedim": lambda x: x.movedim(0, -1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": lambda x: x.view_as(x),
    "bytes": lambda x: x.detach().view(torch.uint8),
    "ints": lambda x: x.detach().view(torch.int32),
    "real": lambda x: x.real,
    "conj": lambda x: x.conj(),
    "imag": lambda x: x.imag,
    "mH": lambda x: x.mH,
    "as_real": lambda x: torch.view_as_real(x),
    "same": lambda x: x.to(x.dtype),
}

SEVERAL = {
    "var_mean": lambda x: torch.var_mean(x.reshape(-1)),
    "max": lambda x: x.max(-1),
    "sort": lambda x: x.reshape(-1).sort(),
    "topk": lambda x: x.reshape(-1).topk(2),
    "aminmax": lambda x: x.aminmax(),
    "unbind": lambda x: x.unbind()[:3],
    "chunk": lambda x: x.chunk(3),
    "qr": lambda x: torch.linalg.qr(matrix(x)[:8]),
    "nonzero": lambda x: (x > 0.2).nonzero(as_tuple=True),
    "unique": lambda x: (x * 2).int().unique(return_counts=True),
    "masked_select": lambda x: (x[x > 0], x.masked_select(x < 0.5)),
    "argsort": lambda x: (x.argsort(-1), x.argmax()),
    "bincount": lambda x: (x.reshape(-1).abs().long().bincount(),),
    "split_sizes": lambda x: x.reshape(-1)[:7].split([2, 0, 5]),
}

DTYPES = ("float32", "float64", "bfloat16", "int64", "bool", "complex64")

SIZES = ((16, 16), (), (0,), (0, 4), (3,), (2, 3, 4), (1,), (40, 10))

MAKERS = {
    "randn": lambda size: torch.randn(size),
    "rand": lambda size: torch.rand(size).mul(3),
    "zeros": lambda size: torch.zeros(size),
    "full": lambda size: torch.full(size, 0.75),
    "filled": lambda size: torch.empty(size).uniform_(-1, 1),
    "bernoulli": lambda size: torch.empty(size).bernoulli_(0.3),
    "normal": lambda size: torch.normal(torch.zeros(size), 1.0),
    "randint": lambda size: torch.randint(0, 3, size),
    "linspace": lambda size: torch.linspace(-1, 2, 48),
    "randperm": lambda size: torch.randperm(10),
    "literal": lambda size: torch.tensor([[0.5, -1.5, 2.0], [1.0, 0.25, -0.125]]),
    "own_generator": lambda size: torch.randn(size, generator=torch.Generator().manual_seed(3)),
    "complex": lambda size: torch.complex(torch.randn(size), torch.randn(size)),
}


@step(PLACES, list(UNARY))
def unary(w: World, a: int, name: str) -> None:
    w.keep(UNARY[name](w.real(a)))


@step(PLACES, PLACES, list(BINARY))
def binary(w: World, a: int, b: int, name: str) -> None:
    x = w.real(a)
    w.keep(BINARY[name](x, fit(w.pick(b), x)))


@step(PLACES, list(VIEWS))
def view(w: World, a: int, name: str) -> None:
    w.keep(VIEWS[name](w.pick(a)))


@step(PLACES, list(VIEWS), list(VIEWS))
def view_of_view(w: World, a: int, name: str, other: str) -> None:
    w.keep(VIEWS[other](VIEWS[name](w.pick(a))))


@step(PLACES, list(SEVERAL))
def several(w: World, a: int, name: str) -> None:
    w.keep(*SEVERAL[name](w.real(a)))


@step(PLACES, DTYPES)
def cast(w: World, a: int, dtype: str) -> None:
    w.keep(w.pick(a).to(getattr(torch, dtype)))


@step(list(MAKERS), SIZES)
def make(w: World, name: str, size: tuple[int, ...]) -> None:
    w.keep(MAKERS[name](size))


@step(PLACES, range(2, 7), (True, False))
def chain(w: World, a: int, length: int, kept: bool) -> None:
    x = w.real(a)
    for place in range(length):
        x = torch.sin(x * 1.1 + place)
        if kept or place == length - 1:
            w.keep(x)


@step(PLACES)
def branches(w: World, a: int) -> None:
    x = torch.tanh(w.real(a))
    left, right = x.exp(), (x * 0.5).cos()
    w.keep(left + right, left * x)


@step(PLACES, PLACES, ("gather", "index_select", "take", "embedding", "index", "one_hot"))
def look_up(w: World, a: int, b: int, name: str) -> None:
    """Read one tensor at places that another one specifies."""
    x = matrix(w.real(a))
    index = (matrix(w.pick(b)).reshape(-1)[:6].nan_to_num().abs().clamp(max=1e6) * 7).long() % len(x)
    made = {
        "gather": lambda: x.gather(0, index.view(3, 2)),
        "index_select": lambda: x.index_select(0, index),
        "take": lambda: x.take(index),
        "embedding": lambda: functional.embedding(index, x),
        "index": lambda: x[index, index % 8],
        "one_hot": lambda: functional.one_hot(index),
    }
    w.keep(made[name](), index)
