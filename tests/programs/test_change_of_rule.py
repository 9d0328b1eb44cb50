"""Another heuristic takes over between two steps of a random program."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from hypothesis import given, note

import dtrrun
from dtrrun.bindings import make_policy
from dtrrun.core.graph import Version
from dtrrun.core.ledger import Ledger
from tests.programs import drawing
from tests.programs.amount import NUMBER, search, seeded
from tests.programs.language import Program
from tests.programs.running import Conditions, compare, plain, settle
from tests.programs.test_decisions_given_up import decisions

TURNS = ("lru", "h_dtr_eq", "h_dtr_eq", "e_star", "h_chain", "random", "size")


def test_the_bits_stay() -> None:
    tally: Counter[str] = Counter()

    @search(max(NUMBER // 3, 1))
    @given(drawing.programs, drawing.conditions)
    def same_bits(program: Program, conditions: Conditions) -> None:
        expected = plain(program)
        least = None
        for share in (None, conditions.share):
            one = conditions._replace(share=share, turns=TURNS)
            note(f"compare({program!r}, {one!r})")
            report = compare(program, one, expected, least)
            least = report["peak_bytes"]
            tally["rematerialized"] += report["rematerializations"] > 0
        settle()

    seeded(same_bits)()
    assert tally["rematerialized"] > 0


def test_a_rule_that_takes_over_from_itself_chooses_as_if_nothing_had_happened() -> None:
    """It knows all that is in the pool, in order, and all that is evicted or released."""
    tally: Counter[str] = Counter()

    @search(max(NUMBER // 3, 1))
    @given(drawing.programs, drawing.conditions)
    def same(program: Program, conditions: Conditions) -> None:
        expected = plain(program)
        least = None
        for share in (None, conditions.share):
            one = conditions._replace(share=share, careful=False, heuristic="h_chain")
            note(f"compare({program!r}, {one!r})")
            alone = decisions(compare(program, one, expected, least))
            changed = decisions(compare(program, one._replace(turns=("h_chain",)), expected, least))
            assert changed == alone
            least = alone.get("peak_bytes", least)
            tally["rematerialized"] += alone.get("rematerializations", 0) > 0
            settle()

    gc.disable()  # when it frees cycles depends on how many objects have been made
    try:
        seeded(same)()
    finally:
        gc.enable()
    assert tally["rematerialized"] > 0


def test_an_interrupt_leaves_each_storage_in_the_pool_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(ledger: Ledger) -> list[Version]:
        """Fail after the former policy has released its storages, before the new one has any."""
        monkeypatch.delattr(Ledger, "known")
        raise KeyboardInterrupt

    with dtrrun.budget(100_000) as session:
        x = torch.ones(2_000)
        kept = [x + number for number in range(20)]
        pool = list(session.ledger.policy)
        assert len(pool) > 3
        monkeypatch.setattr(Ledger, "known", interrupted, raising=False)
        policy = make_policy("h_chain", extension=session._native)
        with pytest.raises(KeyboardInterrupt):
            session.ledger.change_policy(policy)
        assert session.ledger.policy is policy
        assert list(policy) == pool
        assert policy.nbytes == sum(version.nbytes for version in pool)
        assert [one[0].item() for one in kept] == [1 + number for number in range(20)]
