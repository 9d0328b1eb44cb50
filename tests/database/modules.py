"""PyTorch's module database: three training steps of every module on each of its samples."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.testing._internal.common_modules import module_db

from tests.database.judge import Probe
from tests.database.operators import Case, ramp
from tests.database.replicas import Replicas, tensors

SAMPLES = 8  # maximum per module, data type and mode
STEPS = 3


def names() -> list[str]:
    return sorted({info.name for info in module_db})


def cases(name: str) -> Iterator[Case]:
    for info in module_db:
        if info.name == name:
            for dtype in _dtypes(info):
                for training in (True, False) if info.train_and_eval_differ else (True,):
                    torch.manual_seed(0)
                    samples = info.module_inputs_func(info, "cpu", dtype, True, training)
                    for which, sample in enumerate(samples[:SAMPLES]):
                        program = partial(_train, info.module_cls, sample, dtype, training)
                        yield Case(
                            f"{name} {dtype} {'training' if training else 'eval'} sample {which}", program
                        )


def _dtypes(info: Any) -> list[torch.dtype]:
    supported = info.supported_dtypes("cpu")
    others = [torch.bfloat16, torch.complex64]
    return [torch.float32] * (torch.float32 in supported) + [one for one in others if one in supported][:1]


def _train(make: Any, sample: Any, dtype: torch.dtype, training: bool, probe: Probe) -> Any:
    made = sample.constructor_input
    module = make(*Replicas().of(made.args), **Replicas().of(made.kwargs)).to(dtype).train(training)
    weights = [
        weight for weight in module.parameters() if not isinstance(weight, torch.nn.UninitializedParameter)
    ]
    optimizer = torch.optim.SGD(weights, lr=0.01, momentum=0.9) if weights else None
    kept: list[Any] = []
    for _ in range(STEPS):
        copies = Replicas()
        given = sample.forward_input
        args, kwargs = copies.of(tuple(given.args)), copies.of(dict(given.kwargs))
        probe()
        result = module(*args, **kwargs)
        probe(result)
        outputs = [one for one in tensors(result) if one.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, ramp(outputs))
        probe()
        kept += [result, [leaf.grad for leaf in copies.leaves], [weight.grad for weight in weights]]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return [kept, module, optimizer]
