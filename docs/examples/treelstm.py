"""Binary TreeLSTM (Tai et al. 2015) that evaluates expressions whose trees are drawn at random.

The inner nodes take the minimum, the maximum or the sum modulo 10 of their two operands; the leaves are
digits. The shape of the tree, and so the program that runs, is another one in every step.
"""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn

OPERATORS = (torch.minimum, torch.maximum, lambda a, b: (a + b) % 10)


def random_tree(leaves: int):
    """A leaf is None, an inner node (operator, left, right)."""
    if leaves == 1:
        return None
    left = random.randint(1, leaves - 1)
    return random.randrange(len(OPERATORS)), random_tree(left), random_tree(leaves - left)


def evaluate(tree, digits):
    """The value of the tree for a batch of leaves; `digits` yields one tensor a leaf, from left to right."""
    if tree is None:
        return next(digits)
    operator, left, right = tree
    return OPERATORS[operator](evaluate(left, digits), evaluate(right, digits))


class TreeLSTM(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.leaf = nn.Embedding(10, 2 * hidden)
        self.operator = nn.Embedding(len(OPERATORS), 5 * hidden)
        self.left = nn.Linear(hidden, 5 * hidden)
        self.right = nn.Linear(hidden, 5 * hidden, bias=False)
        self.head = nn.Linear(hidden, 10)

    def node(self, tree, digits):
        """The hidden and the cell state at the root of the tree."""
        if tree is None:
            return self.leaf(next(digits)).chunk(2, 1)
        operator, left, right = tree
        h_left, c_left = self.node(left, digits)
        h_right, c_right = self.node(right, digits)
        gates = self.left(h_left) + self.right(h_right) + self.operator.weight[operator]
        i, f_left, f_right, o, u = gates.chunk(5, 1)
        c = i.sigmoid() * u.tanh() + f_left.sigmoid() * c_left + f_right.sigmoid() * c_right
        return o.sigmoid() * c.tanh(), c

    def forward(self, tree, digits):
        h, _ = self.node(tree, iter(digits))
        return self.head(h)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--batch-size", type=int, default=384)
parser.add_argument("--min-leaves", type=int, default=60)
parser.add_argument("--max-leaves", type=int, default=90)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--lr", type=float, default=5e-4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

random.seed(args.seed)
torch.manual_seed(args.seed)
model = TreeLSTM(args.hidden).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), args.lr)

for step in range(1, args.steps + 1):
    leaves = random.randint(args.min_leaves, args.max_leaves)
    tree = random_tree(leaves)
    digits = torch.randint(10, (leaves, args.batch_size)).to(args.device)
    loss = F.cross_entropy(model(tree, digits), evaluate(tree, iter(digits)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}")
