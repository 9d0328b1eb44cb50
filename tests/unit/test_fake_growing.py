"""The model of PyTorch's allocator with growing segments does what c10/cuda/CUDACachingAllocator.cpp does."""

import pytest
import torch
from fake_growing import Growing

from dtrrun.runtime.shares import MIB


def taken(allocator, *mib):
    """Pieces of these sizes, in use until `free`d."""
    pieces = []
    for size in mib:
        piece = allocator.reserve(size * MIB)
        piece.address = -1
        pieces.append(piece)
    return pieces


def free(*pieces):
    for piece in pieces:
        piece.address = 0


def large(allocator):
    allocator.collect()
    return [
        (part.nbytes // MIB, "unmapped" if not part.mapped else "used" if part.address else "free")
        for part in allocator.segments[1]
    ]


@pytest.fixture
def allocator():
    model = Growing()
    model.busy = True  # nothing is freed but by the tests
    return model


def test_whole_free_pages_are_unmapped_and_the_lowest_gap_is_mapped_again(allocator):
    first, _, last = taken(allocator, 50, 20, 50)
    free(first, last)
    allocator.empty_cache()
    assert large(allocator) == [(40, "unmapped"), (10, "free"), (20, "used"), (10, "free")]
    taken(allocator, 45)  # not behind the last one
    assert large(allocator) == [(45, "used"), (5, "free"), (20, "used"), (10, "free")]


def test_gaps_and_free_blocks_side_by_side_serve_one_request(allocator):
    pieces = taken(allocator, 30, 20, 30, 20)
    free(pieces[0], pieces[2])
    allocator.empty_cache()
    free(pieces[1])
    assert large(allocator) == [(20, "unmapped"), (40, "free"), (20, "unmapped"), (20, "used")]
    taken(allocator, 70)
    assert large(allocator) == [(70, "used"), (10, "free"), (20, "used")]


def test_best_fit_counts_the_gap_behind_a_block(allocator):
    _, before, second, _ = taken(allocator, 10, 50, 15, 5)
    free(before)
    allocator.empty_cache()
    free(second)
    assert large(allocator) == [(10, "used"), (10, "free"), (40, "unmapped"), (15, "free"), (5, "used")]
    taken(allocator, 9)  # the block of 10 could grow to 50
    assert large(allocator)[3:5] == [(9, "used"), (6, "free")]


def test_the_whole_request_counts_against_the_cap(allocator):
    allocator.cap = 60 * MIB
    first, second = taken(allocator, 30, 10)
    free(first)
    allocator.empty_cache()
    assert large(allocator) == [(20, "unmapped"), (10, "free"), (10, "used")]
    taken(allocator, 28)  # 20 are missing, 28 counts
    assert allocator.flushes == 0
    free(second)
    third = taken(allocator, 12)
    free(*third)
    with pytest.raises(torch.OutOfMemoryError, match=r"allocate 34\.00 MiB"):
        taken(allocator, 33)
    assert (allocator.flushes, allocator.unmapped) == (1, 0)


def test_what_is_not_mapped_parts_a_snapshot(allocator):
    _, middle, _ = taken(allocator, 20, 20, 20)
    free(middle)
    allocator.empty_cache()
    assert [[part.nbytes // MIB for part in parts] for parts in allocator.mapped()] == [[20], [20]]
