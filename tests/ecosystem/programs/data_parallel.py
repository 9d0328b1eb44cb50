"""nn.DataParallel without a GPU: it calls the model as it is."""

import results
import torch
from networks import mlp, rows, step

torch.manual_seed(0)
model = torch.nn.DataParallel(mlp())
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=8)
losses = []
for _ in range(6):
    losses.append(step(model, optimizer, *rows()))
    scheduler.step()
results.write(model=model, optimizer=optimizer, losses=losses, rates=scheduler.get_last_lr())
