"""Which neighbouring blocks are evicted for one contiguous free block (`dtrrun/native/device_blocks.h`)."""

from itertools import combinations
from random import Random

import pytest
import torch

import dtrrun
from dtrrun.core.heuristics import STEADY
from dtrrun.runtime.cuda.fragmentation import Block, fragmented_bytes

FREE, FIXED = "free", "fixed"
storage_of = torch._C.TensorBase.untyped_storage  # not the patched methods, which hand memory out
address_of = torch._C.StorageBase.data_ptr


def address(block):
    return address_of(storage_of(block)) if isinstance(block, torch.Tensor) else 1


class Blocks:
    """Segments of blocks: free ones, ones that must stay, and tensors that can be evicted."""

    def __init__(self, session, count=8):
        self.session = session
        self.told = []
        parts = session.ledger, session.callbacks.lock, self, None, None
        self.flushes = session._native.Flushes(*parts, lambda: False, 0)
        x = torch.ones(1000)
        self.tensors = [x.repeat(n).exp() for n in range(1, count + 1)]  # of different costs and ages

    def version(self, tensor):
        return self.session.ledger.version_of(storage_of(tensor))

    def price(self, block):
        if block is FREE:
            return 0.0
        if block is FIXED:
            return None
        version = self.version(block)
        return version.cost / max(self.session.ledger.clock - version.last_access, 1)

    def segments(self, wanted):
        return self.told

    def evict(self, wanted, *segments, at_most=-1):
        """Evict a window. segments: of (bytes, block). Returns whether one was evicted, and the tensors."""
        self.told = [
            [
                (
                    address_of(storage_of(block)) if isinstance(block, torch.Tensor) else 1 + place,
                    nbytes,
                    block is FREE,
                )
                for place, (nbytes, block) in enumerate(segment)
            ]
            for segment in segments
        ]
        done = self.flushes.evict_window(wanted, at_most)
        return done, [n for n, one in enumerate(self.tensors) if not self.version(one).resident]


@pytest.fixture
def blocks():
    with dtrrun.budget("1GB", device="cpu", cost="model", heuristic="h_dtr_local") as session:
        yield Blocks(session)


def test_neighbours_are_chosen_though_others_are_cheaper_each(blocks):
    a, b, c, d = sorted(blocks.tensors[:4], key=blocks.price)
    done, evicted = blocks.evict(4, [(2, a), (2, FIXED), (2, b), (2, FIXED), (2, c), (2, d)])
    assert done
    assert {id(blocks.tensors[n]) for n in evicted} == {id(c), id(d)}


def test_what_free_blocks_make_unnecessary_stays(blocks):
    a, b = blocks.tensors[:2]
    assert blocks.evict(4, [(2, a), (5, FREE), (2, b)]) == (False, [])  # large enough without
    assert blocks.evict(4, [(2, a), (2, FIXED), (2, b)]) == (False, [])
    assert blocks.evict(4, [(2, a)], [(2, b)]) == (False, [])  # segments are not joined
    assert blocks.evict(1) == (False, [])
    assert blocks.evict(4, [(2, FIXED), (2, FREE), (2, b)]) == (True, [1])


def test_among_thousands_of_blocks_the_next_windows_go_as_well(blocks):
    a, b, c = sorted(blocks.tensors[:3], key=blocks.price)
    many = [(2, FIXED)] * 2048
    apart = [(2, a), (2, FIXED), (2, c), (2, FIXED), (2, b)]
    done, evicted = blocks.evict(2, [*apart, *many])
    assert done
    assert {id(blocks.tensors[n]) for n in evicted} == {id(a), id(b)}
    dear, *rest = sorted(blocks.tensors[3:6], key=blocks.price, reverse=True)
    beside = [(2, one) for one in (dear, *rest)]  # another window would need a part of the first
    done, evicted = blocks.evict(4, [*beside, *many])
    assert done
    assert {id(blocks.tensors[n]) for n in evicted} == {id(one) for one in (a, b, *rest)}


def test_a_window_that_costs_too_much_stays(blocks):
    version = blocks.version(blocks.tensors[3])
    [repeated] = version.operation.inputs  # which has been released
    cost = version.cost + repeated.cost
    assert blocks.evict(2, [(2, blocks.tensors[3])], at_most=cost - 1) == (False, [])
    assert blocks.evict(2, [(2, blocks.tensors[3])], at_most=cost) == (True, [3])


