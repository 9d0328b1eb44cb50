"""PyTorch's optimizer database: three training steps with every optimizer, in each of its variants."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_optimizers import optim_db

from tests.database.judge import Probe
from tests.database.operators import Case
from tests.database.replicas import Replicas

STEPS = 3


def names() -> list[str]:
    return sorted(info.optim_cls.__name__ for info in optim_db)


def cases(name: str) -> Iterator[Case]:
    for info in optim_db:
        if info.optim_cls.__name__ == name:
            for given in info.optim_inputs_func("cpu"):
                for way in _ways(info):
                    options = {**given.kwargs, **way}
                    if info.step_requires_closure:  # evicted at every moment, each of its many evaluations
                        options["max_iter"] = 3  # is recomputed from the step's beginning
                    yield Case(f"{name} {options}", partial(_train, info, options))


def _ways(info: Any) -> list[dict[str, bool]]:
    """Return the options: one tensor at a time, all at once (`foreach`), or one kernel (`fused`)."""
    if "foreach" not in info.supported_impls:
        return [{}]
    ways = [{"foreach": False}, {"foreach": True}]
    if "fused" in info.supported_impls and "cpu" in info.supports_fused_on:
        ways.append({"fused": True})
    return ways


def _model(info: Any) -> tuple[nn.Module, torch.Tensor]:
    if info.only_supports_sparse_grads:
        model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten())
        for weight in model.parameters():
            assert weight.ndim == 2
        return model, torch.randint(0, 20, (4, 3))
    matrices_only = info.optim_cls.__name__ == "Muon"
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(8, 8, bias=not matrices_only), nn.Tanh()]
    return nn.Sequential(*layers), torch.rand(16, 8) * 2 - 1


def _train(info: Any, given: dict[str, Any], probe: Probe) -> Any:
    model, batch = _model(info)
    optimizer = info.optim_cls(model.parameters(), **Replicas().of(given))
    losses: list[Any] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        probe(loss)
        loss.backward()
        probe()
        losses.append(loss.detach())
        return loss

    for _ in range(STEPS):
        if info.step_requires_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        probe()
    return [losses, model, optimizer]
