"""The message when the budget is too small: every figure that it advises is enough, and none is zero."""

import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import dtrrun
from dtrrun.core.garbage import TRIES
from dtrrun.runtime.observe.hints import unnamed
from dtrrun.runtime.observe.training_memory import find_training
from dtrrun.sizes import format_size_up, parse_size
from dtrrun.telemetry.advice import Advised, advice


def too_small(program, budget=100_000):
    with pytest.raises(dtrrun.BudgetError) as caught, dtrrun.budget(budget):
        program()
    return caught.value


@pytest.mark.parametrize("size", [1, 999, 1000, 1001, 12_345, 999_999, 41_769_600, 123_456_789_012])
def test_a_size_is_never_rounded_down_to_less(size):
    shown = format_size_up(size)
    assert size <= parse_size(shown.replace(" ", "")) <= size * 1.01


@pytest.mark.parametrize(
    ("training", "text"),
    [
        (None, ""),
        ({"parameters": 0, "gradients": 0, "optimizer": 0}, ""),
        ({"parameters": 5 * 10**6, "gradients": 0, "optimizer": 0}, "; parameters need about 5 MB"),
        (
            {"parameters": 10**6, "gradients": 10**6, "optimizer": 2 * 10**6},
            "; parameters, gradients and the optimizer's state need about 4 MB",
        ),
        (
            {"parameters": 10**6, "gradients": 10**6, "optimizer": None},
            "; parameters and gradients need about 2 MB, plus the optimizer's state",
        ),
        ({"parameters": "hostile"}, ""),
    ],
)
@pytest.mark.parametrize(
    ("expected", "rest"),
    [
        ((0, 0, 0), ""),
        (
            (64_321_000, 0, 0),
            ". Try --budget 64.4MB (an estimate: what has not run yet may need more)",
        ),
        ((64_321_000, 0, 80_000_000), ". Try --budget 64.4MB (without a budget it takes 80MB)"),
        ((90_000_000, 0, 80_000_000), ". Try --budget 80MB (what it takes without a budget)"),
        (
            (90_000_000, 64_321_000, 80_000_000),
            ". Try --budget 80MB (what it takes without a budget; 64.4MB may be enough)",
        ),
    ],
)
def test_the_advice(training, text, expected, rest):
    if training and not expected[0]:
        rest = ". It has not computed with its parameters yet, so it is unknown how much it will need"
    rest += "; `dtrrun profile` finds the least budget"
    told = advice("aten.mm", Advised.of(36_123_456, *expected), training)
    assert told == f"at least 36.2 MB for aten.mm{text}{rest}"


@pytest.mark.parametrize("plain", [0, 30, 80])
@pytest.mark.parametrize("likely", [0, 20, 50, 100])
@pytest.mark.parametrize("expected", [0, 20, 50, 100])
def test_budgets_are_in_order(expected, likely, plain):
    """What takes more than the plain run, or less than one operator, cannot be right."""
    found = Advised.of(40, expected, likely, plain)
    assert bool(found.expected) == bool(expected)
    assert found.likely <= found.expected or not expected
    for one in (found.likely, found.expected):
        assert not expected or found.least <= one <= (plain or 100)


def test_what_tensors_take_is_listed_beside_what_a_gpu_takes():
    overhead = {"context": 90, "guard": 80, "pools": 70, "workspaces": 60}
    tensors = {"optimizer state": 50, "parameter": 40, "gradient": 30}

    def listed(pinned):
        error = dtrrun.BudgetError("aten.mm", 1, 2, 3, pinned, frozenset(overhead))
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        return str(error).partition("can be evicted (")[2].partition(")")[0]

    context, state = "context 90 B", "optimizer state 50 B, parameter 40 B"
    assert listed(overhead | tensors) == f"{context}, guard 80 B, {state}"
    assert listed({"context": 90} | tensors) == f"{context}, {state}, gradient 30 B"
    assert listed(overhead | {"parameter": 40}) == f"{context}, guard 80 B, pools 70 B, parameter 40 B"


def test_what_training_needs_is_not_more_than_what_is_advised():
    assert "parameters" not in advice("aten.mm", Advised.of(2, 9, 0, 10), {"parameters": 11})


