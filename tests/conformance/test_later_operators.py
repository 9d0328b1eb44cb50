"""Operators that are registered or removed during a session: each call comes to it, as a whole."""

import gc
import itertools
import subprocess
import sys
import threading

import pytest
import torch
from programs import chain, check_stress

import dtrrun

numbers = itertools.count()


def fresh():
    """Return a namespace that is not in use."""
    return f"dtrrun_later_{next(numbers)}"


def by_decorator(space):
    """Define operators in Python as libraries do: with one kernel for all backends."""

    @torch.library.custom_op(f"{space}::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    return twice


def for_all_backends(space):
    library = torch.library.Library(space, "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: torch.from_numpy(x.numpy() * 2), "CompositeExplicitAutograd")
    return library


def for_one(space):
    library = torch.library.Library(space, "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: torch.from_numpy(x.numpy() * 2), "CPU")
    return library


def in_two_steps(space):
    """Register other operators between the operator's definition and its kernel."""
    library = torch.library.Library(space, "DEF")
    library.define("twice(Tensor x) -> Tensor")
    torch.ones(3).add_(1)
    library.impl("twice", lambda x: torch.from_numpy(x.numpy() * 2), "CompositeExplicitAutograd")
    return library


def in_another_thread(space):
    made = []
    thread = threading.Thread(target=lambda: made.append(by_decorator(space)))
    thread.start()
    thread.join()
    return made


WAYS = (by_decorator, for_all_backends, for_one, in_two_steps, in_another_thread)


@pytest.mark.parametrize("define", WAYS)
def test_the_first_call_comes(define):
    with dtrrun.budget(None) as session:
        space = fresh()
        kept = define(space)
        x = torch.arange(6.0)
        assert getattr(torch.ops, space).twice(x).tolist() == [0, 2, 4, 6, 8, 10]
        assert [count for name, count in session.interposer.python_calls.items() if space in name] == [1]
        del kept


@pytest.mark.parametrize("define", WAYS)
def test_before_the_session(define):
    """Operators defined before the session reach it, even if another session has run before."""
    with dtrrun.budget(None):
        torch.ones(3)
    space = fresh()
    kept = define(space)
    with dtrrun.budget(None) as session:
        getattr(torch.ops, space).twice(torch.ones(3))
        assert [count for name, count in session.interposer.python_calls.items() if space in name] == [1]
    del kept


@pytest.mark.parametrize("define", WAYS)
def test_what_they_make_is_recomputed(define):
    def program():
        kept = define(space := fresh())
        twice = getattr(torch.ops, space).twice
        made = [chain(twice(one)) for one in chain(torch.randn(32, 32))]
        del kept
        return made

    check_stress(program)


def test_a_factory():
    """Its kernel selects the backend."""

    def program():
        @torch.library.custom_op(f"{fresh()}::made", mutates_args=())
        def made(n: int, device: torch.device) -> torch.Tensor:
            return torch.from_numpy(torch.arange(float(n), device=device).numpy() * 2)

        return [chain(made(n, torch.device("cpu"))) for n in range(40, 60)]

    check_stress(program)


def test_a_composite():
    def program():
        library = torch.library.Library(space := fresh(), "DEF")
        library.define("wave(Tensor x) -> Tensor")
        library.impl("wave", lambda x: x.sin() * 2 + torch.ones(32), "CompositeImplicitAutograd")
        wave = getattr(torch.ops, space).wave
        kept = chain(torch.randn(32, 32), 3)
        with torch.inference_mode():
            kept += [wave(one) for one in chain(torch.randn(32, 32), 3)]
        x = torch.randn(32, 32, requires_grad=True)
        made = [wave(x), *(wave(one) for one in kept[:3])]
        sum(one.sum() for one in made).backward()
        return kept, made, x.grad

    check_stress(program)


def test_one_that_is_removed_and_defined_again():
    """The new one has the same name, and a different kernel of a different kind."""

    def program():
        space, made, kinds = fresh(), [], ("CompositeExplicitAutograd", "CPU", "CompositeImplicitAutograd")
        for step in range(6):
            library = torch.library.Library(space, "DEF")
            library.define("scaled(Tensor x) -> Tensor")
            library.impl("scaled", lambda x, step=step: x.cos() * step, kinds[step % 3])
            made += [getattr(torch.ops, space).scaled.default(one) for one in chain(torch.randn(16, 16))]
            with torch.inference_mode():
                made.append(getattr(torch.ops, space).scaled.default(made[-1].clone()))
            library._destroy()
            delattr(torch.ops, space)
            del library
            gc.collect()
            made += chain(made[-1].clone(), 3)
        return made

    check_stress(program)


def test_a_kernel_of_theirs_over_one_of_pytorchs():
    """Also when it is removed, and for sparse tensors, whose kernels rank above the key of one way in."""

    def program():
        kept = []
        for _ in range(2):
            library = torch.library.Library("aten", "IMPL")
            x = torch.eye(16).mul_(3).to_sparse()
            kept += [torch.neg(x).to_dense(), torch.zeros(16, 16) + 1]
            library.impl("neg", lambda one: one * 5, "SparseCPU", allow_override=True)
            kept += [torch.neg(x).to_dense(), *chain(torch.randn(16, 16))]
            library._destroy()
            kept += [torch.neg(x).to_dense(), torch.erfinv(kept[-1] / 40)]
        return kept

    check_stress(program)


REMOVED = """
import torch
x = torch.eye(16).to_sparse()
library = torch.library.Library("aten", "IMPL")
library.impl("neg", lambda one: one * 5, "SparseCPU", allow_override=True)
import dtrrun
with dtrrun.budget("1MB") as session:
    found = [torch.neg(x).to_dense()[0, 0].item()]
    library._destroy()
    found.append(torch.neg(x).to_dense()[0, 0].item())
with dtrrun.budget("1MB") as session:
    found.append(torch.neg(x).to_dense()[0, 0].item())
print(found)
"""


def test_a_kernel_of_theirs_that_was_there_before_all_sessions():
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", REMOVED], capture_output=True, text=True)
    assert (ended.stderr, ended.stdout) == ("", "[5.0, -1.0, -1.0]\n")


def test_threads_that_register_operators():
    def program():
        found, stop = [], threading.Event()
        registering = threading.Lock()  # two at once: PyTorch's "dictionary changed size during iteration"

        def register():
            for _ in range(30):
                with registering:
                    define = by_decorator(fresh())
                found.append(float(define(torch.ones(2)).sum()))
            stop.set()

        threads = [threading.Thread(target=register) for _ in range(2)]
        for thread in threads:
            thread.start()
        kept = chain(torch.randn(32, 32), 60)
        for thread in threads:
            thread.join()
        return kept, found

    check_stress(program)
