"""DistributedDataParallel over gloo, started by torchrun."""

import results
import torch
import torch.distributed as dist
from networks import convnet, images, step
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(convnet(), gradient_as_bucket_view=True, bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
torch.manual_seed(dist.get_rank())
losses = [step(model, optimizer, *images()) for _ in range(6)]
with model.no_sync():  # accumulates gradients
    torch.nn.functional.cross_entropy(model(images()[0]), images()[1]).backward()
losses.append(step(model, optimizer, *images()))
results.write(model=model, optimizer=optimizer, losses=losses)
dist.barrier()
dist.destroy_process_group()
