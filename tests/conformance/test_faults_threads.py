"""Four different models trained by four threads in one session: errors in one do not disturb the others."""

import threading

import pytest
import torch
from faults import check_accounts, run_together
from programs import assert_same, bits
from torch import nn

import dtrrun


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.GRU(16, 16, batch_first=True)

    def forward(self, x):
        return self.cells(x.view(32, 4, 16))[0][:, -1]


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 16)),
    "conv": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 8),
    ),
    "recurrent": LastState,
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (4, 16)), nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    ),
}


def trained(name, seed, fails=False):
    own = torch.Generator().manual_seed(seed)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2, generator=own)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(4):
        x = torch.randn(32, 64, generator=own)
        if fails:
            with pytest.raises(RuntimeError, match="shapes"):
                (model(x) @ torch.ones(3, 3)).sum().backward()
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return losses, model, optimizer


def test_four_models_at_once_while_one_keeps_failing():
    def fails(name):
        return name == "conv"

    expected = {name: bits(trained(name, seed, fails(name))) for seed, name in enumerate(MODELS)}
    found, results = {}, {}
    together = threading.Barrier(len(MODELS))

    def work(name, seed):
        together.wait()
        results[name] = trained(name, seed, fails(name))
        found[name] = bits(results[name])

    with dtrrun.budget(80_000, over_budget="evict", verify=True) as session:
        threads = [threading.Thread(target=work, args=(name, seed)) for seed, name in enumerate(MODELS)]
        run_together(threads)
        check_accounts(session)
        assert session.report()["evictions"] > 100
    assert session.report()["mismatches"] == []
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert_same(values, found[name], f"{name}, in the session")
        assert_same(values, bits(results[name]), f"{name}, afterwards")


def test_one_thread_reads_what_another_evicts():
    """Both threads read all of one chain again and again, in opposite directions."""
    made = [torch.randn(32, 32)]
    expected, found = {}, {}

    def reading(kept, order, results, name):
        results[name] = [bits([one * 2 for one in kept[::order]]) for _ in range(3)]

    def chain():
        kept = [made[0]]
        for step in range(12):
            kept.append(torch.sin(kept[-1] * 1.1 + step))
        return kept

    for name, order in (("forward", 1), ("backward", -1)):
        reading(chain(), order, expected, name)
    with dtrrun.budget(5 * 4096, over_budget="evict", verify=True) as session:
        kept = chain()
        threads = [
            threading.Thread(target=reading, args=(kept, order, found, name))
            for name, order in (("forward", 1), ("backward", -1))
        ]
        run_together(threads)
        check_accounts(session)
        assert session.report()["rematerializations"] > 20
    assert found == expected
    assert session.report()["mismatches"] == []
