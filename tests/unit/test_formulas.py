"""Predictions by formula equal those of PyTorch's shape functions and what operators really allocate."""

import random
from types import MappingProxyType

import pytest
import torch

import dtrrun
from dtrrun.runtime import formulas, shapes
from dtrrun.runtime.dispatch.arguments import flatten_into
from dtrrun.runtime.dispatch.signatures import Signatures
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.storage import size_of, storage_of

pytestmark = pytest.mark.usefixtures("extension")
aten = torch.ops.aten
TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
REFUSES = RuntimeError, NotImplementedError, IndexError, ZeroDivisionError


class Asked:
    """Asks the formulas, of what is a first call each time."""

    def __init__(self, session):
        self._signatures, self._interposer = session.callbacks.signatures, session.interposer
        self._first_call = session.interposer.first_call
        session.interposer.first_call = self._ask

    def _ask(self, signature, func, template, kwargs, nbytes, predicted, *more):
        self._said = predicted
        self._first_call(signature, func, template, kwargs, nbytes, predicted, *more)

    def of(self, func, args, kwargs):
        """Return the formula's prediction for a call and the bytes that it allocates; None if unknown."""
        self._signatures.forget()
        self._said = None
        tensors = []
        flatten_into(args, [], tensors)
        known = {storage_of(one)._cdata for one in tensors if one.layout is torch.strided}
        try:
            made = shapes.made_by(func(*args, **kwargs), known)
        except REFUSES:
            return self._said, None
        return self._said, sum(size_of(storage_of(one)) for one in made)


@pytest.fixture
def asked(monkeypatch):
    # Where costs are known from an earlier run, each first call is looked up there.
    monkeypatch.setattr(Signatures, "has_costs", True)
    with dtrrun.budget("1GB") as session:
        yield Asked(session)


def by_shape_function(func, args, kwargs):
    tensors = []
    template = flatten_into(args, [], tensors)
    named = dict(zip(kwargs, flatten_into(kwargs.values(), [], tensors), strict=True))
    geometries = [(one.size(), one.stride(), one.storage_offset(), one.dtype) for one in tensors]
    return shapes.by_shape_function(func, Operator(func), template, named, geometries)


def make(rng, size, dtype):
    """Return a tensor of ones in some layout."""
    layout = rng.choice(["contiguous", "permuted", "sliced", "expanded", "overlapping"])
    if layout == "permuted":
        order = rng.sample(range(len(size)), len(size))
        made = torch.ones([size[place] for place in order], dtype=dtype)
        return made.permute([order.index(place) for place in range(len(size))])
    if layout == "sliced":
        return torch.ones([2 * n + 1 for n in size], dtype=dtype)[tuple(slice(1, None, 2) for _ in size)]
    if layout == "expanded":
        return torch.ones([rng.choice([n, 1]) for n in size], dtype=dtype).expand(size)
    if layout == "overlapping":
        return torch.ones(sum(size) + 1, dtype=dtype).as_strided(size, [1] * len(size))
    return torch.ones(size, dtype=dtype)


def some_size(rng, least=0, most=4):
    return [rng.choice([0, 1, 2, 3, 5, 17]) for _ in range(rng.randint(least, most))]


def part_of(rng, size):
    """Return a size that broadcasts to `size`."""
    return [rng.choice([n, n, 1]) for n in size[rng.choice([0, 0, rng.randint(0, len(size))]) :]]


CHOICES = {
    "mask": [torch.bool],
    "condition": [torch.bool],
    "dim": [-1],
    "dtype": TYPES,
    "layout": [None],
    "memory_format": [torch.contiguous_format, torch.preserve_format],
    "rounding_mode": ["floor", "trunc"],
    "approximate": ["none", "tanh"],
    "number": [int, int, float, bool],
    "int": [int],
    "float": [float],
    "bool": [False],
}
"""For arguments of elementwise operators, by name or kind: values, or the type of a tensor or number."""


# Arguments for one call: what determines its family is drawn from `family`, the rest from `rng`.