class Own(torch.optim.Optimizer):
    """A custom optimizer whose state cannot be foreseen."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["three"] = torch.zeros(3, *parameter.shape)


SIZE = 128 * 128 * 4


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1),
        (lambda p: torch.optim.Adam(p), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 3),
        (lambda p: torch.optim.RMSprop(p, centered=True), 2),
        (lambda p: torch.optim.Adagrad(p), 1),
        (lambda p: torch.optim.ASGD(p), 1),
        (Own, 3),
    ],
)
def test_what_an_optimizer_keeps_is_foreseen(optimizer, copies):
    """An optimizer's state is estimated from its class before the first step, and measured afterwards."""
    before = find_training("cpu").totals()
    layer = nn.Linear(128, 128, bias=False)
    stepping = optimizer(layer.parameters())
    for stepped in (False, True):
        if stepped:
            layer(torch.ones(1, 128)).sum().backward()
            stepping.step()
        found = find_training("cpu").totals()
        assert found["parameters"] - before["parameters"] == SIZE
        assert found["gradients"] - before["gradients"] == SIZE
        if isinstance(stepping, Own) and not stepped:
            assert found["optimizer"] is None
        else:
            assert found["optimizer"] - before["optimizer"] == pytest.approx(copies * SIZE, abs=1024)


def test_parameters_are_counted_as_the_memory_that_holds_them():
    """What a compiler has made to infer shapes has none; a subclass may wrap several tensors, or a part."""
    before = find_training("cpu").totals()
    layer = nn.Linear(128, 128, bias=False)
    fake = FakeTensorMode(allow_non_fake_inputs=True).from_tensor(layer.weight)
    one, other = torch.ones(128, 128), torch.ones(128, 128)
    wrapper = nn.Parameter(TwoTensor(one, other))
    training = find_training("cpu")
    assert training.totals()["parameters"] - before["parameters"] == 3 * SIZE
    found = training.present(lambda storage: storage._cdata)
    assert found[one.untyped_storage()._cdata] == found[other.untyped_storage()._cdata] == SIZE
    del fake, wrapper


class OfOneTensor(Own):
    """An optimizer whose state for a parameter is not a dict."""

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = torch.zeros(parameter.shape)


class Empty(Own):
    """An optimizer that does not initialize itself."""

    def __init__(self, parameters):
        pass

    def step(self):
        pass


@pytest.mark.parametrize("cls", [OfOneTensor, Empty])
def test_an_optimizer_of_any_kind(cls, monkeypatch):
    """The program gets the BudgetError, not an error raised while composing the advice."""
    monkeypatch.setattr("dtrrun.runtime.session.unnamed", unnamed)
    optimizer = cls([nn.Parameter(torch.ones(10))])
    optimizer.step()
    weight = nn.Parameter(torch.ones(1000, 1000))
    error = too_small(lambda: weight * 2)
    assert error.explained
    assert bool(error.expected_bytes) == (cls is OfOneTensor)
    assert ("could not work out which budget to try (AttributeError: " in error.hint) == (cls is Empty)


def test_a_parameter_whose_shape_is_not_known_yet():
    model = nn.Sequential(nn.Linear(10, 10), nn.LazyLinear(10))
    x = torch.ones(10_000, 10)
    error = too_small(lambda: model(x))
    assert error.expected_bytes > 10_000 * 10 * 4


def test_no_budget_is_named_before_the_program_has_begun_to_compute():
    """Before anything is computed the error names no budget, which might again be too small."""

    def program():
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        return model(torch.ones(4, 256))

    error = too_small(program, 600_000)
    assert error.expected_bytes == 0
    assert "Try " not in str(error)
    assert "has not computed with its parameters yet" in str(error)


def test_a_program_that_has_evaluated_has_begun():
    """Nothing in memory depends on the parameters any more, but operators have computed with them."""

    def program():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        if evaluates:
            with torch.no_grad():
                assert model(torch.ones(4, 64)).isfinite().all()
            kept = None
        else:  # a copy is no use of them
            kept = {name: one.detach().clone() for name, one in model.named_parameters()}
        return kept, torch.ones(1000, 1000)

    for evaluates in (False, True):
        error = too_small(program, 500_000)
        assert ("has not computed with its parameters yet" in str(error)) == (not evaluates)
        assert bool(error.expected_bytes) == evaluates


def test_what_is_frozen_has_no_gradients():
    before = find_training("cpu").totals()
    layer = nn.Linear(128, 128, bias=False).requires_grad_(False)
    found = find_training("cpu").totals()
    assert found["parameters"] - before["parameters"] == SIZE
    assert found["gradients"] == before["gradients"]
    del layer


