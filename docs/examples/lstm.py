"""LSTM (Hochreiter and Schmidhuber 1997) on the adding problem, over sequences of varying length.

Each step of a sequence has a number and a mark; the target is the sum of the two marked numbers.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def adding_problem(batch_size: int, min_length: int, max_length: int):
    """Sequences (time, batch, 2) with the longest first, their lengths, and the targets.

    One mark lies in the first half of a sequence, the other in the second half.
    """
    lengths = torch.randint(min_length, max_length + 1, (batch_size,)).sort(descending=True).values
    numbers = torch.rand(max_length, batch_size)
    half = lengths // 2
    first = (torch.rand(batch_size) * half).long()
    second = half + (torch.rand(batch_size) * (lengths - half)).long()
    marks = torch.zeros(max_length, batch_size).scatter_(0, torch.stack([first, second]), 1.0)
    return torch.stack([numbers, marks], 2)[: lengths[0]], lengths.tolist(), (numbers * marks).sum(0)


class Regressor(nn.Module):
    """Stacked LSTM cells; a sequence leaves the batch when it ends."""

    def __init__(self, hidden: int, layers: int, dropout: float):
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(2 if i == 0 else hidden, hidden) for i in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, 1)

    def forward(self, padded, lengths):
        zero = padded.new_zeros(len(lengths), self.head.in_features)
        states = [(zero, zero)] * len(self.cells)
        finished = []
        running = len(lengths)
        for t, x in enumerate(padded):
            while lengths[running - 1] <= t:
                running -= 1
            if running < len(states[-1][0]):
                finished.append(states[-1][0][running:])
                states = [(h[:running], c[:running]) for h, c in states]
            x = x[:running]
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(x, states[layer])
                x = self.dropout(states[layer][0])
        finished.append(states[-1][0])
        return self.head(torch.cat(finished[::-1])).squeeze(1)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--batch-size", type=int, default=1024)
parser.add_argument("--min-length", type=int, default=10)
parser.add_argument("--max-length", type=int, default=36)
parser.add_argument("--hidden", type=int, default=256)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--device", default="cpu")
args = parser.parse_args()

torch.manual_seed(args.seed)
model = Regressor(args.hidden, args.layers, args.dropout).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), args.lr)

for step in range(1, args.steps + 1):
    padded, lengths, targets = adding_problem(args.batch_size, args.min_length, args.max_length)
    loss = F.mse_loss(model(padded.to(args.device), lengths), targets.to(args.device))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(f"step {step} loss {loss.item()!r}")
