"""The allocator refuses each request of a step once: the operator runs again, with the same bits."""

import gc

import pytest
import torch
from gpu_programs import DEVICE, Attention, Recurrent, same
from hollow_gpu import refuse
from torch import nn
from torch.nn import functional as F

import dtrrun

pytestmark = pytest.mark.usefixtures("gpu")


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    ), (4, 3, 16, 16)


def transformer():
    layers = Attention(32), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 32, 10)), (4, 16, 32)


def mlp():
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 10)), (16, 32)


def recurrent():
    layers = Recurrent(16, 16), nn.Dropout(0.1), Recurrent(16, 16, 2, dropout=0.3)
    return nn.Sequential(*layers, nn.Linear(16, 10)), (6, 4, 16)


def train(make, steps, autocast=False, backward=True, step_of=None, **options):
    """step_of: called with a function that makes the next step, or the part that may be refused memory."""
    torch.manual_seed(11)
    model, shape = make()
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    scaler = torch.amp.GradScaler(DEVICE, enabled=autocast)
    losses = []

    def forward():
        with torch.autocast(DEVICE, torch.float16, enabled=autocast):
            losses.append(model(torch.randn(shape, device=DEVICE)).float().square().mean())

    def rest():
        scaler.scale(losses[-1]).backward()
        losses[-1] = losses[-1].detach()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(steps):
        optimizer.zero_grad()
        step_of(lambda: (forward(), rest()) if backward else forward())
        if not backward:
            rest()
    state = [value.detach().cpu() for value in model.state_dict().values()]
    return torch.stack(losses).cpu(), state, torch.rand(4, device=DEVICE).cpu()


# A recurrent layer's backward pass gets its memory in advance instead: it writes between its allocations.
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (convnet, {}),
        (transformer, {}),
        (transformer, {"autocast": True}),
        (mlp, {"foreach": False}),
        (mlp, {"fused": True}),
        (mlp, {"capturable": True}),
        (recurrent, {"backward": False}),
    ],
)
@pytest.mark.parametrize("path", ["fast", "slow"])
def test_each_request_of_a_step_is_refused_once(make, options, path):
    before = 3  # steps, after which operators are known
    requests = []

    def counts(step):
        refuse(-1)
        step()
        requests.append(refuse(-1))

    def refuses(step):
        place.append(None)
        refuse(len(place) - before)
        step()
        refuse(-1)

    train(make, before + 1, step_of=counts, **options)
    steps = before + requests[-1]
    plain = train(make, steps, step_of=lambda step: step(), **options)
    gc.collect()
    place = []
    with dtrrun.budget(2 << 30, device=DEVICE, cost="model") as session:
        if path == "slow":
            session.callbacks.reasons.add("a test")
        found = train(make, steps, step_of=refuses, **options)
        report = session.report()
    assert same(plain, found)
    assert report["oom_retries"] >= steps // 2  # the rest were for memory that dtrrun itself requested


def test_a_refusal_in_an_attentions_backward_pass():
    q, k, v = (torch.randn(2, 2, 64, 16, device=DEVICE, requires_grad=True) for _ in range(3))

    def gradients():
        torch.manual_seed(0)
        out = F.scaled_dot_product_attention(q * 1, k * 1, v * 1, dropout_p=0.25)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    expected = gradients()
    for reasons in ((), ("a test",)):
        with dtrrun.budget(2 << 30, device=DEVICE, cost="model") as session:
            for reason in reasons:
                session.callbacks.reasons.add(reason)
            for n in range(1, 12):
                refuse(n)
                found = gradients()
                refuse(-1)
                assert all(map(torch.equal, expected, found))
