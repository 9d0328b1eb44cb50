"""FSDP2 (`fully_shard`) over gloo on the CPU, started by torchrun."""

import results
import torch
import torch.distributed as dist
from networks import mlp, rows, step
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = mlp()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
torch.manual_seed(dist.get_rank())
losses = [step(model, optimizer, *rows()) for _ in range(6)]
shards = {name: parameter.to_local() for name, parameter in model.state_dict().items()}
gradients = [parameter.grad.to_local() for parameter in model.parameters()]
whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
moments = [
    {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
    for state in optimizer.state.values()
]
results.write(shards=shards, gradients=gradients, whole=whole, moments=moments, losses=losses)
dist.barrier()
dist.destroy_process_group()
