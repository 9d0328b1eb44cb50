"""Averages of the weights: an EMA by deepcopy, AveragedModel, and a copy taken in the middle of a step."""

import copy

import results
import torch
from networks import convnet, images
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

torch.manual_seed(0)
model = convnet()
ema = copy.deepcopy(model).requires_grad_(False)
averaged = AveragedModel(model)
exponential = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
losses, copies = [], []
for _ in range(6):
    x, y = images()
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    copies.append(copy.deepcopy(model))
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for mean, parameter in zip(ema.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)
        for mean, buffer in zip(ema.buffers(), model.buffers(), strict=True):
            mean.copy_(buffer)
    averaged.update_parameters(model)
    exponential.update_parameters(model)
    losses.append(loss.item())
update_bn([images()[0] for _ in range(3)], averaged)
results.write(model=model, optimizer=optimizer, ema=ema, averaged=averaged, exponential=exponential,
              copies=[list(one.state_dict().values()) for one in copies], losses=losses)  # fmt: skip