def elementwise(func, family, rng):
    same = family.choice(TYPES)
    types = [same, same, same, same if "backward" in func._schema.name else family.choice(TYPES)]
    whole = func._schema.name in formulas.ELEMENTWISE or rng.random() < 0.3
    size = some_size(rng)
    args, kwargs = [], {}
    for argument in func._schema.arguments:
        kind = str(argument.type).removeprefix("Optional[").removesuffix("]")
        usual = types if kind == "Tensor" or argument.name == "input_dtype" else CHOICES.get(kind, [None])
        value = family.choice(CHOICES.get(argument.name, usual))
        if str(argument.type) != kind and family.random() < 0.3:
            value = None
        elif kind == "Tensor":
            value = make(rng, size if whole else part_of(rng, size), value)
        elif value in (int, float, bool):
            value = {int: rng.randint(1, 3), float: rng.random(), bool: True}[value]
        args.append(value)
        if argument.kwarg_only:
            kwargs[argument.name] = args.pop()
    return args, kwargs


def matrices(func, family, rng):
    dtype = family.choice(TYPES)
    n, k, p = some_size(rng, 3, 3)
    batch = some_size(rng, 1, 1) if func in (aten.bmm.default, aten.baddbmm.default) else []
    args = [make(rng, [*batch, n, k], dtype), make(rng, [*batch, k, p], dtype)]
    if func in (aten.addmm.default, aten.baddbmm.default):
        args.insert(0, make(rng, part_of(rng, [*batch, n, p]), dtype))
    return args, family.choice([{}, {"alpha": 2, "beta": 1}]) if len(args) == 3 else {}


def joined(func, family, rng):
    types = family.sample(TYPES, family.choice([1, 1, 2]))
    size = some_size(rng, 1)
    dim = rng.randrange(-len(size), len(size))
    tensors = []
    for place in range(rng.randint(1, 5)):
        if func is aten.cat.default:
            size[dim] = rng.randint(0, 4)
        tensors.append(make(rng, size, types[place % len(types)]))
    if func is aten.cat.default and rng.random() < 0.2:
        tensors.append(torch.ones(0, dtype=types[-1]))  # may be concatenated with any size
    return [tensors, dim], {}


def inserted(func, family, rng):
    dtype = family.choice(TYPES)
    size = [n + 1 for n in some_size(rng, 1)]
    dim = rng.randrange(len(size))
    if func is aten.select_backward.default:
        return [make(rng, size[:dim] + size[dim + 1 :], dtype), size, dim, rng.randrange(size[dim])], {}
    first, step = rng.randrange(size[dim]), rng.randint(1, 2)
    part = [*size[:dim], len(range(first, size[dim], step)), *size[dim + 1 :]]
    return [make(rng, part, dtype), size, dim, first, 2**63 - 1, step], {}


def reduced(func, family, rng):
    dtype, kwargs = family.choice(TYPES), family.choice([{}, {}, {"dtype": torch.float64}])
    size = some_size(rng)
    dims = [place - rng.choice([0, len(size)]) for place in range(len(size)) if rng.random() < 0.5]
    return [make(rng, size, dtype), dims or None, *family.choice([[], [True], [False]])], kwargs


def summed(func, family, rng):
    kwargs = family.choice([{}, {}, {"dtype": torch.float64}])
    return [make(rng, some_size(rng), family.choice(TYPES))], kwargs


def viewed(func, family, rng):
    size = some_size(rng)
    return [torch.ones(size, dtype=family.choice(TYPES)), [torch.Size(size).numel(), 1]], {}


def split(func, family, rng):
    size = [n + 1 for n in some_size(rng, 1)]
    dim = rng.randrange(len(size))
    parts = rng.randint(1, size[dim])
    if func is aten.unsafe_split_with_sizes.default:
        parts = [1] * (size[dim] - parts) + [parts]
    return [make(rng, size, family.choice(TYPES)), parts, dim], {}


def looked_up(func, family, rng):
    dtype, places, rows = family.choice(TYPES[:3]), some_size(rng), rng.randint(2, 7)
    indices = make(rng, places, family.choice([torch.int64, torch.int32]))
    width = rng.randint(0, 7)
    if func is aten.embedding.default:
        return [make(rng, [rows, width], dtype), indices, *family.choice([[], [0]])], {}
    return [make(rng, [*places, width], dtype), indices, rows, -1, False], {}


def normalised(func, family, rng):
    dtype, of_rest = family.choice([TYPES[:1] * 2, TYPES[1:2] * 2, [torch.bfloat16, torch.float32]])
    weighted, tracked, training = [family.random() < 0.7 for _ in range(3)]
    weighted |= dtype is not of_rest
    size = [n + 2 for n in some_size(rng, 2)]
    row = torch.ones(size[1], dtype=of_rest)
    weight = row if weighted else None
    statistics = [row.clone(), row.clone()] if tracked or not training else [None, None]
    if func is aten.native_batch_norm.default:
        return [make(rng, size, dtype), weight, weight, *statistics, training, 0.1, 1e-5], {}
    both = [make(rng, size, dtype), make(rng, size, dtype)]
    wanted = [family.random() < 0.7, weighted, weighted]
    return [*both, weight, *statistics, row.clone(), row.clone(), training, 1e-5, wanted], {}


