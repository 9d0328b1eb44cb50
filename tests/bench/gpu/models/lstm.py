"""LSTM (Hochreiter and Schmidhuber 1997, with forget gates: Gers et al. 2000), cell by cell.

Not `nn.LSTM`: cuDNN's is one operator for the whole sequence. The DTR paper also ran its own cells.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.bench.gpu.models.task import Task, momentum, supervised


class Cell(nn.Module):
    """Input, forget and output gates and candidate, from the input and the previous state."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.x = nn.Linear(inputs, 4 * hidden)
        self.h = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        i, f, o, g = (self.x(x) + self.h(h)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class LSTM(nn.Module):
    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.hidden = hidden
        self.cell = Cell(inputs, hidden)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        """Return the last cell state (batch, hidden) of a sequence (time, batch, inputs)."""
        h = c = sequence.new_zeros(sequence.shape[1], self.hidden)
        for x in sequence:
            h, c = self.cell(x, h, c)
        return c


def task(device: str, checkpointing: bool, batch_size: int, length: int, inputs: int, hidden: int) -> Task:
    model = LSTM(inputs, hidden).to(device)
    sequence = torch.randn(length, batch_size, inputs).to(device)
    target = torch.randn(batch_size, hidden).to(device)
    return supervised(model, momentum(model), F.mse_loss, (sequence,), target)
