"""A TreeLSTM as public code trains it: small matrix products, gradients accumulated over many trees."""

import random

import pytest
import torch
from programs import assert_same, check_stress, plain, run_inside
from torch import nn
from torch.nn import functional as F

import dtrrun
from dtrrun.runtime import session

WIDTH = 48


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.memory, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        memory = self.memory(x)
        return memory, torch.sigmoid(self.gate(x)) * torch.tanh(memory)


class Composer(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.right = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, left, right):
        gates = [one(left[1]) + two(right[1]) for one, two in zip(self.left, self.right, strict=True)]
        update, first, second, out = (torch.sigmoid(gate) for gate in gates[:4])
        memory = update * torch.tanh(gates[4]) + first * left[0] + second * right[0]
        return memory, out * torch.tanh(memory)


class TreeLSTM(nn.Module):
    """Computes a loss at each node of a tree; a tree is the place of a leaf, or a pair of trees."""

    def __init__(self):
        super().__init__()
        self.leaf, self.composer, self.out = Leaf(), Composer(), nn.Linear(WIDTH, 5)

    def forward(self, tree, words, loss):
        if isinstance(tree, int):
            state = self.leaf(words[tree])
        else:
            left, loss = self(tree[0], words, loss)
            right, loss = self(tree[1], words, loss)
            state = self.composer(left, right)
        label = torch.tensor([tree % 5 if isinstance(tree, int) else 2])
        return state, loss + F.nll_loss(F.log_softmax(self.out(state[1]), 1), label)


def grown(generator, first, leaves):
    if leaves == 1:
        return first
    left = generator.randint(1, leaves - 1)
    return grown(generator, first, left), grown(generator, first + left, leaves - left)


def training(trees, leaves, *, steps=1):
    def program():
        generator = random.Random(3)
        embedding, model = nn.Embedding(50, WIDTH), TreeLSTM()
        optimizer = torch.optim.SGD([*embedding.parameters(), *model.parameters()], 0.05)
        losses = []
        for _ in range(steps):
            for _ in range(trees):
                words = embedding(torch.randint(0, 50, (leaves,))).unsqueeze(1)
                _, loss = model(grown(generator, 0, leaves), words, 0)
                (loss / trees).backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, list(model.parameters())

    return program


def test_history_is_not_compacted_within_a_replay(monkeypatch):
    monkeypatch.setattr(session, "COMPACT_EVERY", 20)
    monkeypatch.setattr(session, "PUBLISH_NS", 0)
    depth = deepest = 0
    compact = session.Session._compact

    def counted(self):
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        compact(self)
        depth -= 1

    monkeypatch.setattr(session.Session, "_compact", counted)
    check_stress(training(trees=2, leaves=4, steps=2))
    assert deepest == 1


@pytest.mark.parametrize("share", [0.8, 0.7])
def test_a_tight_budget(share):
    program = training(trees=2, leaves=8)
    expected = plain(program)
    _, counted = run_inside(program, None, careful=False)
    try:
        found, _ = run_inside(program, int(counted["peak_bytes"] * share))
    except dtrrun.BudgetError:
        return
    assert_same(expected, found, f"at {share:.0%} of the peak")
