"""Memory shared with NumPy, changed there while other tensors are evicted; forked children that use it."""

import multiprocessing
import os

import numpy
import pytest
import torch
from programs import bits, chain, check_stress, mlp

import dtrrun


def test_arrays_under_tensors_change_between_operators():
    def program():
        array = numpy.linspace(0, 1, 64 * 32, dtype=numpy.float32).reshape(64, 32)
        ours = torch.from_numpy(array)
        kept = []
        for step in range(6):
            kept += chain(ours * step, 3)
            kept.append(ours[3:7] + kept[-1][3:7])
            array[step] = step  # what was computed from the old rows can no longer be recomputed
            array *= 0.9
            kept.append(torch.as_tensor(array).exp())
        return kept, ours

    check_stress(program)


def test_arrays_over_tensors_change_between_operators():
    def program():
        kept = []
        for step in range(4):
            x = torch.sin(torch.randn(64, 32))
            before = x * 2
            array = x[8:].numpy()
            kept += chain(x, 3)
            array[0] = step
            numpy.multiply(array, 0.5, out=array)
            kept += [x, before, x.exp(), x.t() @ before]
            array[1:3] = kept[-2].numpy()[1:3]
            x.add_(1)  # NumPy and PyTorch write in turn
            kept += [x * 3, float(array.sum())]
        return kept

    check_stress(program)


def test_a_buffer_is_refilled_while_its_batches_are_evicted():
    """Data loaders that read into one array do this: `tensor(array)` copies, `from_numpy` does not."""

    def program():
        model = mlp(3)
        page = numpy.zeros((32, 32), dtype=numpy.float32)
        kept = []
        for step in range(4):
            page[:] = numpy.sin(numpy.arange(32 * 32, dtype=numpy.float32) + step).reshape(32, 32)
            copied, shared = torch.tensor(page), torch.from_numpy(page)
            kept += [model(copied), model(shared), copied * 2, shared.cos()]
            sum(one.sum() for one in kept[-4:]).backward()
        return kept, model

    check_stress(program)


class NumpySine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(numpy.sin(x.numpy()))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.from_numpy(numpy.cos(x.detach().numpy()))


def test_a_custom_function_with_a_numpy_forward():
    def program():
        model = mlp(5, 32)
        kept = []
        for _ in range(2):
            x = torch.randn(64, 32)
            for layer in model:
                x = NumpySine.apply(layer(x))
                kept.append(x)
            (x * torch.sin(x)).sum().backward()
        return kept, model

    check_stress(program)


def child(model, x, kept, queue):
    y = NumpySine.apply(model(x))
    y.sum().backward()
    queue.put((repr(bits([y, kept, [p.grad for p in model.parameters()]])), os.getpid()))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_processes_of_multiprocessing_train_on_what_was_evicted():
    torch.manual_seed(3)
    model, x = mlp(3), torch.randn(64, 32)
    context = multiprocessing.get_context("fork")

    def run(kept):
        queue = context.Queue()
        children = [context.Process(target=child, args=(model, x, kept, queue)) for _ in range(2)]
        for one in children:
            one.start()
        told = [queue.get(timeout=300) for _ in children]
        for one in children:
            one.join(60)
        assert [one.exitcode for one in children] == [0, 0]
        return [bits_of for bits_of, _ in told]

    expected = run(chain(torch.sin(x)))
    with dtrrun.budget(1, over_budget="evict") as session:
        kept = chain(torch.sin(x))
        assert session.report()["evicted_bytes"] > 0
        found = run(kept)
        after = bits(kept)
        assert session.running
    assert found == expected
    assert after == bits(kept) == bits(chain(torch.sin(x)))
