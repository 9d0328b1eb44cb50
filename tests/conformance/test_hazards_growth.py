"""Storages that an operator enlarges: `out=` into an empty tensor, `resize_`, `set_` beyond the end."""

import torch
from programs import check_stress

import dtrrun

KIB = 1 << 10


def resident(session):
    return session.report()["resident_bytes"]


def test_grown_storages_are_counted():
    x = torch.rand(64, 64)  # 16 KiB
    with dtrrun.budget(None) as session:
        y = x + 1
        before = resident(session)
        grown = torch.cat([x, y], out=torch.empty(0))
        values, places = torch.max(x, 1, out=(torch.empty(0), torch.empty(0, dtype=torch.long)))
        assert resident(session) == before + 32 * KIB + 256 + 512
        larger = (x * 2).resize_(128, 64).zero_()
        assert resident(session) == before + 64 * KIB + 768
        rows = torch.zeros(1)
        rows.set_(rows.untyped_storage(), 0, (64, 64))
        assert resident(session) == before + 80 * KIB + 768
        del grown, values, places, larger, rows
        assert resident(session) == before


def test_room_is_made_before_a_storage_grows():
    x = torch.rand(64, 64)
    for grow in (
        lambda: torch.cat([x, x], out=torch.empty(0)),
        lambda: torch.exp(x, out=torch.empty(0)),
        lambda: torch.empty(0).resize_(64, 64).fill_(1),
        lambda: torch.empty(0).resize_as_(x).copy_(x),
        lambda: (x[:1] * 2).resize_(64, 64).fill_(2),
    ):
        with dtrrun.budget(96 * KIB) as session:
            idle = [x + step for step in range(8)]
            grown = [grow() for _ in range(2)]
            assert session.report()["evictions"] > 0
            assert session.report()["peak_bytes"] <= 96 * KIB
        del idle, grown


def test_grown_storages_are_evicted_and_come_back():
    def program():
        kept = []
        for step in range(4):
            x = torch.sin(torch.randn(32, 32) + step)
            grown = torch.cat([x, x * 2], out=torch.empty(0))
            half = torch.exp(x, out=torch.zeros(32, 64)[:, :32])
            kept += [grown, half]
        return kept

    report = check_stress(program)
    assert report["pinned_bytes"] <= 2 * 8 * KIB, "they can be replayed"


def test_content_outlives_a_change_of_size():
    def program():
        kept = []
        for step in range(4):
            x = torch.sin(torch.randn(32, 32) + step)
            grown = torch.cat([x, x * 2], out=torch.empty(0))
            before = x.tanh()
            x.resize_(64, 32)  # memory beyond the old content is undefined
            x[32:] = grown[:32]
            after = x.exp()
            x.resize_(8, 32)
            kept += [x, grown, before, after, x + 1]
        return kept

    check_stress(program)