def normalised_together(func, family, rng):
    dtype = family.choice(TYPES[:2])
    size, weighted = [n + 1 for n in some_size(rng, 2)], family.random() < 0.7
    wanted = [family.random() < 0.7, weighted, weighted]
    both = [make(rng, size, dtype), make(rng, size, dtype)]
    if "group" in func._schema.name:
        groups = rng.choice([n for n in (1, 2, 3) if size[1] % n == 0])
        weight = torch.ones(size[1], dtype=dtype) if weighted else None
        count = [size[0], size[1], torch.Size(size[2:]).numel(), groups]
        if func is aten.native_group_norm.default:
            return [torch.ones(size, dtype=dtype), weight, weight, *count, 1e-5], {}
        kept = torch.ones(size[0], groups, dtype=dtype)
        return [*(torch.ones(size, dtype=dtype) for _ in both), kept, kept, weight, *count, wanted], {}
    rows = rng.randint(1, len(size) - 1)
    weight = torch.ones(size[rows:], dtype=dtype) if weighted else None
    if func is aten.native_layer_norm.default:
        return [both[0], size[rows:], weight, weight, 1e-5], {}
    kept = torch.ones([*size[:rows], *[1] * (len(size) - rows)], dtype=dtype)
    return [*both, size[rows:], kept, kept, weight, weight, wanted], {}


def convolved(func, family, rng):
    dtype, dims, transposed = family.choice(TYPES[:3]), family.choice([1, 2, 3]), family.random() < 0.3
    groups = rng.choice([1, 1, 2])
    filters, columns = groups * rng.randint(1, 3), rng.randint(1, 3)
    kernel = [rng.randint(1, 3) for _ in range(dims)]
    channels = filters if transposed else columns * groups
    x = torch.ones([rng.randint(1, 3), channels, *[rng.randint(4, 9) for _ in kernel]], dtype=dtype)
    if dims == 2 and rng.random() < 0.3:
        x = x.contiguous(memory_format=torch.channels_last)
    weight, biased = torch.ones([filters, columns, *kernel], dtype=dtype), family.random() < 0.5
    numbers = [[rng.randint(low, 2) for _ in kernel] for low in (1, 0, 1)]
    more = [rng.randint(0, max(s, d) - 1) * transposed for s, _, d in zip(*numbers, strict=True)]
    made = columns * groups if transposed else filters
    rest = [*numbers, transposed, more, groups]
    args = [x, weight, torch.ones(made, dtype=dtype) if biased else None, *rest]
    if func is aten.convolution.default:
        return args, {}
    wanted = [family.random() < 0.7, True, biased]
    try:
        gradient = torch.ones_like(aten.convolution(*args))
    except RuntimeError:
        gradient = x
    return [gradient, x, weight, [made] if biased else None, *rest, wanted], {}


def pooled(func, family, rng):
    dtype, ceil = family.choice(TYPES[:2]), family.random() < 0.5
    kernel, most = rng.randint(2, 3), family.choice([1, 2, 4, 5])
    given = [kernel, kernel], [rng.randint(1, 3), 2], [rng.randint(0, 1), 1], [rng.randint(1, 2), 1], ceil
    if func is aten.avg_pool2d.default or func is aten.avg_pool2d_backward.default:
        given = *given[:3], ceil, True, None
    x = torch.ones([2, 3, rng.randint(4, 9), rng.randint(4, 9)][rng.randint(0, 1) :], dtype=dtype)
    if "backward" not in func._schema.name:
        return [x, *given[:most]], {}
    if func is aten.avg_pool2d_backward.default:
        return [torch.ones_like(aten.avg_pool2d(x, *given)), x, *given], {}
    made, places = aten.max_pool2d_with_indices(x, *given)
    return [torch.ones_like(made), x, *given, places], {}


def made(func, family, rng):
    kwargs = family.choice([{}, {"dtype": torch.float64}, {"dtype": torch.bfloat16}])
    value = [family.choice([1, 2.0, True])] if func is aten.full.default else []
    return [some_size(rng), *value], kwargs


