"""Small programs of many kinds for `tests/bench/advice.py`, which follows the advice in their errors.

Each creates all that it needs, so that one process can run it many times.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F


def mlp(depth=12, width=256):
    """Most memory is in activations, all of equal size."""
    model = nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        model(torch.randn(512, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights():
    """Most memory is in weights, their gradients and Adam's state."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(64, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def head():
    """A frozen network with a small trainable head."""
    body = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(256, 256), nn.GELU())))
    body.requires_grad_(False)
    last = nn.Linear(256, 8)
    optimizer = torch.optim.AdamW(last.parameters())
    for _ in range(3):
        last(body(torch.randn(1024, 256))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def unused():
    """Most parameters never get a gradient: they are unused, or used only without gradients."""
    model, teacher = nn.ModuleDict({"used": mlp_of(4), "other": mlp_of(12)}), mlp_of(12)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(3):
        x = torch.randn(512, 256)
        with torch.no_grad():
            target = teacher(x)
        F.mse_loss(model["used"](x), target).backward()
        optimizer.step()
        optimizer.zero_grad()


def mlp_of(depth, width=256):
    return nn.Sequential(*(part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())))


def momentum():
    """A copy of the network that tracks it and is not trained."""
    model = mlp_of(6)
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        x = torch.randn(512, 256)
        with torch.no_grad():
            target = other(x)
        F.mse_loss(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for old, new in zip(other.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)


def logits():
    """A vocabulary much larger than the rest."""
    table, layer = nn.Embedding(4000, 64), nn.Linear(64, 4000)
    optimizer = torch.optim.AdamW([*table.parameters(), *layer.parameters()])
    for _ in range(3):
        x = torch.randint(0, 4000, (4, 64))
        F.cross_entropy(layer(table(x)).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def attention():
    """Layers of a transformer."""
    layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(3))
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(3):
        x = torch.randn(8, 64, 64)
        for layer in layers:
            x = layer(x)
        x.square().mean().backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def convolutions():
    """With normalization; the loss is computed before the last step's gradients are released."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        loss = F.cross_entropy(model(torch.randn(16, 3, 48, 48)), torch.arange(16) % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evaluated():
    """An evaluation whose batch is larger than in training."""
    model = nn.Sequential(*(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()))
    last = nn.Linear(16 * 20 * 20, 10)
    optimizer = torch.optim.Adam([*model.parameters(), *last.parameters()])
    for _ in range(2):
        F.cross_entropy(last(model(torch.randn(8, 1, 24, 24))), torch.arange(8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        last(model(torch.randn(96, 1, 24, 24))).argmax(1).tolist()


def growing(batches=13):
    """An evaluation that collects its predictions."""
    net = nn.Sequential(nn.Embedding(600, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 600))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    x = torch.randint(0, 600, (16, 32))
    F.cross_entropy(net(x).flatten(0, 1), x.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    found = None
    with torch.no_grad():
        for _ in range(batches):
            one = net(torch.randint(0, 600, (8, 32)))
            found = one if found is None else torch.cat((found, one))


def inference():
    """No gradients at all."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1), nn.SiLU()
    )
    with torch.no_grad():
        for _ in range(3):
            kept = [model(torch.randn(4, 3, 32, 32)) for _ in range(4)]
            torch.cat(kept).mean().item()


def adversaries():
    """Two networks, each with an optimizer."""
    maker, judge = mlp_of(4), nn.Sequential(mlp_of(3), nn.Linear(256, 1))
    first, second = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())
    for _ in range(2):
        made = maker(torch.randn(512, 256))
        second.zero_grad()
        (judge(torch.randn(512, 256)).sigmoid().mean() + judge(made.detach()).sigmoid().mean()).backward()
        second.step()
        first.zero_grad()
        judge(made).sigmoid().mean().neg().backward()
        first.step()


def accumulated():
    """Gradients of several batches before each step."""
    model = mlp_of(6)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    for _ in range(2):
        for _ in range(3):
            model(torch.randn(512, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def penalty():
    """Gradients of gradients."""
    model = nn.Sequential(mlp_of(3), nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        x = torch.randn(512, 256, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (slope.norm(dim=1) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adapters():
    """Small trainable matrices beside large frozen ones."""
    large = [torch.randn(256, 256) / 16 for _ in range(6)]
    down = [nn.Parameter(torch.randn(256, 4) / 16) for _ in large]
    up = [nn.Parameter(torch.zeros(4, 256)) for _ in large]
    optimizer = torch.optim.AdamW([*down, *up])
    for _ in range(3):
        x = torch.randn(512, 256)
        for weight, a, b in zip(large, down, up, strict=True):
            x = F.gelu(x @ weight + x @ a @ b)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def recurrent():
    """A recurrent network, cell by cell."""
    cell, last = nn.LSTMCell(64, 128), nn.Linear(128, 64)
    optimizer = torch.optim.SGD([*cell.parameters(), *last.parameters()], 0.1)
    for _ in range(2):
        h = c = torch.zeros(64, 128)
        loss = torch.zeros(())
        for _ in range(24):
            h, c = cell(torch.randn(64, 64), (h, c))
            loss = loss + last(h).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand():
    """Training without modules and without an optimizer."""
    layers = [torch.randn(256, 256, requires_grad=True) for _ in range(8)]
    for _ in range(3):
        x = torch.randn(512, 256)
        for weight in layers:
            x = torch.tanh(x @ weight / 16)
        x.square().mean().backward()
        with torch.no_grad():
            for weight in layers:
                weight -= 0.01 * weight.grad
                weight.grad = None


PROGRAMS = (
    *(mlp, weights, head, unused, momentum, logits, attention, convolutions, evaluated, growing, inference),
    *(adversaries, accumulated, penalty, adapters, recurrent, by_hand),
)
