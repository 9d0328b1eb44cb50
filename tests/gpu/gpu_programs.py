"""Small training programs for a GPU: large batches and narrow layers, so that activations are most of their
peak, and tests/hollow computes them in seconds."""

import gc
import os

import torch
from torch import nn

import dtrrun

MIB = 1 << 20
DEVICE = "cuda"
HOLLOW = "HOLLOW_STATE" in os.environ
"""Whether the GPU is tests/hollow's: its values are right, but its kernels take no time."""
EXPANDABLE = "expandable_segments:True" in os.environ.get("PYTORCH_ALLOC_CONF", "")
"""Whether the allocator's segments grow. PyTorch crashes with these where there is no NVML."""


class Attention(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layer = nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.layer(self.norm(x)).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return x + (weights @ v).transpose(1, 2).reshape(x.shape)


def convnet():
    layers = []
    for _ in range(8):
        layers += [
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
        ]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(model, nn.Linear(8, 10)), lambda: torch.randn(32, 3, 128, 128, device=DEVICE)


def transformer():
    blocks = [Attention() for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Dropout(0.2), nn.Flatten(), nn.Linear(256 * 128, 10))
    return model, lambda: torch.randn(16, 256, 128, device=DEVICE)


def mlp():
    layers = [part for _ in range(12) for part in (nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(128, 10)), lambda: torch.randn(1 << 15, 128, device=DEVICE)


class Recurrent(nn.Module):
    def __init__(self, *arguments, **options):
        super().__init__()
        self.cells = nn.LSTM(*arguments, **options)

    def forward(self, x):
        return self.cells(x)[0]


def recurrent():
    """Layer by layer: a call of cuDNN needs all its memory at once, and with dropout it is never repeated."""
    layers = [part for _ in range(6) for part in (Recurrent(64, 64), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(64, 10)), lambda: torch.randn(64, 256, 64, device=DEVICE)


def recurrent_dropout():
    """cuDNN's own dropout alongside PyTorch's; only the latter is recomputed."""
    layers = [part for _ in range(10) for part in (nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1))]
    first = Recurrent(32, 32, 2, dropout=0.3)
    model = nn.Sequential(first, nn.Linear(32, 128), *layers, nn.Linear(128, 10))
    return model, lambda: torch.randn(64, 256, 32, device=DEVICE)


MODELS = (convnet, transformer, mlp, recurrent)


def train(make, steps=3, autocast=False, optimizer=torch.optim.AdamW, **options):
    """Train; return the losses, and all that a user would want to be equal afterwards."""
    torch.manual_seed(11)
    model, batch = make()
    model.to(DEVICE)
    optimizer = optimizer(model.parameters(), lr=1e-3, **options)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = model(batch()).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    values = [getattr(value, "_local_tensor", value) for value in model.state_dict().values()]
    state = [value.detach().cpu() for value in values]
    drawn = torch.rand(4, device=DEVICE).cpu()  # the state that the generator has reached
    return torch.stack(losses).cpu(), state, drawn


def same(one, other):
    return (
        torch.equal(one[0], other[0])
        and all(map(torch.equal, one[1], other[1]))
        and torch.equal(one[2], other[2])
    )


def tensor(mib=8):
    return torch.ones(mib * MIB // 4, device=DEVICE)


def chain(length, mib=8):
    """Return tensors that are each computed from the one before."""
    kept = [tensor(mib)]
    for _ in range(length):
        kept.append(kept[-1].mul(2.0))
    return kept


def correct(kept):
    """Return whether each tensor of a chain is twice the one before, starting from 1."""
    return all(bool((one == 2.0**step).all()) for step, one in enumerate(kept))


def beside():
    """Return what a budget needs beyond its tensors: measured, as a context's size is up to the driver."""
    with dtrrun.budget(None, device=DEVICE) as session:
        (torch.ones(64, 64, device=DEVICE) @ torch.ones(64, 64, device=DEVICE)).sum().item()
        return session.report()["overhead_bytes"]


def budget_for(make, share, **options):
    """Return the budget that leaves `share` of the program's peak for tensors and workspaces, and the
    program's result without a budget."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with dtrrun.budget(None, device=DEVICE) as session:
        expected = train(make, **options)
        report = session.report()
    gc.collect()
    kept = torch.cuda.memory_allocated()  # by cuBLAS, for each of its threads
    tensors = int((torch.cuda.max_memory_allocated() - before) * share)
    guard = max(64 * MIB, (report["overhead_bytes"] + tensors) // 40)
    return report["overhead_bytes"] + guard + kept + tensors + 64 * MIB, expected


def forget():
    """Exclude what was reserved so far, and what cuBLAS keeps for each stream that was used."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