def made_like(func, family, rng):
    x = torch.ones(2, dtype=family.choice(TYPES))
    value = [family.choice([1, 2.0, True])] if func is aten.new_full.default else []
    return [x, some_size(rng), *value], family.choice([{}, {"dtype": torch.float64}])


def drawn(func, family, rng):
    least = [1] if func is aten.randint.low else []
    return [*least, 5, some_size(rng)], family.choice([{}, {"dtype": torch.float64}])


def like_the_first(func, family, rng):
    x = make(rng, [rng.randint(1, 5), rng.randint(1, 5)], family.choice(TYPES[:3]))
    places = torch.zeros(1, 1, dtype=torch.int64)
    rest = {
        aten.native_dropout.default: [0.5, True],
        aten.native_dropout_backward.default: [torch.ones_like(x, dtype=torch.bool), 2.0],
        aten.cumsum.default: [0],
        aten.flip.default: [[0]],
        aten.roll.default: [[1], [0]],
        aten.scatter.src: [0, places, x],
        aten.scatter.value: [0, places, 2.0],
        aten.scatter_add.default: [0, places, x],
        aten.index_add.default: [0, places[0], x[:1]],
    }
    return [x, *rest.get(func, [])], {}


def compared(func, family, rng):
    """The loss of log-probabilities, with and without weights."""
    dtype, reduction, weighted = family.choice(TYPES[:3]), family.choice([0, 1, 2]), family.random() < 0.5
    x = torch.ones(rng.randint(1, 9), 5, dtype=dtype)
    target = torch.zeros(x.shape[0], dtype=torch.int64)
    rest = [torch.ones(5, dtype=dtype) if weighted else None, reduction, -100]
    if func is aten.nll_loss_forward.default:
        return [x, target, *rest], {}
    loss, total = aten.nll_loss_forward(x, target, *rest)
    return [torch.ones_like(loss), x, target, *rest, total], {}


def counted(func, family, rng):
    kind, kwargs = family.choice([int, int, float]), family.choice([{}, {"dtype": torch.float64}])
    first, length, step = rng.randint(-3, 3), rng.randint(0, 9), rng.choice([1, 2, -3])
    args = {"default": [length], "start": [first, first + length]}
    args = args.get(func._overloadname, [first, first + length * step, step])
    return [kind(number) for number in args], kwargs


KERNELS_DIFFER = {
    aten.ldexp.Tensor,  # keeps the memory of a larger intermediate result
    aten.pow.Tensor_Scalar,  # a boolean to the power of True is a boolean
}
"""Operators whose shape function is wrong in odd cases. Other cases are not tried: mixed types in
`threshold_backward`, and `native_batch_norm` all in bfloat16."""


def elementwise_operators():
    for name in sorted(dir(aten)):
        packet = getattr(aten, name)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            func = getattr(packet, overload)
            known = Operator(func)
            if known.simple and formulas.name_of(func, known) == "elementwise":
                yield func


MAKERS = {
    matrices: [aten.mm, aten.addmm, aten.bmm, aten.baddbmm],
    joined: [aten.cat, aten.stack],
    inserted: [aten.slice_backward, aten.select_backward],
    reduced: [aten.sum.dim_IntList, aten.mean.dim],
    summed: [aten.sum, aten.mean],
    viewed: [aten._unsafe_view],
    split: [aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes],
    looked_up: [aten.embedding, aten.embedding_dense_backward],
    normalised: [aten.native_batch_norm, aten.native_batch_norm_backward],
    normalised_together: [
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten.native_group_norm,
        aten.native_group_norm_backward,
    ],
    convolved: [aten.convolution, aten.convolution_backward],
    pooled: [
        aten.max_pool2d_with_indices,
        aten.max_pool2d_with_indices_backward,
        aten.avg_pool2d,
        aten.avg_pool2d_backward,
    ],
    made: [aten.empty.memory_format, aten.zeros, aten.ones, aten.full, aten.rand, aten.randn],
    made_like: [aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full],
    drawn: [aten.randint, aten.randint.low],
    like_the_first: [
        *(aten.native_dropout, aten.native_dropout_backward, aten.cumsum, aten.tril, aten.triu, aten.flip),
        *(aten.roll, aten.sort, aten.scatter.src, aten.scatter.value, aten.scatter_add, aten.index_add),
    ],
    compared: [aten.nll_loss_forward, aten.nll_loss_backward],
    counted: [aten.arange, aten.arange.start, aten.arange.start_step],
}
CALLS = dict.fromkeys(elementwise_operators(), elementwise) | {
    getattr(func, "default", func): maker for maker, funcs in MAKERS.items() for func in funcs
}


