"""In-place operators on lists of tensors, which keep no recipes (`native/lists.h`)."""

from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from programs import batch, bits, chain, check, check_stress, mlp, plain, run_inside, train
from torch.utils._python_dispatch import TorchDispatchMode

import dtrrun
from dtrrun.runtime.dispatch.interposer import Interposer
from tests.care import budget


class Taken:
    """The calls that went the short way for lists, in all sessions so far."""

    def __init__(self):
        self.ended = Counter()  # those of sessions that have ended, by operator
        self.interposer = None  # of the present session

    def by_name(self):
        now = self.interposer.native.list_calls() if self.interposer else {}
        return self.ended + Counter(now)

    def __len__(self):
        return self.by_name().total()


@pytest.fixture
def taken(monkeypatch):
    calls, begin, end = Taken(), Interposer.begin, Interposer.end

    def begun(interposer):
        begin(interposer)
        calls.interposer = interposer

    def ends(interposer):
        calls.ended, calls.interposer = calls.by_name(), None
        end(interposer)

    monkeypatch.setattr(Interposer, "begin", begun)
    monkeypatch.setattr(Interposer, "end", ends)
    return calls


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.01, momentum=0.9, weight_decay=0.1, foreach=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.01, amsgrad=True, foreach=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01, centered=True, momentum=0.5, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.01, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, taken):
    def program():
        model = mlp(4)
        trained = train(model, batch, OPTIMIZERS[name](model.parameters()), steps=6)
        return trained, chain(torch.randn(64, 64), 6)

    check(program, host=False)
    assert taken


def test_clipped_gradients(taken):
    def program():
        model = mlp(4)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        seen = []
        for _ in range(5):
            inputs, targets = batch()
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True))
            seen += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
        return seen, model

    check(program, host=False)
    assert any("foreach_mul_" in name for name in taken.by_name())


def test_lists_of_parts_are_written_to_again_where_they_were():
    """The tensors differ only in their position in the storages."""

    def program():
        made = []
        for place in (0, 1, 2, 1, 0):
            made.append(torch.arange(256.0).view(4, 64).sin())
            torch._foreach_mul_([made[-1][place]], 2.0)
        return made

    check(program)


def constants(count=3):
    return [
        torch.tensor(torch.linspace(0.1 + one, 1 + one, 64 * 32).reshape(64, 32).tolist())
        for one in range(count)
    ]


def test_what_was_computed_from_the_old_values_is_rescued(taken):
    def program():
        many = constants()
        kept = []
        for _ in range(3):
            torch._foreach_mul_(many, 0.9)
        for step in range(8):
            torch._foreach_mul_(many, 0.9)  # nothing depends on them
            torch._foreach_mul_(many, 0.9)
            if step % 2:
                kept += [torch.sin(many[step % 3] * step), *chain(many[1], 2)[1:]]
        return kept, many

    check_stress(program, host=False)
    assert taken


def test_recipes_name_the_version_that_they_read(taken):
    """A tensor in memory at the mutation, and evicted later, has lost its recipe by then."""
    many = constants()
    expected = [one.exp() for one in many]
    with dtrrun.budget(None) as session:
        for _ in range(3):
            torch._foreach_add_(many, 0.0)
        made = [one.exp() for one in many]
        torch._foreach_add_(many, 1.0)
        assert len(taken) == 3
        torch._foreach_add_(many, 1.0)
        for one, old in zip(many, made, strict=True):
            assert session.callbacks.version_of(old).operation.inputs[0] is not session.callbacks.version_of(
                one
            )
        session.dtr.eviction.warn_only = True
        session.set_budget(1)
    assert all(map(torch.equal, made, expected))


def test_evicted_inputs_come_back(taken):
    def program():
        many = constants()
        kept = []
        for step in range(6):
            evictable = [torch.sin(torch.randn(64, 32)) for _ in many]
            kept += [one + step for one in evictable]
            torch._foreach_add_(many, evictable, alpha=0.5)
            torch._foreach_add_(many, evictable, alpha=0.5)
        return kept, many

    check(program, host=False)
    assert taken


