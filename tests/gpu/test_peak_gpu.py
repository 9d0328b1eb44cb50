"""What is said to hold the peak on a GPU, where backward passes run in another thread."""

import pytest
import torch
from gpu_programs import DEVICE
from torch import nn

import dtrrun

pytestmark = pytest.mark.usefixtures("gpu")
WIDTH, BATCH = 256, 1024
TENSOR = WIDTH * BATCH * 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.sigmoid(self.inner(x))


def train(steps=4):
    torch.manual_seed(0)
    net = nn.ModuleList(Block() for _ in range(6)).to(DEVICE)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(steps):
        x = torch.randn(BATCH, WIDTH, device=DEVICE)
        for block in net:
            x = block(x)
        optimizer.zero_grad()
        x.square().mean().backward()
        optimizer.step()


def test_classes_and_places():
    with dtrrun.budget(None, DEVICE, peak=True) as session:
        train()
        report = session.report()
        most = torch.cuda.max_memory_allocated()
    found = report["holds"]["found"]
    classes = {row["name"]: row["bytes"] for row in found["classes"]}
    assert found["bytes"] == found["step_bytes"] == sum(classes.values()) <= most
    parameters = 6 * 4 * (WIDTH * WIDTH + WIDTH)
    assert classes["parameters"] == parameters
    assert classes["optimizer state"] >= 2 * parameters
    assert classes["saved for backward"] >= 6 * TENSOR
    assert classes["batch"] == TENSOR
    assert (found["phase"], found["step"]) == ("backward", 3)
    saved = [row for row in found["places"] if row["class"] == "saved for backward"]
    assert any(row["module"] == "Block" and row["operator"] == "aten.sigmoid" for row in saved)
    assert all("test_peak_gpu.py:" in row["line"] for row in saved)
    # Operators of the backward pass have the line of the forward pass that they belong to.
    assert "test_peak_gpu.py:" in found["line"]
