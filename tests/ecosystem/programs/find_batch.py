"""Accelerate finds a batch size that fits, on a copy of the model; then training uses a fixed one."""

import copy
import sys

import results
import torch
from accelerate.utils import find_executable_batch_size
from networks import mlp, rows, step

LARGEST, SMALLEST = 8192, 512

torch.manual_seed(0)
model = mlp(depth=2)
tried = []


@find_executable_batch_size(starting_batch_size=LARGEST)
def find(size):
    tried.append(size)
    tested = copy.deepcopy(model).eval()
    tested(torch.ones(size, 64)).square().mean().backward()
    return size


try:
    size = find()
except torch.OutOfMemoryError as error:
    print(f"accelerate does not take this for a batch that is too large: {error}")
    sys.exit()  # without results
assert size >= SMALLEST, f"{tried} were tried"
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = [step(model, optimizer, *rows(SMALLEST)) for _ in range(5)]
print(f"batches tried: {tried}")
results.write(model=model, optimizer=optimizer, losses=losses)