def test_the_message_says_what_is_true():
    model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
    optimizer = torch.optim.Adam(model.parameters())
    error = too_small(lambda: model(torch.ones(4096, 128)).sum().backward())
    del optimizer
    text = str(error)
    assert text.startswith("CPU out of memory. dtrrun's budget of 100 kB is too small: ")
    assert f"at least {format_size_up(error.least_budget_bytes)} for {error.operator}" in text
    assert "parameters, gradients and the optimizer's state need about " in text
    assert error.training["optimizer"] >= 2 * 4 * SIZE
    assert "dtrrun.budget(None)" in text  # a block of code has no command line to profile
    assert "dtrrun profile" not in text
    assert "or more" not in text


@pytest.mark.parametrize(
    "program",
    [
        lambda: torch.ones(1000, 1000).sort(),  # what the first call allocates may exceed the prediction
        lambda: torch.ones(1000, 1000).tolist(),
    ],
)
def test_no_figure_of_nothing(program):
    text = str(too_small(program))
    assert " 0 B" not in text
    assert "needs 0" not in text


def test_a_leak_is_told_and_its_cure():
    """A list of outputs is named, unless the program is too large without it."""

    def program(leaks):
        kept = []
        model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(20):
            out = model(torch.randn(512, 256))
            kept += [out] if leaks else []
            out.square().mean().backward()
            del out
            optimizer.step()
            optimizer.zero_grad()

    error = too_small(lambda: program(True), 8_000_000)
    assert error.hint.startswith("`kept` in program at ")
    assert " of results: if less of them is enough (item(), argmax(), a mean), keep only that" in str(error)
    assert "kept" not in too_small(lambda: program(False), 1_500_000).hint


def test_logits_of_a_vocabulary_have_a_cure():
    table, layer = nn.Embedding(4000, 16), nn.Linear(16, 4000)

    def program(columns):
        x = torch.randint(0, columns, (4, 64))
        nn.functional.cross_entropy(layer(table(x)).flatten(0, 1)[:, :columns], x.flatten()).backward()

    text = str(too_small(lambda: program(4000), 9_000_000))
    assert "has logits of 256 x 4,000 at once: a loss that is computed in chunks" in text
    assert too_small(lambda: program(500), 4_000_000).hint == ""


def test_lowering_the_budget_below_what_is_held():
    weight, kept = nn.Parameter(torch.ones(10_000)), []
    with dtrrun.budget(100_000) as session:
        kept.append(weight * 2)
        with pytest.raises(dtrrun.BudgetError) as caught:
            session.set_budget("1kB")
        session.set_budget(None)
    text = str(caught.value)
    assert "set_budget exceeds it by " in text


def test_an_operator_whose_inputs_do_not_fit():
    """The replay of one input fails, but the advice must cover all inputs and the result together."""

    def program():
        kept = [torch.ones(2500) * number for number in range(20)]
        return torch.cat(kept)

    error = too_small(program)
    assert (error.operator, error.called) == ("aten.mul", "aten.cat")
    assert error.called_bytes >= 2 * 20 * 2500 * 4 > error.least_budget_bytes
    text = str(error)
    assert "aten.cat needs aten.mul to run again, and aten.mul needs " in text
    assert f"at least {format_size_up(error.called_bytes)} for aten.cat" in text
    with dtrrun.budget(error.called_bytes + 50_000):
        program()


def test_tensors_without_plain_storage_are_in_what_it_takes():
    def program(sparse):
        kept = [torch.ones(2500) * number for number in range(20)]
        held = torch.ones(2000).to_sparse_coo().clone() if sparse else None
        return torch.cat(kept), held

    plain, more = too_small(lambda: program(False)), too_small(lambda: program(True))
    assert (plain.called, more.called) == ("aten.cat", "aten.cat")
    assert more.called_bytes >= plain.called_bytes + 2000 * (4 + 8)


ON_A_CPU = "DefaultCPUAllocator: can't allocate memory"


def accelerate(text):
    return " out of memory." in text or ON_A_CPU in text


def lightning(text):
    return (
        "CUDA" in text and "out of memory" in text
    ) or "DefaultCPUAllocator: can't allocate memory" in text


def fairseq(text):
    return "out of memory" in text


def detectron2(text):
    return "CUDA out of memory. " in text


