"""A small GPT sharded by FSDP2 over gloo: `torchrun --nproc-per-node 2 sharded_gpt.py [plain | checkpoints]`.

Rank 0 prints the processor time of a step (ms, the median without the first two), and a digest of its shards.
"""

import hashlib
import json
import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

D, HEADS, CHECKPOINTS = 128, 4, sys.argv[1:] == ["checkpoints"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if CHECKPOINTS else self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        split = self.qkv(self.norms[0](x)).view(rows, length, 3, HEADS, D // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, D))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[Block() for _ in range(6)], nn.Linear(D, 64))
for part in model:
    fully_shard(part)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
x = torch.randn(16, 128, D, generator=torch.Generator().manual_seed(dist.get_rank()))
times = []
for _ in range(8):
    began = time.process_time()
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.process_time() - began)
shards = hashlib.sha256()
for weight in model.parameters():
    shards.update(weight.to_local().detach().numpy().tobytes())
if dist.get_rank() == 0:
    print(json.dumps({"ms": 1e3 * median(times[2:]), "shards": shards.hexdigest()}), flush=True)
dist.destroy_process_group()
