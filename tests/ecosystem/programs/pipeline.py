"""Two stages of a pipeline with one forward and one backward pass in turn (1F1B), started by torchrun."""

import results
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH = 128

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Sequential(
    *(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()))
)
stage = PipelineStage(model, rank, dist.get_world_size(), torch.device("cpu"))
schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
draws = torch.Generator().manual_seed(0)
losses = []
for _ in range(8):
    inputs = torch.randn(1024, WIDTH, generator=draws)
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=torch.tanh(inputs), losses=losses)
    optimizer.step()
    optimizer.zero_grad()
results.write(model=model, optimizer=optimizer, losses=losses)
dist.barrier()
dist.destroy_process_group()