@pytest.mark.parametrize(
    ("device", "finders"),
    [("cpu", [accelerate, lightning, fairseq]), ("cuda", [accelerate, lightning, fairseq, detectron2])],
)
def test_batch_size_finders_recognise_it(device, finders):
    """They search the text of a RuntimeError that has one argument, and retry with a smaller batch."""
    error = too_small(lambda: torch.ones(1000, 1000))
    known = error._known
    error.explain(lambda _: known, device_type=device)
    assert isinstance(error, RuntimeError)
    (text,) = error.args
    assert [finder.__name__ for finder in finders if not finder(text)] == []
    assert ("DefaultCPUAllocator" in text) == (device == "cpu")  # no false statement
    assert "\n" not in text


def test_it_goes_to_another_process():
    error = too_small(lambda: torch.ones(1000, 1000))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is dtrrun.BudgetError
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_a_program_makes_another_of_its_kind():
    """The error can be built from a message alone, as libraries do to extend a message and raise it again."""
    error = too_small(lambda: torch.ones(1000, 1000))
    again = type(error)(f"{error}\nin the second layer")
    assert type(again) is dtrrun.BudgetError
    assert str(again) == f"{error}\nin the second layer"
    assert vars(again).keys() == vars(error).keys()
    assert str(pickle.loads(pickle.dumps(again))) == str(again)
    assert str(dtrrun.BudgetError()) == ""


def test_workers_pass_it_on():
    """Workers of `nn.DataParallel` and of data loaders raise it again in the parent."""
    wrapper = torch._utils.ExceptionWrapper
    error = too_small(lambda: torch.ones(1000, 1000))
    passed = wrapper((type(error), error, error.__traceback__), where="in a worker")
    with pytest.raises(dtrrun.BudgetError, match=r"(?s)in a worker.*budget of 100 kB is too small"):
        passed.reraise()


def test_its_name_is_the_one_that_a_program_knows():
    assert f"{dtrrun.BudgetError.__module__}.{dtrrun.BudgetError.__qualname__}" == "dtrrun.BudgetError"


# -- errors that the program catches -------------------------------------------------------------------------


@pytest.fixture
def scans(monkeypatch):
    """The calls so far that have looked through all of Python's objects: full collections, and for advice."""
    found = []
    collect = gc.collect
    monkeypatch.setattr(
        gc, "collect", lambda *young: found.append("collect") if not young else collect(*young)
    )
    monkeypatch.setattr(
        "dtrrun.runtime.observe.holding.find_training",
        lambda *given: found.append("find") or find_training(*given),
    )
    return found


def refused(operator=lambda: torch.ones(1000, 1000)):
    with pytest.raises(dtrrun.BudgetError) as caught:
        operator()
    return caught.value


def test_an_error_that_nobody_reads_costs_no_search(scans, monkeypatch):
    """A program may try a large batch at every step: only the first error is explained unasked."""
    monkeypatch.setattr("dtrrun.core.garbage.REST", 1_000_000)  # a collection takes nothing in a test
    x = torch.ones(100)
    with dtrrun.budget(100_000, "cpu"):
        scans.clear()  # those of the session before
        for _ in range(20):
            refused()
        assert scans == ["find"]  # what exceeds the whole budget does not fit whatever is collected
        for _ in range(20):
            refused(lambda: x.repeat(180) + x.repeat(180))
    assert scans[1:].count("find") == 0
    assert scans.count("collect") == TRIES


def test_an_error_that_is_read_late_says_what_was_true_when_it_was_raised():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    with dtrrun.budget(600_000, "cpu", cost="model"):
        loss = model(torch.ones(16, 64)).square().mean()
        first, at_once, late = refused(), refused(), refused()
        assert str(at_once) == str(first)
        loss.backward()
        optimizer.step()
        refused()
    assert late.args == at_once.args
    assert at_once.holds is not None
    assert late.holds is None  # the graph of that moment has gone
    assert late.expected_bytes == at_once.expected_bytes > 0
    assert repr(late) == f"BudgetError({late.args[0]!r})"


def test_an_error_that_is_not_read_does_not_keep_itself_alive():
    gone = []
    with dtrrun.budget(100_000, "cpu"):
        for _ in range(2):
            try:
                torch.ones(1000, 1000)
            except dtrrun.BudgetError as error:
                gone.append(weakref.ref(error))
    assert [one() for one in gone] == [None, None]


def test_a_program_without_the_collector_gets_no_collection(scans):
    """It chooses itself when its finalizers run."""
    gc.disable()
    try:
        with dtrrun.budget(100_000, "cpu"):
            error = refused(lambda: torch.ones(100, 200) + torch.ones(100, 200))
    finally:
        gc.enable()
    assert "collect" not in scans
    assert "gc.disable() is respected" in str(error)
