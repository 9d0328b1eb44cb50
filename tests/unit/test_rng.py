"""dtrrun.runtime.rng with a generator like CUDA's, which shows when it was set."""

import pytest
import torch

from dtrrun.runtime import rng
from dtrrun.runtime.rng import capture, put_back, replaying


class Philox:
    """CUDAGeneratorImpl: a shareable state, and a flag that makes recurrent dropout start over."""

    def __init__(self, device=None):
        self.device = torch.device("cuda", 0)
        self.state = {"seed": 67280421310721, "offset": 0}
        self.begins_anew = True

    def initial_seed(self):
        return self.state["seed"]

    def get_offset(self):
        return self.state["offset"]

    def manual_seed(self, seed):
        self.state.update(seed=seed, offset=0)
        self.begins_anew = True

    def set_offset(self, offset):
        self.state["offset"] = offset
        self.begins_anew = True

    def graphsafe_get_state(self):
        other = Philox()
        other.state = self.state
        return other

    def graphsafe_set_state(self, other):
        self.state = other.state

    def draw(self):
        self.state["offset"] += 4
        return self.state["seed"], self.state["offset"]


@pytest.fixture
def generator(monkeypatch):
    monkeypatch.setattr(torch, "Generator", Philox)
    monkeypatch.setattr(rng, "_spares", {})
    made = Philox()
    made.manual_seed(7)
    made.begins_anew = False  # the recurrent layer has started
    return made


def test_a_replay_draws_what_was_drawn(generator):
    generator.draw()
    captured = capture(generator.device, generator)
    expected = [generator.draw(), generator.draw()]
    generator.draw()
    for _ in range(2):
        with replaying(captured):
            assert [generator.draw(), generator.draw()] == expected
        assert generator.get_offset() == 16
    assert generator.draw() == (7, 20)


def test_a_replay_tells_recurrent_dropout_nothing(generator):
    captured = capture(generator.device, generator)
    generator.draw()
    with replaying(captured):
        generator.draw()
    assert not generator.begins_anew


def test_a_replay_that_fails_leaves_the_generator_where_it_was(generator):
    captured = capture(generator.device, generator)
    generator.draw()
    context = replaying(captured)
    context.__enter__()
    generator.draw()
    context.__exit__(RuntimeError, None, None)
    assert generator.get_offset() == 4


def test_an_operator_that_has_not_drawn_has_nothing_put_back(generator):
    generator.draw()
    captured = capture(generator.device, generator)
    put_back(captured)
    assert not generator.begins_anew
    generator.draw()
    put_back(captured)
    assert generator.get_offset() == 4


def test_on_the_cpu_the_state_is_a_copy():
    generator = torch.Generator().manual_seed(3)
    captured = capture(torch.device("cpu"), generator)
    expected = torch.rand(4, generator=generator)
    after = generator.get_state()
    with replaying(captured):
        assert torch.equal(torch.rand(4, generator=generator), expected)
    assert torch.equal(generator.get_state(), after)
    put_back(captured)
    assert torch.equal(torch.rand(4, generator=generator), expected)
