"""dtrrun.runtime.cuda.fragmentation"""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from dtrrun.runtime.cuda.fragmentation import Block, best_hole, fragmented_bytes


def segment(*blocks):
    """Blocks of (bytes, price): price 0 is free."""
    made, address = [], 1
    for nbytes, price in blocks:
        made.append((Block(address, nbytes, price == 0), price))
        address += nbytes
    return made


def chosen(wanted, *segments):
    prices = {(i, block.address): price for i, one in enumerate(segments) for block, price in one}
    renamed, table = [], {}
    for i, one in enumerate(segments):
        blocks = []
        for block, _ in one:
            address = i * 10**6 + block.address
            table[address] = prices[i, block.address]
            blocks.append(block._replace(address=address))
        renamed.append(blocks)
    return best_hole(renamed, wanted, table.get)


def test_neighbours_are_chosen_though_others_are_cheaper_each():
    # 4 bytes are wanted: the two cheapest blocks are not adjacent, so each would free only 2 bytes.
    assert chosen(4, segment((2, 1), (2, None), (2, 1), (2, None), (2, 3), (2, 3))) == [9, 11]


def test_free_blocks_cost_nothing_and_help():
    assert chosen(4, segment((2, 9), (2, 9), (2, 0), (2, 5))) == [7]


def test_the_cheapest_segment():
    assert chosen(2, segment((2, 5)), segment((2, 3))) == [10**6 + 1]


def test_what_has_to_stay_ends_a_window():
    assert chosen(4, segment((2, 1), (2, None), (2, 1))) is None
    assert chosen(1, []) is None


def test_a_free_block_that_is_large_enough_needs_no_eviction():
    assert chosen(4, segment((2, 1), (5, 0))) == []


def test_segments_are_not_joined():
    assert chosen(4, segment((2, 1)), segment((2, 1))) is None


@given(st.lists(st.tuples(st.integers(1, 9), st.none() | st.integers(0, 9)), max_size=9), st.integers(1, 30))
def test_as_good_as_trying_all_windows(blocks, wanted):
    one = segment(*blocks)
    least = None
    for first, last in combinations(range(len(one) + 1), 2):
        window = one[first:last]
        if all(price is not None for _, price in window) and sum(b.nbytes for b, _ in window) >= wanted:
            cost = sum(price for _, price in window)
            least = cost if least is None else min(least, cost)
    found = best_hole([[block for block, _ in one]], wanted, {b.address: p for b, p in one}.get)
    if least is None:
        assert found is None
    else:
        assert sum(price for block, price in one if block.address in found) == least


def test_free_bytes_beside_the_largest_block_are_fragmented():
    blocks = [segment((2, 0), (2, 1), (5, 0)), segment((3, 0))]
    assert fragmented_bytes([[block for block, _ in one] for one in blocks]) == 5
    assert fragmented_bytes([]) == 0
