"""Child-sum TreeLSTM (Tai, Socher and Manning 2015, https://arxiv.org/abs/1503.00075, Eqs. 2 to 8).

On complete binary trees: a tree of depth d has 2^(d+1) - 1 nodes, each with its own input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.bench.gpu.models.task import Task, momentum, supervised


class Node:
    """`x` is (batch, inputs)."""

    def __init__(self, depth: int, batch_size: int, inputs: int, device: str):
        self.x = torch.randn(batch_size, inputs).to(device)
        below = (depth - 1, batch_size, inputs, device)
        self.children = [Node(*below), Node(*below)] if depth else []


class TreeLSTM(nn.Module):
    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.gates_x = nn.Linear(inputs, 3 * hidden)
        self.gates_h = nn.Linear(hidden, 3 * hidden, bias=False)
        self.forget_x = nn.Linear(inputs, hidden)
        self.forget_h = nn.Linear(hidden, hidden, bias=False)

    def node(self, node: Node) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden and cell state, (batch, hidden)."""
        children = [self.node(child) for child in node.children]
        gates = self.gates_x(node.x)
        if children:
            gates = gates + self.gates_h(sum(h for h, _ in children))
        i, o, u = gates.chunk(3, 1)
        c = i.sigmoid() * u.tanh()
        if children:
            forget = self.forget_x(node.x)
            for h_k, c_k in children:
                c = c + (forget + self.forget_h(h_k)).sigmoid() * c_k
        return o.sigmoid() * c.tanh(), c

    def forward(self, root: Node) -> torch.Tensor:
        return self.node(root)[0]


def task(device: str, checkpointing: bool, batch_size: int, depth: int, inputs: int, hidden: int) -> Task:
    model = TreeLSTM(inputs, hidden).to(device)
    target = torch.randn(batch_size, hidden).to(device)
    root = Node(depth, batch_size, inputs, device)
    return supervised(model, momentum(model), F.mse_loss, (root,), target)
