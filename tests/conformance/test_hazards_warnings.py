"""Warnings: the program gets those of a plain run, at the same lines, and none from dtrrun's operators."""

import threading
import warnings

import pytest
import torch
from programs import check_stress

import dtrrun
from dtrrun.core.observer import DecisionObserver


@torch.library.custom_op("dtrrun_tests::warns", mutates_args=())
def warns(x: torch.Tensor) -> torch.Tensor:
    warnings.warn("from Python", stacklevel=2)
    return x.sin()


@warns.register_fake
def _(x):
    warnings.warn("from a shape function", stacklevel=2)
    return torch.empty_like(x)


OPERATORS = {
    "a kernel": lambda x: x[:1].std(0),
    "resized": lambda x: torch.add(x, 1, out=torch.zeros(3)),
    "Python": lambda x: warns(x),
    "a gradient": lambda x: torch.autograd.grad(
        (leaf := x.clone().requires_grad_())[:1].std(0).sum() + leaf.sum(), leaf
    )[0],
}


def warned(function, action):
    """Return the warnings of a program, under a filter, whose results are evicted and read again."""

    def program():
        told = []
        with warnings.catch_warnings():
            warnings.simplefilter(action)
            warnings.showwarning = lambda message, kind, file, line, *_: told.append((str(message), line))
            results = [torch.sin(function(torch.rand(4, 400) + step)) for step in range(4)]
            for _ in range(2):
                told.append([result.sum().item() for result in results])
            told.append([entry[0] for entry in warnings.filters].count(action))
        return told

    return program


@pytest.mark.parametrize("action", ["always", "once"])
@pytest.mark.parametrize("name", OPERATORS)
def test_a_replay_is_silent(name, action):
    check_stress(warned(OPERATORS[name], action))


def test_a_replay_of_a_kernel_that_the_program_has_replaced_is_silent():
    """The kernel is in Python, and elsewhere the original runs again without Python."""

    def reciprocal(x):
        warnings.warn("from the program's kernel", stacklevel=1)
        return torch.pow(x, -1)

    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that there was a kernel
        library.impl("reciprocal", reciprocal, "CPU")
        check_stress(warned(torch.reciprocal, "always"))


def test_what_was_told_once_is_not_told_again():
    def program():
        told = []
        warnings.showwarning = lambda message, *_: told.append(str(message))
        namespace = {"torch": torch}
        exec("def degrees(x):\n return x[:1].std(0)", namespace)  # it has its own registry of warnings
        results = []
        for step in range(4):
            results.append(torch.sin(namespace["degrees"](torch.rand(4, 400) + step)))
            told.append([result.sum().item() for result in results])
        return told

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        check_stress(program)


def test_a_replay_raises_no_warning_that_is_an_error():
    def program():
        x = torch.rand(4, 400)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = [torch.sin(x[:1].std(0) + x.exp().mean(0) + step) for step in range(4)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sums = [result.sum() for result in results]
            with pytest.raises(UserWarning):
                x[:1].std(0)
        return sums

    check_stress(program)


@pytest.mark.parametrize("stream", [None, object(), "closed"])
def test_a_program_without_standard_error(monkeypatch, capsys, tmp_path, stream):
    """dtrrun's own lines are lost then. They neither raise errors nor go to the program's output."""
    if stream == "closed":
        stream = (tmp_path / "closed").open("w")
        stream.close()
    with dtrrun.budget(None) as session:
        monkeypatch.setattr("sys.stderr", stream)
        session.warn("a line of ours")
    assert session.warnings == {"a line of ours": 1}
    assert not capsys.readouterr().out


def test_other_threads_are_warned_meanwhile():
    """A replay in one thread does not filter the warnings of another."""
    began, done = threading.Event(), threading.Event()
    told = []

    def other():
        began.wait(60)
        warnings.warn("from another thread", stacklevel=1)
        done.set()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: told.append(str(message))
        with dtrrun.budget(1, over_budget="evict") as session:
            thread = threading.Thread(target=other)
            thread.start()
            x = torch.rand(4, 400)
            results = [torch.sin(x + step) for step in range(4)]

            class Waiting(DecisionObserver):
                def rematerialized(self, *_):
                    began.set()
                    done.wait(60)

            session.ledger.decision_observers.append(Waiting())
            sums = [result.sum() for result in results]
            thread.join()
            assert session.report()["rematerializations"]
            assert sums
    assert told == ["from another thread"]
