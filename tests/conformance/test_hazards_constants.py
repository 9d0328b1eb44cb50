"""Constants that change (buffers, running statistics) after something was computed from them."""

import torch
from programs import chain, check_stress
from torch import nn

import dtrrun


def test_mutation_of_a_buffer_on_the_short_cut():
    """A signature that is known by then, a constant that results rely on: one evicted, one in memory."""

    def program():
        buffer = torch.linspace(0, 1, 64 * 32).reshape(64, 32).clone()
        kept = []
        for step in range(8):
            kept += [buffer * 2, torch.sin(buffer)]
            kept += chain(kept[-1], 2)[1:]
            buffer.mul_(0.9)  # what is evicted was computed from the old values
            kept.append(buffer + 1)
            buffer.add_(0.1)
            if step % 2:
                kept.append(buffer.exp())
        return kept, buffer

    values = torch.randn(64, 32).tolist()

    def changing():
        """The same with a constant, which no recipe makes."""
        own = torch.tensor(values)
        kept = []
        for _ in range(6):
            kept.append(own * 2)
            own.mul_(0.5)
            kept.append(torch.cos(own))
        return kept, own

    check_stress(program)
    check_stress(changing)
    with dtrrun.budget(None) as session:
        before = torch.zeros(64, 32)
        session.pin(before)
        for _ in range(4):
            old = before.exp()
            before.add_(1.0)
            record = session.slow_path.version_of(old)
            assert record.operation.inputs[0] is not session.slow_path.version_of(before), (
                "an old version was read"
            )


def test_statistics_are_read_before_they_are_updated():
    def program():
        norm = nn.BatchNorm1d(32)
        kept = []
        for step in range(5):
            x = torch.sin(torch.randn(64, 32) + step)
            kept += [norm.running_mean * 2, norm.running_var.sqrt()]
            norm.eval()
            kept.append(norm(x))  # computed from the statistics, which the next line updates
            norm.train()
            kept.append(norm(x))
        return kept, list(norm.buffers())

    check_stress(program)


def evicted_at_the_end(session):
    session.dtr.eviction.warn_only = True
    session.set_budget(1)
    assert session.report()["evictions"] > 0


def test_what_statistics_made_is_evicted_after_their_update():
    """It was in memory at the update, so that nothing was rescued: from then on it has no recipe."""
    norm = nn.BatchNorm1d(32)
    x = torch.randn(64, 32)
    expected = norm.running_mean * 2
    with dtrrun.budget("1GB") as session:
        made = norm.running_mean * 2
        norm(x)
        other = x * 2
        evicted_at_the_end(session)
        assert torch.equal(made, expected)
        assert torch.equal(other, x * 2)


def test_constants_that_the_program_releases():
    """A recipe keeps them as long as what it makes is evicted."""
    values = torch.randn(64, 32).tolist()

    def program():
        kept = []
        for step in range(6):
            constant = torch.tensor(values)
            kept.append(torch.sin(constant * step))
            kept.append(constant + 1)
            del constant
            kept.append(torch.rand(64, 32))
        return kept

    check_stress(program)


def test_storages_that_grow_and_shrink_are_counted():
    with dtrrun.budget(None) as session:
        session.report()
        before = session.report()["resident_bytes"]
        x = torch.zeros(64)
        x.resize_(64, 64)
        assert session.report()["resident_bytes"] == before + 64 * 64 * 4
        out = torch.empty(0)
        torch.cat([x, x], out=out)
        assert session.report()["resident_bytes"] == before + 3 * 64 * 64 * 4
        del x, out
        assert session.report()["resident_bytes"] == before
