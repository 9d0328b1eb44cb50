"""Side streams and CUDA graphs with the real allocator and streams."""

import pytest
import torch
from gpu_programs import DEVICE, MIB, beside, chain, correct, tensor

import dtrrun

pytestmark = pytest.mark.usefixtures("gpu")

BUDGET = (64 + 22 + 200) * MIB


def test_side_streams():
    with dtrrun.budget(beside() + BUDGET, device=DEVICE) as session:
        side = torch.cuda.Stream()
        kept = chain(40)
        evicted = [one for one in kept if not session.callbacks.version_of(one).resident]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            sums = [one.add(1.0).sum() for one in evicted[:6]]
            torch.cuda._sleep(50_000_000)
        more = chain(40)
        torch.cuda.current_stream().wait_stream(side)
        expected = [(2.0 ** next(i for i, one in enumerate(kept) if one is e) + 1) for e in evicted[:6]]
        assert [one.item() / (2 * MIB) for one in sums] == expected
        assert correct(kept)
        assert correct(more)
        assert session.device.operators.side_storages >= 6


def test_a_captured_graph_replays_while_others_are_evicted():
    with dtrrun.budget(beside() + 2 * BUDGET, device=DEVICE) as session:
        static = tensor()
        warm = torch.cuda.Stream()
        warm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm):
            static.mul(3.0).add_(1.0)
        torch.cuda.current_stream().wait_stream(warm)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = torch.nn.functional.dropout(static.mul(3.0).add_(1.0), 0.0)
        for step in range(3):
            kept = chain(60)
            static.fill_(float(step))
            graph.replay()
            assert bool((result == 3.0 * step + 1).all())
            assert correct(kept)
        assert session.report()["evictions"] > 0
        assert session.callbacks.version_of(static).pin == "CUDA graph"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_replays_while_another_device_is_the_current_one():
    with dtrrun.budget(beside() + BUDGET, device=f"{DEVICE}:0") as session:
        kept = chain(40)  # its first tensor is recorded without an index
        with torch.cuda.device(1):
            elsewhere = torch.ones(8, device=DEVICE)
            assert elsewhere.device.index == 1
            assert correct(kept)
            assert torch.cuda.current_device() == 1
        assert session.report()["rematerializations"] > 0
        assert session.callbacks.reasons.any
