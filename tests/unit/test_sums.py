"""Fingerprints that a GPU computes; here, the CPU does."""

import pytest
import torch

from dtrrun.runtime.cuda.sums import PART, WIDTHS, Sums


def figures(*tensors):
    sums = Sums(torch.device("cpu"))
    found = [sums.of(one.untyped_storage(), one.nbytes) for one in tensors]
    table = sums.read()
    return [tuple(table[one.slot]) for one in found]


def changed(tensor, change):
    other = tensor.clone()
    change(other.view(torch.uint8))
    return other


def bit(place):
    def flip(content):
        content[place] ^= 0x80

    return flip


def swap(first, second, size=4):
    def exchange(content):
        one, other = content[size * first :][:size].clone(), content[size * second :][:size].clone()
        content[size * first :][:size], content[size * second :][:size] = other, one

    return exchange


@pytest.mark.parametrize("count", [1, 7, WIDTHS[0], 5000, PART + 20])
def test_the_same_bits_have_the_same_sums_and_others_do_not(count):
    tensor = torch.randn(count)
    changes = [bit(0), bit(tensor.nbytes - 1)]
    if count > PART:
        changes += [
            swap(0, 1),
            swap(3, 3 + WIDTHS[0]),
            swap(3, 3 + WIDTHS[1]),
            swap(1, count - 1),
            swap(7, 7 + PART),
        ]
    others = [changed(tensor, change) for change in changes]
    assert len({*figures(tensor, tensor.clone(), *others)}) == 1 + len(others)


@pytest.mark.parametrize("count", [1, 2, 3, 4001])
def test_sizes_that_are_no_multiple_of_four_bytes(count):
    tensor = torch.randint(0, 255, (count,), dtype=torch.uint8)
    found, same, other = figures(tensor, tensor.clone(), changed(tensor, bit(count - 1)))
    assert found == same != other


def test_only_what_was_written_counts():
    sums, tensor = Sums(torch.device("cpu")), torch.zeros(100)
    before = sums.of(tensor.untyped_storage(), 40)
    tensor[10:] = 1
    after = sums.of(tensor.untyped_storage(), 40)
    nothing = sums.of(torch.empty(0).untyped_storage(), 0)
    table = sums.read()
    assert table[before.slot] == table[after.slot] == table[nothing.slot] == [0, 0]


def test_slots_come_back():
    sums, storage = Sums(torch.device("cpu"), slots=3), torch.ones(4).untyped_storage()
    held = [sums.of(storage, 16) for _ in range(3)]
    assert not sums.has_room()
    held.pop()
    assert sums.has_room()
    assert not sums.has_room(spare=1)
