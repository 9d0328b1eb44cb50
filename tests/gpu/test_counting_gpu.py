"""Inside a budget, operators of backward passes are only counted if they make little. Bits are the same."""

import gc

import pytest
import torch
from gpu_programs import DEVICE, forget
from hollow_gpu import peak
from torch import nn
from torch.nn import functional as F

import dtrrun
from dtrrun.profiling.room import budget_for

pytestmark = pytest.mark.usefixtures("gpu")

STEPS, LENGTH, TIMES, ROWS, WIDTH = 8, 32, 4, 128, 128


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x):
        h = c = x.new_zeros(ROWS, WIDTH)
        made = []
        for one in x.unbind() * TIMES:
            h, c = self.cell(one, (h, c))
            h = F.dropout(h, 0.1)
            made.append(h)
        return self.head(torch.stack(made[-8:]).mean(0))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x):
        h = x[0]
        for place, one in enumerate(x.unbind() * TIMES):
            h = h + F.gelu(torch.tanh(self.layers[place % 4](self.norm(h + one)))) * 0.1
        return self.head(h)


class Residual(nn.Module):
    """Gradients are summed in place, and those of normalization write to its workspace."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(160))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        h = x[:8].reshape(ROWS, 16, 8, 8)
        for norm in self.norms:
            h = h + torch.tanh(norm(h)) * 0.1
        return self.head(h.mean((2, 3)))


def training(make, autocast=False, prefetch=False, twice=False):
    """Return a function that trains for a step, and what it leaves behind.

    Its argument is called before weights change. prefetch: the next batch comes on another stream.
    twice: the graph is kept for a second backward pass.
    """
    torch.manual_seed(3)
    net, kept = make().to(DEVICE), []
    net.head.weight.register_hook(lambda grad: grad.clamp(-1, 1) + grad.mean())
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(DEVICE, enabled=autocast)
    copies = torch.cuda.Stream()
    host = torch.randn(LENGTH, ROWS, WIDTH).pin_memory()

    def fetch():
        with torch.cuda.stream(copies):
            return host.to(DEVICE, non_blocking=True)

    coming = [fetch()]

    def batch():
        if not prefetch:
            return torch.randn(LENGTH, ROWS, WIDTH, device=DEVICE)
        torch.cuda.current_stream().wait_stream(copies)
        x = coming.pop()
        x.record_stream(torch.cuda.current_stream())
        coming.append(fetch())
        return x

    def step(before_update=lambda: None):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16, enabled=autocast):
            loss = F.cross_entropy(net(batch()).float(), torch.arange(ROWS, device=DEVICE) % 10)
        if twice:
            scaler.scale(loss).backward(retain_graph=True)
        scaler.scale(loss).backward()
        before_update()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        kept.append(loss.detach())

    def left():
        return [one.cpu() for one in (*kept, *net.state_dict().values(), torch.rand(4, device=DEVICE))]

    return step, left


PROGRAMS = {
    "cells": (0.5, Cells, {}),
    "cells, prefetched": (0.7, Cells, {"prefetch": True}),
    "layers": (0.5, Layers, {}),
    "residual": (0.5, Residual, {}),
    "residual, twice": (0.5, Residual, {"twice": True}),
    "layers, fp16": (0.7, Layers, {"autocast": True}),
}
"""With the share of their peak."""


def budget_of(share, make, options):
    """Return a budget with room for this share of what the program's tensors take."""
    with dtrrun.budget(None, device=DEVICE) as session:
        step, _ = training(make, **options)
        step(), step()
        report = session.report()
    del step
    gc.collect()
    beside = report["overhead_bytes"] + torch.cuda.memory_allocated()  # cuBLAS keeps a workspace
    size = budget_for(int(report["peak_bytes"] * share), beside)
    forget()
    peak()
    return size


def plain(steps, make, options):
    step, left = training(make, **options)
    for _ in range(steps):
        step()
    return left()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_bits_if_backward_passes_are_only_counted(name):
    share, make, options = PROGRAMS[name]
    expected, size = plain(STEPS, make, options), budget_of(share, make, options)
    counts, evictions = [], []
    with dtrrun.budget(size, device=DEVICE, heuristic="h_dtr_eq") as session:
        step, left = training(make, **options)

        def note():
            session.ledger.collect_dead()
            counts.append(session.ledger.operators_counted)
            evictions.append(session.report()["evictions"])

        for _ in range(STEPS):
            step(note)
        report = session.report()
        assert peak() <= size
    assert counts[:3] == [0, 0, 0]
    assert max(counts) > 400
    assert evictions[-1] > evictions[3]  # also while operators are only counted
    assert report["rematerializations"] > 0
    assert all(map(torch.equal, expected, left()))


def test_all_are_only_counted_if_the_last_steps_have_taken_at_most_half_of_the_budget():
    expected, size = plain(20, Layers, {}), budget_of(2.8, Layers, {})
    counting = []
    with dtrrun.budget(size, device=DEVICE) as session:
        step, left = training(Layers)
        for _ in range(20):
            step()
            counting.append(session.ledger.counting)
        assert session.report()["evictions"] == 0
        assert peak() <= size
    assert not any(counting[:15])
    assert all(counting[17:])
    assert all(map(torch.equal, expected, left()))
