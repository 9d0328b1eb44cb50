"""Weights, gradients and optimizer state leave a GPU for pinned memory: same bits in less than they take."""

import ctypes
import random

import pytest
import torch
from gpu_programs import DEVICE, HOLLOW, MIB, beside, forget
from torch import nn

import dtrrun
from dtrrun.core.host import ALWAYS, NEVER

pytestmark = pytest.mark.usefixtures("gpu")

DEPTH, WIDTH = 8, 1024
STATE = 4 * DEPTH * (WIDTH * WIDTH + WIDTH) * 4
KINDS = {"each": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def program(steps=3, **kind):
    torch.manual_seed(3)
    layers = [part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **kind)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(64, WIDTH, device=DEVICE)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    state = [value for p in model.parameters() for value in (p.detach(), *optimizer.state[p].values())]
    return [one.cpu() for one in (*losses, *state)]


def budget_for(tensors, **kind):
    """Return a budget with room for so many bytes of tensors, and the program's result without one."""
    with dtrrun.budget(None, device=DEVICE) as session:
        expected = program(**kind)
        overhead = session.report()["overhead_bytes"]
    kept = torch.cuda.memory_allocated()  # by cuBLAS
    forget()
    return overhead + kept + 64 * MIB + tensors + 32 * MIB, expected


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_does_not_fit(kind):
    budget_bytes, expected = budget_for(STATE // 3, **KINDS[kind])
    torch.cuda.reset_peak_host_memory_stats()
    with dtrrun.budget(budget_bytes, DEVICE, verify=True, host_budget="500MB") as session:
        found = program(**KINDS[kind])
        report = session.report()
    assert all(map(torch.equal, found, expected))
    assert report["mismatches"] == []
    assert report["verified"] > 0
    assert report["footprint_peak_bytes"] <= budget_bytes
    assert report["peak_bytes"] < STATE
    assert min(report["copies_out"], report["copies_in"]) > 0
    assert report["host_peak_bytes"] <= report["host_budget_bytes"] == 500_000_000
    assert 0 < torch.cuda.host_memory_stats()["allocated_bytes.peak"] <= 500_000_000  # pinned


def test_a_script_trains_where_it_would_end_and_says_so(capfd):
    """Half of the host's memory is there for it, unless the user forbids it."""
    budget_bytes, _ = budget_for(STATE // 2, fused=True)
    with (
        pytest.raises(dtrrun.BudgetError, match="--host-budget"),
        dtrrun.budget(budget_bytes, DEVICE, host_budget="none"),
    ):
        program(fused=True)
    forget()
    with dtrrun.budget(budget_bytes, DEVICE) as session:
        program(fused=True)
        assert session.report()["left_peak_bytes"] > 0
    said = [line for line in capfd.readouterr().err.splitlines() if "pinned memory" in line]
    assert len(said) == 1


def test_a_budget_that_is_set_later():
    """Until then, operators have only been counted."""

    def lower(figures):
        if figures["step"] == 5:
            assert session.ledger.counting
            session.set_budget(budget_bytes)

    budget_bytes, expected = budget_for(STATE // 2, steps=7, fused=True)
    with dtrrun.budget(None, DEVICE) as session:
        session.on_step(lower)
        found = program(steps=7, fused=True)
        assert session.report()["left_peak_bytes"] > 0
        assert session.ledger.resident_bytes < STATE
    assert all(map(torch.equal, found, expected))


# -- copies ahead, on streams of their own: each test fails on a race as well -------------------------


def recurrent(side=None):
    """Train a recurrent network, and read one of its states on another stream, if there is one."""
    torch.manual_seed(5)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=DEVICE) / 32)
    inputs = [torch.randn(512, WIDTH, device=DEVICE) for _ in range(4)]
    main, kept = torch.cuda.current_stream(), []
    for step in range(4):
        state, states = inputs[step], []
        for _ in range(20):
            state = torch.tanh(state @ weight)
            states.append(state)
        if side is not None:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                kept.append(states[2].sum())
            main.wait_stream(side)
        loss = sum(one.square().mean() for one in states)
        loss.backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
        kept.append(loss.detach())
        del state, states, loss
    return [one.cpu() for one in (weight.detach(), *kept)]


def room_for(nbytes):
    """Return a budget with this much for tensors, beside what is kept free and what verifies."""
    overhead = beside()
    forget()
    return overhead + torch.cuda.memory_allocated() + (64 + 18 + 8) * MIB + nbytes


@pytest.mark.parametrize("beside_main", [False, True])
def test_copies_ahead(beside_main):
    """What comes back may be used by another stream than before: the present one is asked for each time."""
    side = torch.cuda.Stream() if beside_main else None
    expected = recurrent(side)
    budget_bytes = room_for((76 if beside_main else 56) * MIB)  # what a side stream uses stays
    with dtrrun.budget(budget_bytes, DEVICE, verify=True, cost="model", host_budget="500MB") as session:
        session.ledger.results_leave = ALWAYS
        found = recurrent(side)
        report, host = session.report(), session.ledger.host
    assert all(map(torch.equal, found, expected))
    assert report["mismatches"] == []
    if not beside_main:
        assert report["footprint_peak_bytes"] <= budget_bytes
    assert min(host["ahead_out"], host["ahead_in"]) > 0
    assert host["copies_out"] > host["ahead_out"]


def constant():
    return torch.randn(512, WIDTH).to(DEVICE)  # 2 MB


def check_inside(program, nbytes, results_leave=NEVER):
    """Check that a program computes the same with so much room for its tensors. Return the host's figures."""
    expected = program()
    with dtrrun.budget(room_for(nbytes), DEVICE, verify=True, cost="model", host_budget="500MB") as session:
        session.ledger.results_leave = results_leave
        session.ledger.let_constants_leave()
        found = program()
        report, host = session.report(), session.ledger.host
    assert all(map(torch.equal, found, expected))
    assert report["mismatches"] == []
    assert report["host_bytes"] <= 64 * MIB
    return host


def write_again(tensors):
    """In a session, write what they contain to those that are in memory: some are being copied."""
    session = dtrrun.current()
    for one in tensors if session else ():
        version = session.callbacks.version_of(one)
        if version is not None and version.resident:
            one.mul_(1)


def ask_for_memory(nbytes):
    """Write to memory of PyTorch's allocator that is no tensor's, as libraries do."""
    if not HOLLOW:
        return
    memory, stream = torch.cuda.caching_allocator_alloc(nbytes), torch.cuda.current_stream().cuda_stream
    ctypes.CDLL(None).cudaMemsetAsync(*map(ctypes.c_void_p, (memory, 0, nbytes, stream)))
    torch.cuda.caching_allocator_delete(memory)


def test_what_is_copied_ahead_may_change_or_go():
    """Copies under way are waited for, or given up. Others ask for memory meanwhile."""

    def program():
        torch.manual_seed(6)
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        choose = random.Random(6)
        kept = [constant() for _ in range(32)]
        for step in range(100):
            one, other = choose.sample(range(len(kept)), 2)
            match choose.randrange(3):
                case 0:
                    kept[one].mul_(1.5)
                case 1:
                    kept[one] = constant()
                case 2:
                    kept[one].add_(kept[other])
            if step % 5 == 0:
                write_again(kept)
            if step % 30 == 7:
                for place in range(16):
                    kept[place] = None
                    ask_for_memory(2 * MIB)
                kept[:16] = [constant() for _ in range(16)]
        kept[5].add_(kept[6])
        side.wait_stream(main)
        with torch.cuda.stream(side):
            write_again(kept)
        main.wait_stream(side)
        return [kept.pop().cpu() for _ in range(len(kept))]

    assert check_inside(program, 57 * MIB)["ahead_out"] > 0


def test_results_that_are_copied_ahead():
    """They may be released meanwhile, and they may come back ahead, too."""

    def program():
        torch.manual_seed(6)
        first, kept, found = constant(), [constant()], []
        for _ in range(3):
            for _ in range(30):
                kept.append(kept[-1].sin() + first)
            del kept[:-1]
        for _ in range(30):
            kept.append(kept[-1].sin() + first)
        del kept[-12:]
        while len(kept) > 4:  # there is room, so those that follow come back, too
            found.append(kept.pop().sum())
        return [one.cpu() for one in found]

    host = check_inside(program, 57 * MIB, ALWAYS)
    assert min(host["ahead_in"], host["ahead_out"]) > 4


def test_copies_out_for_another_stream():
    """They wait for the main stream."""

    def program():
        torch.manual_seed(6)
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        kept, session = [constant() for _ in range(32)], dtrrun.current()
        for one in 4 * kept:  # the first copies are timed, and the host waits for them
            one.mul_(1.1)
        for one in kept[-8:]:
            side.wait_stream(main)
            one.mul_(2)
            with torch.cuda.stream(side):  # an operator needs room
                if session:
                    assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(one))
        return [one.cpu() for one in kept]

    assert check_inside(program, 50 * MIB)["copies_out"] > 32
