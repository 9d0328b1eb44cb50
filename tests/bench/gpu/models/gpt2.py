"""GPT-2 (Radford et al. 2019), 124 million parameters: bfloat16 autocast, fused attention, fused AdamW."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.bench.gpu.models.task import Task, through


class Block(nn.Module):
    """Attention and a feed-forward part, each after a norm; the original's dropout is left at 0.1."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.feed(self.norm2(x)))


class GPT2(nn.Module):
    def __init__(
        self,
        vocabulary: int = 50257,
        context: int = 1024,
        width: int = 768,
        heads: int = 12,
        depth: int = 12,
        dropout: float = 0.1,
        checkpointing: bool = False,
    ):
        super().__init__()
        self.checkpointing = checkpointing
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        position = torch.arange(index.shape[1], device=index.device)
        x = self.dropout(self.tokens(index) + self.positions(position))
        for block in self.blocks:
            x = through(block, x, checkpointing=self.checkpointing)
        return F.linear(self.norm(x), self.tokens.weight)


def task(device: str, checkpointing: bool, batch_size: int, **size: int) -> Task:
    model = GPT2(**size, checkpointing=checkpointing).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), fused=True)
    shape = (batch_size, model.positions.num_embeddings + 1)
    text = torch.randint(model.tokens.num_embeddings, shape).to(device)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            logits = model(text[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Task((model,), step)
