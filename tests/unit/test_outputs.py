"""dtrrun.runtime.dispatch.outputs: operators on lists of tensors, as optimizers on a GPU call them."""

import sys

import pytest
import torch

import dtrrun
from dtrrun.runtime.storage import storage_of


def calls_in(function):
    """Count Python calls and generator resumptions: a measure that other processes do not disturb."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("where", ["new", "in place"])
def test_the_cost_of_a_list_of_tensors_grows_with_its_length(where):
    multiply = torch._foreach_mul if where == "new" else torch._foreach_mul_

    def calls(length):
        with dtrrun.budget("1GB") as session:
            session.slow_path.reasons.add("this test")
            tensors = [torch.ones(4).mul(2.0) for _ in range(length)]
            multiply(tensors, 2.0)  # the first call learns the sizes
            return calls_in(lambda: multiply(tensors, 2.0))

    short, long = calls(50), calls(800)
    assert long < 1.5 * 16 * short


def test_a_recipe_names_each_input_once():
    with dtrrun.budget("1GB") as session:
        one, other = torch.ones(4).mul(2.0), torch.ones(4).mul(3.0)
        [product, _, _] = torch._foreach_mul([one, other, one], [other, one, one])
        op = session.ledger.version_of(storage_of(product)).operation
        assert len(op.tensors) == 6
        assert len(op.inputs) == 2
