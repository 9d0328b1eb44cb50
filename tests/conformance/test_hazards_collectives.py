"""Collectives: other processes read and write the memory, even after the operator has returned."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from programs import assert_same, bits, chain, check_stress, in_memory, plain

import dtrrun


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store")), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def pair():
    """Both ends of a connection, in this process."""
    store = dist.HashStore()
    ends = [None, None]

    def connect(rank):
        end = dist.ProcessGroup(store, rank, 2)
        backend = dist.ProcessGroupGloo(dist.PrefixStore("pair", store), rank, 2, timedelta(seconds=30))
        end._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        end._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        ends[rank] = end

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def test_what_is_being_sent_stays_in_memory(pair):
    def program(squeeze=lambda: None):
        x = torch.sin(torch.arange(1 << 18) * 1.0)
        y = torch.zeros(1 << 18)
        sent = pair[0].send([x], 1, 0)
        squeeze()  # the receiver has not started: everything is still to be read
        pair[1].recv([y], 0, 0).wait()
        sent.wait()
        return [x, y, y * 2]

    expected = plain(program)
    with dtrrun.budget(None, verify=True) as session:
        torch.manual_seed(7)

        def squeeze():
            kept = torch.cos(torch.arange(1 << 18))
            with pytest.raises(dtrrun.BudgetError):
                session.set_budget(1)
            session.set_budget(None)
            assert not in_memory(kept), "nothing was evicted: the test does not bite"

        result = program(squeeze)
    assert_same(expected[: len(bits(result))], bits(result), "after the transfer")


def test_what_is_being_received_stays_in_memory(pair):
    with dtrrun.budget(1, over_budget="evict") as session:
        y = torch.sin(torch.zeros(1 << 18))
        later = y * 2
        received = pair[1].recv([y], 0, 0)
        kept = chain(torch.randn(64, 64))
        assert in_memory(y)
        pair[0].send([torch.full((1 << 18,), 5.0)], 1, 0).wait()
        received.wait()
        kept += chain(torch.randn(64, 64))
        assert later.sum().item() == 0
        assert y.mean().item() == 5
        assert session.report()["evictions"] > 0


COLLECTIVES = {
    "broadcast": lambda x, out: dist.broadcast(x, 0),
    "all_reduce": lambda x, out: dist.all_reduce(x),
    "all_reduce_coalesced": lambda x, out: dist.all_reduce_coalesced([x]),
    "reduce": lambda x, out: dist.reduce(x, 0),
    "all_gather": lambda x, out: dist.all_gather([out], x),
    "all_gather_into_tensor": lambda x, out: dist.all_gather_into_tensor(out, x),
    "gather": lambda x, out: dist.gather(x, [out]),
    "scatter": lambda x, out: dist.scatter(out, [x]),
    "reduce_scatter": lambda x, out: dist.reduce_scatter(out, [x]),
    "reduce_scatter_tensor": lambda x, out: dist.reduce_scatter_tensor(out, x),
    "all_to_all_single": lambda x, out: dist.all_to_all_single(out, x),
    "functional all_reduce": lambda x, out: out.copy_(funcol.all_reduce(x, "sum", dist.group.WORLD)),
    "functional all_gather": lambda x, out: out.copy_(funcol.all_gather_tensor(x, 0, dist.group.WORLD)),
    "functional reduce_scatter": lambda x, out: out.copy_(
        funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD)
    ),
    "functional broadcast": lambda x, out: out.copy_(funcol.broadcast(x, 0, dist.group.WORLD)),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # renamed in 2.13
@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_a_collective_has_written_is_not_lost(name):
    """Their schemas do not declare the write: the recipe of `out` would bring back zeros."""

    def program():
        kept = []
        for step in range(3):
            x = torch.sin(torch.randn(64, 64) + step)
            out = torch.zeros(64, 64)
            before = [x * 2, out + 1]
            COLLECTIVES[name](x, out)
            kept += [*before, x, out, x * 3, *chain(torch.cos(out), 3)]
        return kept

    check_stress(program)


@pytest.mark.usefixtures("alone")
def test_asynchronous_collectives():
    def program():
        kept = []
        for step in range(3):
            x, y = (torch.sin(torch.randn(64, 64) + step) for _ in range(2))
            out = torch.zeros(64, 64)
            works = [dist.all_reduce(x, async_op=True), dist.all_gather([out], y, async_op=True)]
            functional = funcol.all_reduce(y, "sum", dist.group.WORLD)
            kept += chain(torch.randn(64, 64), 4)
            for work in works:
                work.wait()
            kept += [x * 2, out * 2, functional * 2, y, x, out]
        return kept

    check_stress(program)
