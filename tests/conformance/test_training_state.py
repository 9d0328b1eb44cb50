"""`runtime.observe.training_state`: what a smoke run compares."""

import copy
import json
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import dtrrun
from dtrrun.runtime.observe.training_state import TrainingState, digest


class Trained(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 2)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def train(steps=3, seed=0, average=True):
    torch.manual_seed(seed)
    net = Trained()
    slow = copy.deepcopy(net) if average else None
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(64, 8)).square().mean().backward()
        optimizer.step()
        if slow is not None:
            with torch.no_grad():
                for mine, theirs in zip(slow.parameters(), net.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)


@contextmanager
def watching(folder, *hold):
    watch = TrainingState(str(folder), *hold)
    watch.install()
    try:
        yield
    finally:
        watch.remove()


def written(folder):
    """Return the digests of the network here: other tests may have left modules behind."""
    [path] = folder.glob("*.state")
    assert path.stat().st_mode & 0o77 == 0
    state = json.loads(path.read_text())
    state["digests"] = {
        name: found for name, found in state["digests"].items() if "Trained" in name or "random" in name
    }
    return state


def states(folder, **options):
    with watching(folder):
        train(**options)
    return written(folder)


@pytest.fixture
def folders(tmp_path):
    made = [tmp_path / name for name in "ab"]
    for folder in made:
        folder.mkdir(mode=0o700)
    return made


def test_two_runs_alike_have_the_same_digests(folders):
    one, other = (states(folder) for folder in folders)
    assert one == other
    assert one["step"] == 3
    assert {
        "Trained.first.weight",
        "Trained.norm.running_mean",
        "Trained.norm.num_batches_tracked",
        "Trained 2.last.bias",
        "Adam 0, exp_avg of Trained.first.weight",
        "Adam 0, step of Trained.last.bias",
        "random generator",
    } <= one["digests"].keys()


def test_what_differs_is_named(folders):
    one, other = (states(folder, seed=seed) for folder, seed in zip(folders, (0, 1), strict=True))
    differing = {name for name, value in one["digests"].items() if other["digests"][name] != value}
    assert "Trained.first.weight" in differing
    assert "random generator" in differing
    assert "Trained.norm.num_batches_tracked" not in differing


def test_in_a_session_what_is_evicted_is_brought_back(folders):
    plain = states(folders[0])
    with dtrrun.budget("41KB", cost="model") as session, watching(folders[1], session._access.hold):
        train()
    assert session.dtr.eviction.evictions > 0
    assert written(folders[1]) == plain


def test_what_is_merely_looked_at_is_not_counted(folders):
    beside = nn.Linear(64, 64)
    with dtrrun.budget(None) as session, watching(folders[0], session._access.hold):
        train(1)
        assert id(torch._C.TensorBase.untyped_storage(beside.weight)) not in session.ledger.versions


def test_digests_tell_types_shapes_and_bits_apart():
    values = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        torch.tensor([0.0, 0.0, 0.0, -0.0]),
        torch.zeros(0),
        torch.zeros(4, device="meta"),
        0,
        0.0,
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest(torch.arange(8.0)[::2]) == digest(torch.tensor([0.0, 2.0, 4.0, 6.0]))
    assert digest(torch.arange(8.0)[2:]) == digest(torch.arange(2.0, 8.0))
    assert digest(torch.ones(2, requires_grad=True).bfloat16()) == digest(torch.ones(2).bfloat16())


def test_the_generators_of_gpus_count_too(folders, monkeypatch):
    """A GPU program draws most random numbers there; its generators are read once CUDA is in use."""
    drawn = torch.zeros(16, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: [drawn, torch.zeros(16, dtype=torch.uint8)])
    one = states(folders[0], steps=1)["digests"]
    drawn[8] = 4
    other = states(folders[1], steps=1)["digests"]
    differing = [name for name in one if one[name] != other[name]]
    assert differing == ["random generator of cuda:0"]
    assert "random generator of cuda:1" in one


def test_a_step_that_a_cuda_graph_captures_is_left_alone(tmp_path, monkeypatch):
    capturing = iter([False, True, False])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: next(capturing))
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    assert states(tmp_path, steps=3)["step"] == 2
