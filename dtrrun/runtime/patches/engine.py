"""The autograd engine's entry point, which has two names in PyTorch, and the graph of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd import graph


def replace_entrance(run: Any) -> Any:
    """Replace the entry point by `run`, which gets its arguments. Returns the original."""
    original = graph._engine_run_backward
    graph._engine_run_backward = run
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]
    return original


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
