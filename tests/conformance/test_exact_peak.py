"""A program whose budget is exactly its own measured peak evicts nothing: predictions match allocations.

Each program is new to the session that has the budget, so every size comes from a shape function or a
formula, and none is known in advance.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtrrun


class LanguageModel(nn.Module):
    """The logits take most of its memory. The loss reads all of them, and makes one number."""

    def __init__(self, recurrent=nn.LSTM):
        super().__init__()
        self.embedding = nn.Embedding(500, 16)
        self.recurrent = recurrent(16, 16, num_layers=2, dropout=0.2)
        self.head = nn.Linear(16, 500)

    def forward(self, x):
        logits = self.head(self.recurrent(self.embedding(x))[0])
        return F.nll_loss(F.log_softmax(logits.flatten(0, 1), 1), x.flatten())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, x):
        classes = torch.zeros(x.shape[0] * x.shape[1], dtype=torch.long)
        return F.cross_entropy(self.head(self.layer(x)).flatten(0, 1), classes)


class Convolutions(nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.3),
            nn.Conv2d(16, 3, 3),
        )
        self.loss = loss

    def forward(self, x):
        made = self.layers(x)
        return self.loss(made.sigmoid(), torch.full_like(made, 0.5))


def images():
    return torch.randn(8, 3, 32, 32)


PROGRAMS = {
    "language model": (LanguageModel, lambda: torch.randint(500, (20, 8)), torch.optim.SGD),
    "gated units": (lambda: LanguageModel(nn.GRU), lambda: torch.randint(500, (20, 8)), torch.optim.Adam),
    "lengths that vary": (
        LanguageModel,
        lambda: torch.randint(500, (int(torch.randint(10, 20, ())), 8)),
        torch.optim.Adam,
    ),
    "attention": (Attention, lambda: torch.randn(8, 20, 32), torch.optim.AdamW),
    **{
        loss.__name__: (lambda loss=loss: Convolutions(loss), images, torch.optim.Adam)
        for loss in (F.mse_loss, F.huber_loss, F.binary_cross_entropy, F.soft_margin_loss, F.smooth_l1_loss)
    },
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_evicted(name):
    make, batch, optimizer = PROGRAMS[name]

    def program(budget):
        torch.manual_seed(0)
        with dtrrun.budget(budget) as session:
            model = make()
            stepping = optimizer(model.parameters(), lr=0.01)
            for _ in range(3):
                stepping.zero_grad()
                model(batch()).backward()
                stepping.step()
        return session.report()

    peak = program(None)["peak_bytes"]
    report = program(peak)
    assert (report["evictions"], report["peak_bytes"]) == (0, peak)
    assert program(peak - 64)["evictions"] > 0  # so it really is the peak
