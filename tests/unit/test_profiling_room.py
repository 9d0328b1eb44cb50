"""dtrrun.profiling.room: the room for tensors, as the runtime computes it on a GPU."""

import pytest

from dtrrun.profiling.room import budget_for, room_in
from dtrrun.runtime.cuda.budget import Accounts

MIB = 1 << 20


@pytest.mark.parametrize("budget", [1000 * MIB, 3200 * MIB, 12_000_000_000, 80 << 30])
@pytest.mark.parametrize("overhead", [0, 300 * MIB, 700 * MIB])
def test_it_is_what_the_runtime_would_give_the_tensors(budget, overhead):
    accounts = Accounts(budget)
    accounts.look(reserved=100 * MIB, used=overhead + 100 * MIB, driver=None, now=1.0)
    assert accounts.overhead == overhead
    assert room_in(budget, overhead) == accounts.limit(allocated=MIB, resident=MIB)


@pytest.mark.parametrize("tensors", [10**6, 1 << 30, 12_345_678_901, 70 << 30])
@pytest.mark.parametrize("overhead", [None, 0, 700 * MIB])
def test_the_least_budget_for_so_many_bytes(tensors, overhead):
    budget = budget_for(tensors, overhead)
    assert room_in(budget, overhead) >= tensors
    assert room_in(budget - 1, overhead) < tensors


def test_on_the_cpu_a_budget_is_for_tensors_alone():
    assert room_in(12345, None) == budget_for(12345, None) == 12345


def test_a_budget_below_the_overhead_has_next_to_no_room():
    assert room_in(100 * MIB, 700 * MIB) == 1
