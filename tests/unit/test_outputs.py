"""Operators on lists of tensors, as optimizers on a GPU call them."""

import torch

import dtrrun
from dtrrun.runtime.storage import storage_of


def test_a_recipe_names_each_input_once():
    with dtrrun.budget("1GB") as session:
        one, other = torch.ones(4).mul(2.0), torch.ones(4).mul(3.0)
        [product, _, _] = torch._foreach_mul([one, other, one], [other, one, one])
        op = session.ledger.version_of(storage_of(product)).operation
        assert len(op.tensors) == 6
        assert len(op.inputs) == 2