def test_what_needs_much_that_is_evicted_is_dear():
    """Else, the neighbours of a window that has been evicted would be the next."""
    with dtrrun.budget("1GB", device="cpu", cost="model", heuristic="h_dtr") as session:
        blocks = Blocks(session, count=1)
        kept = [blocks.tensors[0]]
        for _ in range(4):
            kept.append(kept[-1].exp())
        blocks.tensors = [*kept, torch.ones(1000).repeat(2).sin()]
        torch.ones(100_000).exp()  # both are about as stale
        *chain, last, other = blocks.tensors
        assert blocks.price(last) < blocks.price(other)
        assert blocks.evict(8, [(2, one) for one in chain]) == (True, [0, 1, 2, 3])
        each = blocks.version(last).cost
        either = [(2, last), (2, FIXED), (2, other)]
        assert blocks.evict(2, [(2, last)], at_most=4 * each) == (False, [0, 1, 2, 3])
        assert blocks.evict(2, either) == (True, [0, 1, 2, 3, 5])


def test_what_has_become_cheaper_is_found():
    with dtrrun.budget("1GB", device="cpu", cost="model", heuristic="h_dtr") as session:
        blocks = Blocks(session, count=1)
        first = blocks.tensors[0]
        second = first.exp()
        blocks.tensors = [first, second, torch.ones(1000).repeat(2).sin()]
        torch.ones(100_000).exp()
        either = [(2, second), (2, FIXED), (2, blocks.tensors[2])]
        assert blocks.evict(2, [(2, first)]) == (True, [0])
        assert blocks.evict(2, either, at_most=0) == (False, [0])  # `second` needs `first` now
        first.sum()
        assert blocks.price(second) < blocks.price(blocks.tensors[2])
        assert blocks.evict(2, either) == (True, [1])


@pytest.mark.parametrize("heuristic", ["h_dtr", "h_dtr_eq", "h_dtr_local", "msps", STEADY])
def test_as_good_as_trying_all_windows(heuristic):
    """Whatever has been computed, read, released, evicted and brought back since the last search."""
    random = Random(5)
    with dtrrun.budget("1GB", device="cpu", cost="model", heuristic=heuristic) as session:
        blocks = Blocks(session)
        policy, ledger, tensors = session.ledger.policy, session.ledger, blocks.tensors

        def price(block):
            if block is FREE or block is FIXED or not blocks.version(block).resident:
                return 0.0 if block is FREE else None
            version = blocks.version(block)
            stale = max(ledger.clock - version.last_access, 1)
            return policy.projected_cost(version) / stale ** {"msps": 0, STEADY: 0.6}.get(heuristic, 1)

        for _ in range(150):
            for _ in range(random.randint(0, 3)):
                place = random.randrange(len(tensors))
                if random.random() < 0.4:
                    random.choice(tensors).sum()  # computes it again
                elif random.random() < 0.7:
                    tensors[place] = random.choice(tensors).sin()
                else:
                    tensors[place] = tensors[place] + random.choice(tensors)[:1]
            kinds = [*random.sample(tensors, random.randint(0, 6)), *random.choices([FREE, FIXED], k=4)]
            random.shuffle(kinds)
            segment = [(random.randint(1, 9), one) for one in kinds]
            prices, wanted, least = [price(one) for one in kinds], random.randint(1, 30), None
            for first, last in combinations(range(len(kinds) + 1), 2):
                window = prices[first:last]
                if None not in window and sum(nbytes for nbytes, _ in segment[first:last]) >= wanted:
                    least = min(sum(window), sum(window) if least is None else least)
            done, _ = blocks.evict(wanted, segment)
            assert done == bool(least)
            evicted = [
                price
                for one, price in zip(kinds, prices, strict=True)
                if isinstance(one, torch.Tensor) and price is not None and not blocks.version(one).resident
            ]
            assert sum(evicted) == pytest.approx(least or 0)


def segment(*blocks):
    """Blocks of (bytes, whether it is free)."""
    made, address = [], 1
    for nbytes, free in blocks:
        made.append(Block(address, nbytes, free))
        address += nbytes
    return made


def test_free_bytes_beside_the_largest_block_are_fragmented():
    blocks = [segment((2, True), (2, False), (5, True)), segment((3, True))]
    assert fragmented_bytes(blocks) == 5
    assert fragmented_bytes([]) == 0
