"""What a session replaces in PyTorch cannot be told from the original: by name, by table, by identity."""

import copy
import inspect
import io
import pickle
from collections import UserList

import numpy as np
import pytest
import torch
from programs import check_stress, plain, run_inside
from torch import nn, overrides
from torch.jit import _builtins, _recursive, _state
from torch.overrides import TorchFunctionMode
from torch.utils import _device

import dtrrun
from dtrrun.runtime.patches import registry as patches

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


def _places():
    with dtrrun.budget(None):
        return patches.installed()


PLACES = _places()
NAMES = [f"{owner.__name__}.{name}" for owner, name in PLACES]
ORIGINALS = [inspect.getattr_static(owner, name, None) for owner, name in PLACES]


ATTRIBUTES_OF_OBJECTS = ("saved_tensors", "__cuda_array_interface__")
"""Not functions: only their place is checked."""


def told(function, *args):
    """Return what a call returns, or the type of the error that it raises."""
    try:
        return function(*args)
    except Exception as error:
        return type(error)


def same_after_pickling(function):
    return pickle.loads(pickle.dumps(function)) is function


ATTRIBUTES = ("__name__", "__qualname__", "__module__", "__doc__", "__objclass__", "__text_signature__")
QUESTIONS = {
    **{name: lambda f, name=name: getattr(f, name, None) for name in ATTRIBUTES},
    "signature": lambda f: str(inspect.signature(f)),
    "source": inspect.getsource,
    "repr": repr,
    "pickle": same_after_pickling,
    "kind": lambda f: [
        test(f) for test in (inspect.isfunction, inspect.isroutine, inspect.ismethoddescriptor)
    ],
    "type": lambda f: f.__class__,
    "defaults": lambda f: (f.__defaults__, f.__kwdefaults__, f.__annotations__),
    "TorchScript": _builtins._find_builtin,
    "name for overrides": overrides.resolve_name,
    "method": overrides.is_tensor_method_or_property,
    "ignored": lambda f: f in overrides.get_ignored_functions(),
    "overridable": lambda f: any(f in group for group in overrides.get_overridable_functions().values()),
    "override for tests": lambda f: f in overrides.get_testing_overrides(),
    "device constructor": lambda f: f in _device._device_constructors(),
}
CACHES = [
    value for part in (overrides, _device) for value in vars(part).values() if hasattr(value, "cache_clear")
]


def answers():
    """Return the answer to each question about each place, by name and question."""
    return {
        (name, question): told(ask, function)
        for (owner, attribute), name in zip(PLACES, NAMES, strict=True)
        if attribute not in ATTRIBUTES_OF_OBJECTS
        for function in [getattr(owner, attribute)]
        for question, ask in QUESTIONS.items()
    }


@pytest.fixture
def own_tables():
    """PyTorch adds some builtins to TorchScript's table only when it is imported."""
    table = _builtins._get_builtin_table()
    yield
    _builtins._builtin_table = table


def forget():
    for cache in CACHES:
        cache.cache_clear()
    _builtins._builtin_table = None


def differences(expected, found):
    return {
        key: (old, found[key])
        for key, old in expected.items()
        # Being picklable where the original is not (pybind's functions) does no harm.
        if found[key] != old and (key[1], found[key]) != ("pickle", True)
    }


@pytest.mark.usefixtures("own_tables")
@pytest.mark.parametrize("filled", ["before", "during", "after"])
def test_tables_that_are_filled_before_during_or_after_the_session(filled):
    forget()
    expected = answers()
    forget()
    if filled == "before":
        answers()
    with dtrrun.budget(None):
        inside = answers() if filled != "after" else None
        assert all(inspect.getattr_static(o, n) is not None for o, n in PLACES)
    after = answers()
    forget()
    assert inside is None or not differences(expected, inside)
    assert after == expected


def test_everything_is_the_original_object_again():
    for budget in (None, 1):
        with dtrrun.budget(budget, over_budget="evict"):
            # Including those of PyTorch's compiler, once it has been imported.
            assert [place for place in patches.installed() if place in PLACES] == PLACES
        assert patches.installed() == []
        for (owner, name), original in zip(PLACES, ORIGINALS, strict=True):
            assert inspect.getattr_static(owner, name, None) is original, name


