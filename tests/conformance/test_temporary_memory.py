"""What kernels allocate beside their results, on a CPU: PyTorch's allocator stays within the budget, too."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dtrrun

MB = 1 << 20


@pytest.fixture(autouse=True)
def _heap(extension):
    pass


class Fourier(nn.Module):
    """Transforms copy their input, and the inverse of a real one copies it twice."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x):
        for _ in range(5):
            x = F.gelu(torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]) * self.scale)
        return x


def convolutions():
    """oneDNN has layouts of its own, and the gradient of a batch norm is computed from a copy."""
    layers = [
        layer for _ in range(4) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    ]
    return nn.Sequential(*layers)


def train(make, x, step_ended=lambda: None):
    torch.manual_seed(1)
    model = make()
    losses = []
    for _ in range(3):
        loss = model(x.clone()).sum()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 1e-6 * weight.grad
                weight.grad = None
        losses.append(loss.item())
        del loss
        step_ended()
    return losses


@pytest.mark.parametrize("make", [Fourier, convolutions])
def test_the_allocator_stays_within_the_budget(extension, make):
    """From the first step on, in which nothing is known of these kernels."""
    x = torch.randn(8, 4, 64, 64)
    plain = train(make, x)
    others = extension.heap_figures()[0]
    peaks = []

    def step_ended():
        peaks.append(extension.heap_most() - others)

    with dtrrun.budget(None) as counted:
        extension.heap_most()
        train(make, x, step_ended)
    peak = counted.report()["peak_bytes"]
    assert max(peaks) <= peak
    peaks.clear()
    with dtrrun.budget(peak * 7 // 10) as session:
        extension.heap_most()
        assert train(make, x, step_ended) == plain
    report = session.report()
    assert report["evictions"] > 0
    assert max(peaks) <= report["peak_bytes"] <= peak * 7 // 10
