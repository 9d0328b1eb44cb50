"""A convnet and its images in channels_last."""

import results
import torch
from networks import convnet, images, step

torch.manual_seed(0)
model = convnet().to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
losses = []
for _ in range(6):
    x, y = images()
    losses.append(step(model, optimizer, x.to(memory_format=torch.channels_last), y))
results.write(model=model, optimizer=optimizer, losses=losses)