def test_every_formula_is_tested():
    assert set(formulas.TABLE) < set(CALLS)
    assert {func._schema.name for func in CALLS} > formulas.ELEMENTWISE | {"aten::add"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("func", CALLS, ids=str)
def test_as_the_shape_function_and_as_pytorch(asked, func):
    rng, answered = random.Random(str(func)), 0
    enough = 24 if CALLS[func] is elementwise else 100
    for count in range(100):
        if count >= enough and answered:
            break
        args, kwargs = CALLS[func](func, random.Random(f"{func} {count // 4}"), rng)
        said, real = asked.of(func, args, kwargs)
        if said is None:
            continue
        answered += 1
        if func not in KERNELS_DIFFER:
            assert by_shape_function(func, args, kwargs) in (said, None), (args, kwargs)
            assert real in (said, None), (args, kwargs)
    assert answered or "shift" in str(func)  # which takes integers only


def is_known(asked, func, args, kwargs=MappingProxyType({})):
    """Return whether a formula knows what a call will allocate."""
    said, _ = asked.of(func, args, kwargs)
    assert said in (None, by_shape_function(func, args, kwargs))
    return said is not None


def test_a_family_is_asked_of_once(asked):
    x, y, zero = torch.ones(40, 3), torch.ones(50, 7), torch.ones(())
    whole, double = torch.ones(40, dtype=torch.int64), torch.ones(40, dtype=torch.float64)
    assert not is_known(asked, aten.mul.Tensor, [x, x])
    assert is_known(asked, aten.mul.Tensor, [y, y[0]])
    assert not is_known(asked, aten.mul.Tensor, [x, 2.0])
    assert is_known(asked, aten.mul.Tensor, [y, 3.5])
    for other in (2, 2.0, True, zero, x[:, 0]):
        assert not is_known(asked, aten.mul.Tensor, [whole, other])
    assert not is_known(asked, aten.mul.Tensor, [double, zero])
    assert not is_known(asked, aten.mul.Tensor, [double, x[:, 0]])
    for mode in (None, "floor", "trunc"):
        assert not is_known(asked, aten.div.Tensor_mode, [whole, whole], {"rounding_mode": mode})
    assert is_known(asked, aten.div.Tensor_mode, [whole[:9], whole[:9]], {"rounding_mode": "floor"})
    try:
        assert not is_known(asked, aten.sin.default, [whole])
        torch.set_default_dtype(torch.float64)
        assert not is_known(asked, aten.sin.default, [whole])
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_is_unusual_is_asked_every_time(asked):
    x = torch.ones(40)
    usual = [(aten.mul.Tensor, [x, x]), (aten.sum.dim_IntList, [x, [0]])]
    usual.append((aten.mm.default, [torch.ones(4, 5), torch.ones(5, 4)]))
    usual.append((aten.bmm.default, [torch.ones(3, 4, 5), torch.ones(3, 5, 4)]))
    for call in usual:
        assert not is_known(asked, *call)
    for _ in range(2):
        assert not is_known(asked, aten.mul.Tensor, [x, torch.ones(41)])  # fails, as do the next three
        assert not is_known(asked, aten.mm.default, [torch.ones(4, 5), torch.ones(4, 5)])
        assert not is_known(asked, aten.bmm.default, [torch.ones(3, 4, 5), torch.ones(2, 5, 4)])
        assert not is_known(asked, aten.sum.dim_IntList, [x, [1]])
        assert not is_known(asked, aten.sum.dim_IntList, [x, []])
        assert not is_known(asked, aten.conj_physical.default, [x])  # returns the input itself
    for call in usual:
        assert is_known(asked, *call)


def test_a_sparse_tensor_is_no_dense_one(asked):
    x = torch.ones(40, 40)
    assert not is_known(asked, aten.mm.default, [x, x])
    assert is_known(asked, aten.mm.default, [x[:9], x])
    assert asked.of(aten.mm.default, [x[:9].to_sparse(), x], {})[0] is None


def test_what_teaches_nothing(asked):
    x, empty = torch.ones(40), torch.ones(0)
    assert not is_known(asked, aten.mul.Tensor, [empty, empty])
    assert not is_known(asked, aten.mul.Tensor, [x, x])
    assert is_known(asked, aten.mul.Tensor, [empty, empty])
    for layout in (torch.sparse_coo, torch.strided):  # the first has no storage
        assert not is_known(asked, aten.zeros_like.default, [x], {"layout": layout})
