"""Classifies documents that are padded to the longest of their batch, one of which is very long.

The program of docs/howto/insurance.md.
"""

import torch
from torch import nn

WORDS, WIDTH, CLASSES, DOCUMENTS = 1000, 64, 10, 64
LENGTHS = (120, 90, 150, 110, 4000, 130)  # of the longest document in each batch


def block() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(block() for _ in range(8)))
head = nn.Linear(WIDTH, CLASSES)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])

for number, length in enumerate(LENGTHS, start=1):
    documents = torch.randint(WORDS, (DOCUMENTS, length))
    classes = torch.randint(CLASSES, (DOCUMENTS,))
    loss = nn.functional.cross_entropy(head(model(documents).mean(dim=1)), classes)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(
        f"batch {number}: {DOCUMENTS} documents of up to {length:4} words, loss {loss.item():.6f}", flush=True
    )
