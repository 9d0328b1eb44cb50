"""The Transformer (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762), encoder and decoder.

The DTR paper ran PyTorch's `nn.Transformer` with 12 layers in the encoder, on features without an embedding.
Attention is written out, as PyTorch's was then: its weights fill the memory. GPT-2 uses fused attention.
"""

import torch
import torch.nn.functional as F
from torch import nn

from tests.bench.gpu.models.task import Task, momentum, supervised, through


class Attention(nn.Module):
    """Multi-head scaled dot-product attention (Sec. 3.2), with dropout on the weights."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q = self.split(self.query(x))
        k = self.split(self.key(memory))
        v = self.split(self.value(memory))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to (batch, heads, length, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Layer(nn.Module):
    """Self-attention, cross-attention if `cross`, and a feed-forward part; norms come after."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, cross: bool):
        super().__init__()
        kinds = 1 + cross
        self.attentions = nn.ModuleList(Attention(width, heads, dropout) for _ in range(kinds))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(kinds + 1))
        self.dropout = nn.Dropout(dropout)
        self.feed = nn.Sequential(
            nn.Linear(width, inner), nn.ReLU(), nn.Dropout(dropout), nn.Linear(inner, width)
        )

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norms[0](x + self.dropout(self.attentions[0](x, x)))
        if memory is not None:
            x = self.norms[1](x + self.dropout(self.attentions[1](x, memory)))
        return self.norms[-1](x + self.dropout(self.feed(x)))


class Transformer(nn.Module):
    def __init__(
        self,
        width: int = 512,
        heads: int = 16,
        encoders: int = 12,
        decoders: int = 6,
        inner: int = 2048,
        dropout: float = 0.1,
        checkpointing: bool = False,
    ):
        super().__init__()
        self.checkpointing = checkpointing
        self.encoders = nn.ModuleList(Layer(width, heads, inner, dropout, False) for _ in range(encoders))
        self.decoders = nn.ModuleList(Layer(width, heads, inner, dropout, True) for _ in range(decoders))
        self.encoded, self.decoded = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.encoders:
            source = through(layer, source, checkpointing=self.checkpointing)
        memory = self.encoded(source)
        for layer in self.decoders:
            target = through(layer, target, memory, checkpointing=self.checkpointing)
        return self.decoded(target)


def task(
    device: str, checkpointing: bool, batch_size: int, length: int, target_length: int, **size: int
) -> Task:
    model = Transformer(**size, checkpointing=checkpointing).to(device)
    width = model.encoded.normalized_shape[0]
    inputs = [torch.rand(batch_size, count, width).to(device) for count in (length, target_length)]
    target = torch.rand(batch_size, target_length, width).to(device)
    return supervised(model, momentum(model), F.mse_loss, tuple(inputs), target)