def test_new_state_among_old(taken):
    """One target has no recipe, so none gets one; the recipes of the others are dropped."""

    def program():
        state = constants(1)
        kept = []
        for step in range(6):
            made = torch.sin(torch.randn(64, 32))  # the last one made is still in memory
            torch._foreach_mul_([*state, made], 0.5)
            kept += [made, made + step]
            if step % 2:  # the other one's recipe needs the old values: then it is a call like others
                kept.append(state[0] * 2)
            torch._foreach_mul_([*state, made], 0.5)
        return kept, state

    expected = plain(program)
    check_stress(program, expected)
    assert run_inside(program, None, careful=False)[0] == expected
    assert len(taken) > 8


def test_autograd_sees_the_writes(taken):
    def program():
        weights = [one.requires_grad_() for one in constants()]
        seen = []
        for _ in range(4):
            loss = sum((weight * weight).sum() for weight in weights)
            with torch.no_grad():
                torch._foreach_mul_(weights, 0.5)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            seen += [weights, [one._version for one in weights]]
        return seen

    assert run_inside(program, None, careful=False)[0] == plain(program)
    assert taken


class Above(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("careful", [False, True])
def test_writes_count_as_without_a_session(taken, careful):
    """PyTorch counts them in the operators that list operators call in turn; below a mode, it does not."""

    def program():
        seen = []
        for context in (nullcontext(), Above()):
            leaves = [one.requires_grad_() for one in constants()]
            for many in (constants(), leaves, [one.sin() for one in constants()]):
                for _ in range(4):
                    with context, torch.no_grad():
                        torch._foreach_mul_(many, 0.5)
                    seen.append([one._version for one in many])
        return seen

    expected = program()
    with budget("1GB", careful=careful):
        assert program() == expected
    assert bool(taken) is not careful


def test_what_other_code_can_write_to_stays_so(taken):
    """A parameter over an array is trusted as long as the array does not change."""
    array = np.linspace(0, 1, 64 * 64, dtype=np.float32).reshape(64, 64)
    many = [torch.nn.Parameter(torch.from_numpy(array)), torch.nn.Parameter(torch.ones(64, 64))]
    x = torch.ones(4, 64)
    with dtrrun.budget("1GB") as session, torch.no_grad():
        for _ in range(3):
            torch._foreach_mul_(many, 0.5)
        kept = x @ many[0]
        torch._foreach_mul_(many, 0.5)
        made = x @ many[0]
        expected = made.tolist()
        array[:] = 7
        session.dtr.eviction.warn_only = True
        session.set_budget(1)
        assert made.tolist() == expected
        assert len(kept)
    assert len(taken) == 3


def test_one_memory_many_times(taken):
    """The list has views of one storage, the same tensor twice, and overlapping parts."""

    def program():
        [flat] = constants(1)
        views = [*flat.split(16), flat[:3], flat[2:5], flat, flat]
        kept = []
        for step in range(5):
            kept += chain(flat * step, 2)
            torch._foreach_mul_(views, 0.9)
            torch._foreach_add_(views, views, alpha=0.1)
            torch._foreach_add_(views, step)
        return kept, flat

    check_stress(program, host=False)
    assert taken


def test_complex_numbers_are_not_taken_for_as_many_bytes_of_others(taken):
    """Conjugate views are older than the session."""
    real = [torch.tensor([[0.5, 2.0], [3.0, 4.0]], dtype=torch.float64) for _ in range(2)]
    imaginary = [torch.tensor([[0.5 + 1j, 2.0], [3.0, 4.0j]], dtype=torch.complex64) for _ in range(2)]
    conjugate = [one.conj() for one in imaginary]

    def program():
        first, second = [one.clone() for one in real], [one.clone() for one in imaginary]
        for _ in range(4):
            torch._foreach_mul_(first, [one.t() for one in real])
            torch._foreach_mul_(second, conjugate)
        return first, second

    expected = plain(program)
    with dtrrun.budget(None) as session:
        first, second = [one.clone() for one in real], [one.clone() for one in imaginary]
        for one in (*first, *second):
            session.pin(one)
        for _ in range(4):
            torch._foreach_mul_(first, [one.t() for one in real])
            torch._foreach_mul_(second, conjugate)
    assert bits([first, second]) == expected[: len(bits([first, second]))]
    assert len(taken) == 6


def test_an_operator_that_fails_half_way(taken):
    def program():
        many = constants()
        kept = []
        for step in range(6):
            kept.append(many[0] * 2 + step)
            torch._foreach_add_(many, 1.0)
            torch._foreach_add_(many, [many[0], many[1], many[2]])
            with pytest.raises(RuntimeError):
                torch._foreach_add_(many, [many[0], many[1], many[2].view(-1)[:2048].view(32, 64)])
        return kept, many

    check_stress(program, host=False)
    assert taken


def test_what_was_made_before_an_operator_failed_half_way(taken):
    """It is in memory then, and would be recomputed from the new values if it were evicted later."""
    many = constants()
    right = constants()
    wrong = [*right[:2], right[2].view(32, 64)]
    with dtrrun.budget("1GB") as session:
        for _ in range(3):
            torch._foreach_add_(many, right)
        made = many[0] * 2
        expected = made.tolist()
        with pytest.raises(RuntimeError):
            torch._foreach_add_(many, wrong)
        session.dtr.eviction.warn_only = True
        session.set_budget(1)
        assert made.tolist() == expected
    assert len(taken) == 2


def test_a_first_call_that_fails_has_no_cost(taken):
    with dtrrun.budget(None) as session:
        many, flat = constants(), [one.view(-1) for one in constants()]
        for one in (*many, *flat):
            session.pin(one)
        with pytest.raises(RuntimeError):
            torch._foreach_add_(many, flat)
        for _ in range(3):
            torch._foreach_add_(many, many)
        costs = [one.cost for one in session.callbacks.signatures.all() if "_foreach_" in one.operator.name]
        assert costs
        assert all(cost > 0 for cost in costs)
    assert len(taken) == 2


def test_inference_mode(taken):
    def program():
        with torch.inference_mode():
            inside = [torch.sin(torch.randn(32, 32)) for _ in range(3)]
        outside = constants()
        for _ in range(4):
            with torch.inference_mode():
                torch._foreach_mul_(inside, 0.9)
                torch._foreach_mul_(outside, 0.9)
        return [one.clone() for one in inside], outside, chain(torch.randn(64, 64), 3)

    check_stress(program, host=False)


@pytest.mark.parametrize("careful", [False, True])
def test_inference_tensors_outside_of_inference_mode(careful):
    """PyTorch raises an error after it has written to the first of them."""

    def program():
        with torch.inference_mode():
            many = constants()
        for _ in range(4):
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                torch._foreach_mul_(many, 0.5)
        return [one.tolist() for one in many]

    expected = program()
    with budget("1GB", careful=careful):
        assert program() == expected


def test_a_budget_that_changes(taken):
    """What was known of the operators is forgotten, and learned again."""
    many = constants()
    with dtrrun.budget("1GB") as session:
        for nbytes in (1 << 29, 1 << 30):
            session.set_budget(nbytes)
            before = len(taken)
            for _ in range(4):
                torch._foreach_mul_(many, 0.9)
            assert len(taken) == before + 3


def test_lists_that_can_all_be_recomputed():
    """They get a recipe, as a single tensor does."""

    def program():
        kept = []
        for _ in range(6):
            a = [torch.randn(16, 16).sin() for _ in range(6)]
            b = torch._foreach_sqrt(torch._foreach_abs(a))
            before = [one.exp() for one in b]
            torch._foreach_div_(b, 1.5)
            torch._foreach_mul_(b, [0.5 * place for place in range(6)])
            torch._foreach_mul_(b, [1, 2.5, 3, 4, 5, 6])
            torch._foreach_add_(b, torch.tensor(2.0))
            torch._foreach_addcdiv_(b, a, before)
            kept += [a, b, before]
        return kept

    check(program)


def test_lists_with_the_same_memory_twice():
    def program():
        kept = []
        for _ in range(6):
            a = [torch.randn(16, 16).sin() for _ in range(3)]
            views = [a[0][:4], a[0][8:], a[1].t(), a[1]]
            torch._foreach_mul_(views, 2.0)
            torch._foreach_add_([a[2], a[2]], 1.0)
            torch._foreach_add_(a, a)
            kept += [a, views]
        return kept

    check(program)


def test_what_the_program_still_has_of_weights_that_change():
    """Some of it is evicted, and is brought back for the change."""

    def program():
        kept = []
        weights = [torch.randn(16, 16) for _ in range(4)]
        for _ in range(8):
            hidden = [(one @ one).sin() for one in weights]
            gradients = [one.cos() for one in hidden]
            kept += [hidden, gradients]
            torch._foreach_add_(weights, gradients, alpha=0.1)
            torch._foreach_mul_(weights, 0.9)
            kept.append([one.clone() for one in weights])
        return kept

    check(program)
