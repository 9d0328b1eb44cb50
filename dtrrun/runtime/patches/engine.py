"""The autograd engine's entry point, which has two names in PyTorch, and the graph of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import graph

from dtrrun.runtime.patches.registry import Make, replacement


def replace_entrance(make: Make) -> Any:
    """Replace the entry point by make(original), which gets its arguments. Returns the original."""
    original = graph._engine_run_backward
    put_entrance(replacement(make, original))
    return original


def put_entrance(run: Any) -> None:
    """Replace the entry point by `run`."""
    graph._engine_run_backward = run
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]


def nodes_behind(outputs: Iterable[Any]) -> Iterator[Any]:
    """Yield all nodes of the graph behind `outputs` (tensors or gradient edges)."""
    stack = [output.node if isinstance(output, graph.GradientEdge) else output.grad_fn for output in outputs]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(source for source, _ in node.next_functions)
