"""Mixed precision on the CPU: torch.autocast with bfloat16."""

import results
import torch
from networks import convnet, images, mlp, rows
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
model = torch.nn.ModuleList([convnet(), mlp()])
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
losses = []
for _ in range(6):
    optimizer.zero_grad()
    (pictures, kinds), (x, y) = images(), rows()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy(model[0](pictures), kinds) + cross_entropy(model[1](x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
results.write(model=model, optimizer=optimizer, losses=losses)
