"""A model's training step, and the per-block checkpointing that it is compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.bench.gpu.cases import Case


@dataclass(frozen=True)
class Task:
    """`step` runs forward, backward and optimizer, and returns the loss, on the device."""

    modules: tuple[nn.Module, ...]
    step: Callable[[], torch.Tensor]


def task_of(case: Case, device: str, checkpointing: bool, size: dict[str, Any]) -> Task:
    """Return the task of a case; size: the arguments of its model."""
    made: Task = import_module(f"tests.bench.gpu.models.{case.module}").task(device, checkpointing, **size)
    return made


def supervised(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    inputs: tuple[Any, ...],
    target: torch.Tensor,
) -> Task:
    """Return steps over one batch, as in the paper: its content affects neither time nor memory."""

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model(*inputs), target)
        value.backward()
        optimizer.step()
        return value.detach()

    return Task((model,), step)


def through(block: nn.Module, *inputs: Any, checkpointing: bool) -> Any:
    """Return the block's result; with `checkpointing`, the backward pass recomputes its interior."""
    return checkpoint(block, *inputs, use_reentrant=False) if checkpointing else block(*inputs)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD at a rate at which no loss overflows: NaN would be equal to NaN."""
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def images(device: str, batch_size: int, height: int, width: int, classes: int) -> tuple[Any, torch.Tensor]:
    """Return noise and labels, made on the host, as by a loader, so that every run has the same."""
    x = torch.randn(batch_size, 3, height, width)
    return (x.to(device),), torch.randint(classes, (batch_size,)).to(device)