def test_what_was_found_in_a_session_is_the_same_to_a_table():
    """A program may fill its own table from the functions that it finds when it is imported."""
    places = [
        (owner, name)
        for owner, name in PLACES
        if name not in ATTRIBUTES_OF_OBJECTS and told(hash, getattr(owner, name)) is not TypeError  # pybind's
    ]
    before = {getattr(owner, name): place for place, (owner, name) in enumerate(places)}
    with dtrrun.budget(None):
        inside = {getattr(owner, name): place for place, (owner, name) in enumerate(places)}
        assert all(before[getattr(owner, name)] == inside[getattr(owner, name)] for owner, name in places)
    assert all(getattr(owner, name) in inside for owner, name in places)


PUBLIC = [
    (
        torch,
        ("save", "load", "tensor", "as_tensor", "asarray", "compile", "tensor_split", "lstm", "ctc_loss"),
    ),
    (torch, ("nuclear_norm", "set_rng_state", "to_dlpack")),
    (torch.linalg, ("norm", "cond", "matrix_norm", "matrix_rank", "svdvals", "eigvalsh")),
    (torch.Tensor, ("new_tensor", "tensor_split", "__float__", "tolist", "numpy", "__deepcopy__", "storage")),
]


@pytest.mark.parametrize("protocol", [2, 5])
def test_functions_are_pickled_by_name(protocol):
    """They may be found before the session or inside it, and read again inside it or after."""
    functions = [getattr(owner, name) for owner, names in PUBLIC for name in names]
    with dtrrun.budget(None):
        found = [getattr(owner, name) for owner, names in PUBLIC for name in names]
        assert found == functions
        text = pickle.dumps(found, protocol)
        assert all(map(pickle.loads(text).__contains__, found))
        python = [function for function in functions if inspect.isfunction(function)]
        assert pickle.loads(pickle.dumps(python, protocol)) == python
    assert pickle.loads(text) == functions


# -- others that patch the same functions --------------------------------------------------------------------


class Owner:
    def python(self, one, *, two=2):
        """Doc."""
        return [self.__class__.__name__, one, two]

    length = list.__len__  # implemented in C


class Inner(Owner):
    def python(self, one, *, two=2):
        return ["inner", *super().python(one, two=two)]  # needs a cell


def marked(mark):
    return lambda original: lambda *args, **kwargs: [mark, original(*args, **kwargs)]


@pytest.mark.parametrize("first", [0, 1], ids=["in order", "the other way around"])
@pytest.mark.parametrize(
    ("owner", "name", "call", "result"),
    [
        (Owner, "python", lambda: Owner().python(1, two=3), ["Owner", 1, 3]),
        (Inner, "python", lambda: Inner().python(1), ["inner", "Inner", 1, 2]),
        (Owner, "length", lambda: Owner.length([1, 2, 3]), 3),
    ],
    ids=["Python", "with cells", "C"],
)
def test_two_patches_of_one_function(owner, name, call, result, first):
    original = vars(owner)[name]
    both = [patches.Patches(), patches.Patches()]
    for mark, one in enumerate(both):
        one.wrap(owner, name, marked(mark))
    kept = getattr(owner, name)
    assert call() == [1, [0, result]]
    both[1 - first].undo()
    assert call() == [first, result]
    both[first].undo()
    assert call() == result
    assert vars(owner)[name] is original
    assert not hasattr(original, "__wrapped__")
    if name == "length":
        assert kept([1]) == 1  # anyone who keeps it has the original
    assert patches.installed() == []


@pytest.mark.parametrize("name", ["python", "length"])
def test_what_others_replace_meanwhile_stays(name, monkeypatch):
    one = patches.Patches()
    one.wrap(Owner, name, marked("ours"))
    ours = getattr(Owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(Owner, name, lambda *args: ("theirs", ours(*args)))
        args = (Owner(), 1) if name == "python" else ([1],)
        assert getattr(Owner, name)(*args)[1][0] == "ours"
        one.undo()
        plain_result = getattr(Owner, name)(*args)
        assert plain_result[0] == "theirs"
        assert plain_result[1] == (["Owner", 1, 2] if name == "python" else 1)
    assert getattr(Owner, name)(*args) == plain_result[1]


# -- device contexts -----------------------------------------------------------------------------------------

CONSTRUCTORS = {
    "tensor": lambda: torch.tensor([1.0]),
    "as_tensor": lambda: torch.as_tensor([1.0, 2.0]),
    "asarray": lambda: torch.asarray([1.0]),
    "new_tensor": lambda: torch.ones(2).new_tensor([1.0]),
    "zeros": lambda: torch.zeros(2),
    "load": lambda: torch.load(saved(torch.ones(2, device="cpu")), weights_only=True),
}


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.usefixtures("own_tables")
@pytest.mark.parametrize("filled", ["before", "during"])
@pytest.mark.parametrize("way", ["context", "default"])
def test_device_contexts(way, filled):
    def program():
        devices = []
        for make in CONSTRUCTORS.values():
            if way == "context":
                with torch.device("meta"):
                    devices.append(str(make().device))
            else:
                torch.set_default_device("meta")
                try:
                    devices.append(str(make().device))
                finally:
                    torch.set_default_device(None)
        return devices

    expected = plain(program)
    if filled == "during":
        forget()
    assert run_inside(program, None)[0] == expected
    assert plain(program) == expected


# -- evicted tensors in lists --------------------------------------------------------------------------------


def evicted(step=0):
    """Return a tensor that under stress is already evicted."""
    x = torch.sin(torch.randn(16, 32) + step)
    torch.cos(torch.randn(16, 32))
    return x


def number(kind=float):
    """Return a one-element tensor that is evicted, too."""
    one = (evicted().sum() * 3).to(torch.long) % 3 if kind is int else evicted().sum()
    torch.cos(torch.randn(16, 32))
    return one if kind is not complex else torch.complex(one, one) * 2


X = torch.arange(32.0).reshape(8, 4)

LISTS = {
    "after a number": lambda: torch.tensor([1.0, number()]),
    "deep": lambda: torch.tensor([[1.0, 2.0], [number(), 3.0], [4.0, number()]]),
    "rows": lambda: torch.tensor([[1.0] * 32, evicted()[3]]),
    "a row in a tuple": lambda: torch.tensor(([1.0] * 32, (*evicted()[3],))),
    "integers": lambda: torch.tensor([1, number(int)]),
    "booleans": lambda: torch.tensor([True, number() > 0, False]),
    "complex": lambda: torch.tensor([1j, number(complex)]),
    "another type": lambda: torch.tensor([1, number()], dtype=torch.bfloat16),
    "a class of lists": lambda: torch.tensor(UserList([1.0, number()])),
    "as_tensor": lambda: torch.as_tensor([0.5, number()]),
    "asarray": lambda: torch.asarray([0.5, number()]),
    "new_tensor": lambda: X.new_tensor([0.5, number()]),
    "legacy": lambda: torch.Tensor([number(), 2.0]),
    "legacy of a type": lambda: (torch.FloatTensor([1.0, number()]), torch.LongTensor([1, number(int)])),
    "new": lambda: X.new([1.0, number()]),
    "storage": lambda: torch.tensor(list(torch.FloatStorage([1.0, number()]))),
    "index": lambda: X[[number(int), 0],],
    "index in a tuple": lambda: X[(number(int), [0, number(int)])],
    "assignment": lambda: X.clone().index_put_((torch.tensor([1, number(int)]),), torch.tensor(5.0)),
    "assignment to an index": lambda: X.clone().__setitem__(([1, number(int)],), number()),
    "sparse": lambda: torch.sparse_coo_tensor([[0, number(int)]], [number(), 1.0], (4,)),
    "compressed": lambda: torch.sparse_csr_tensor([0, 1, 2], [0, number(int)], [number(), 1.0], (2, 4)),
    "nested": lambda: torch.nested.nested_tensor([[number(), 1.0], [2.0]]).unbind(),
    "range": lambda: torch.tensor(range(number(int))),
    "numbers": lambda: [float(number()), int(number(int)), bool(number() > 0), complex(number(complex))],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", LISTS)
def test_evicted_tensors_in_lists(case):
    check_stress(lambda: [LISTS[case]() for _ in range(3)])


# -- TorchScript ---------------------------------------------------------------------------------------------


def with_tensor(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tensor([2.0, 3.0])[0] + torch.as_tensor(1.5)


def with_norm(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.norm(x) + torch.linalg.matrix_norm(x)


def with_ctc(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    probabilities = x.reshape(8, 4, 16).log_softmax(2)
    return torch.ctc_loss(probabilities, torch.ones(4, 2, dtype=torch.long), n + 6, n)


def with_split(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return torch.tensor_split(x, n * torch.arange(1, 5))[1] * 2


class Packed(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(32, 8)

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.reshape(4, 4, 32), n + 1)
        return self.layer(packed)[0].data


class Losses(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.CTCLoss()

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(8, 4, 16).log_softmax(2), torch.ones(4, 2, dtype=torch.long), n + 6, n)


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(32, 8)

    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return self.layer(x.reshape(4, 4, 32))[0]


SCRIPTS = {
    "tensor": lambda: with_tensor,
    "norm": lambda: with_norm,
    "ctc_loss": lambda: with_ctc,
    "tensor_split": lambda: with_split,
    "LSTM": lambda: Layer(nn.LSTM),
    "GRU": lambda: Layer(nn.GRU),
    "RNN": lambda: Layer(nn.RNN),
    "CTCLoss": lambda: Losses(),
    "a packed LSTM": lambda: Packed(nn.LSTM),
    "a packed GRU": lambda: Packed(nn.GRU),
}


def lengths():
    n = torch.full((4,), 5) - 3
    evicted()
    return n


def script_anew(made):
    """Script it anew: PyTorch keeps what it has compiled of a function or a module's class."""
    _state._jit_caching_layer.clear()
    _state._jit_function_overload_caching.clear()
    _state._clear_class_state()
    torch._C._jit_clear_class_registry()
    _recursive.concrete_type_store = _recursive.ConcreteTypeStore()
    return torch.jit.script(made)


@pytest.mark.parametrize("scripted", ["before", "inside"])
@pytest.mark.parametrize("case", SCRIPTS)
def test_scripts(case, scripted):
    torch.manual_seed(3)
    made = SCRIPTS[case]()
    before = script_anew(made) if scripted == "before" else None

    def program():
        script = script_anew(made) if before is None else before
        takes_lengths = case not in ("tensor", "norm")
        return [script(evicted(step), *([lengths()] if takes_lengths else [])) for step in range(4)]

    check_stress(program, by_address=case in ("ctc_loss", "CTCLoss"))


@torch.jit.script
def listed(x: torch.Tensor) -> list[float]:
    y: list[float] = x.tolist()
    return y


@torch.jit.script
def listed_deep(x: torch.Tensor):
    first = x.sin()
    sums: list[float] = []
    for step in range(3):
        y = (x + step).cos()
        rows: list[list[float]] = first.tolist()
        one: float = y.sum().tolist()
        sums += rows[0] + listed(x[step]) + [one]
    return sums, first


class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.arange(32.0))
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 2.0, power: int = 1) -> tuple[list[float], int]:
        self.calls += 1
        shifted = x[0] * scale + self.shift * power
        x.exp()
        y: list[float] = shifted.tolist()
        return y, self.calls


def test_lists_that_compiled_functions_make_of_evicted_tensors():
    def program():
        module = torch.jit.script(Listing())
        kept = []
        for step in range(4):
            kept += [listed(evicted(step)[1]), listed_deep(evicted(step))]
            kept += [module(evicted(step)), module(evicted(step), 3.0), module(power=2, x=evicted(step))]
        return kept

    check_stress(program, by_address=True)


# -- what programs override ----------------------------------------------------------------------------------


class Listener(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.heard = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.heard.append(overrides.resolve_name(func) or str(getattr(func, "__name__", func)))
        return func(*args, **(kwargs or {}))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@torch.jit.script
def compiled(x: torch.Tensor, y: torch.Tensor):
    return (x.sin() * y).cos().sum()


def step_of_an_optimizer():
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        torch.autograd.backward(layer(torch.ones(2, 4)).sum())
        optimizer.step()


HEARD = {
    "reads": lambda x: (x.tolist(), repr(x), f"{x[0, 0]}", pickle.dumps(x), float(x.sum())),
    "memory": lambda x: (x.numpy(), x.data_ptr(), x.untyped_storage(), np.asarray(x), torch.from_dlpack(x)),
    "lists": lambda x: (torch.tensor([1.0, x.sum()]), torch.as_tensor([x.sum()])),
    "files": lambda x: torch.load(saved({"x": x})),
    "copies": copy.deepcopy,
    "composites": lambda x: (
        torch.tensor_split(x, torch.tensor([2])),
        torch.linalg.norm(x, out=x.new_empty(0)),
    ),
    "functions": lambda x: Square.apply(x.detach().requires_grad_()).sum().backward(),
    "an optimizer": lambda x: step_of_an_optimizer(),
    "random states": lambda x: torch.set_rng_state(torch.get_rng_state()),
    "resized storages": lambda x: x.clone().untyped_storage().resize_(0),
    "compiled functions": lambda x: compiled(x, x + 1),
}


@pytest.mark.parametrize("case", HEARD)
def test_function_modes_hear_what_they_hear_without_us(case):
    def program():
        heard = []
        for step in range(3):
            x = evicted(step)
            with Listener() as mode:
                HEARD[case](x)
            heard.append(mode.heard)
        return heard

    check_stress(program)


class Text(torch.Tensor):
    """Answers whatever it is asked with something that is not a tensor."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return f"{getattr(func, '__name__', '')} of {len(types)}"


def test_subclasses_that_answer_with_what_is_no_tensor():
    def program():
        said = []
        for step in range(3):
            x = evicted(step).as_subclass(Text)
            said += [x.tolist(), x.numpy(), x.shape, x + 1, repr(x), x.untyped_storage()]
            said += [torch.tensor_split(x, 2), torch.linalg.norm(x), str(x.data_ptr())]
        return said

    check_stress(program)


def test_tables_of_overrides_that_were_filled_before_the_session():
    functions = [
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.tensor_split,
        torch.linalg.norm,
        torch.Tensor.storage,
    ]
    table = {function: place for place, function in enumerate(functions)}

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return table.get(func, func)

    def program():
        x = evicted().as_subclass(Own)
        return [torch.tensor_split(x, 2), torch.linalg.norm(x), x.tolist(), x.numpy(), x.storage()]

    expected = plain(program)
    assert expected[:5] == ["2", "3", "0", "1", "4"]
    check_stress(program, expected)


# -- storages of other kinds ---------------------------------------------------------------------------------

LIBRARY = torch.library.Library("dtrrun_surface", "DEF")
LIBRARY.define("array(Tensor x) -> Tensor")
LIBRARY.define("array_and_more(Tensor x) -> (Tensor, Tensor)")
LIBRARY.impl("array", lambda x: torch.from_numpy(np.asarray(x.tolist(), dtype="float32")), "CPU")
LIBRARY.impl(
    "array_and_more",
    lambda x: (torch.from_numpy(np.asarray((x + 1).tolist(), dtype="float32")), x.cos()),
    "CPU",
)


def test_operators_that_wrap_an_array():
    def program():
        kept = []
        for step in range(5):
            one = torch.ops.dtrrun_surface.array(evicted(step))
            two, three = torch.ops.dtrrun_surface.array_and_more(evicted(step))
            kept += [one, two, three, (one * 2).exp(), two.sin() + three]
            evicted(step)
            one.add_(1)
        return kept

    check_stress(program)


def test_lazy_clones():
    """Two storages share their memory until one of them is written to."""

    def program():
        kept = []
        for step in range(4):
            x = evicted(step)
            one, two = torch._lazy_clone(x), torch._lazy_clone(x)
            evicted(step)
            one.add_(1)
            kept += [x * 2, one * 2, torch._lazy_clone(one) + x, two]
            evicted(step)
            x.mul_(2)
            kept += [x, two.sin()]
        return kept

    check_stress(program)
