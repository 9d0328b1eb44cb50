"""Runs a small program plain and under dtrrun, and compares what it returns bit for bit.

A program is a function without arguments that returns anything built of tensors, numbers, text, lists, tuples
and dicts. Everything it returns is compared twice: as read inside the session, and after the session's end.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from tempfile import gettempdir
from typing import Any
from zlib import crc32

import torch
from torch import nn

import dtrrun
from dtrrun.core.graph import Operation, Version
from dtrrun.runtime.session import Session
from dtrrun.runtime.storage import is_empty, own_storage_of
from tests.care import budget

COPYING = 0.01
"""ns for each byte of a copy that is made ahead: so few that it is soon over, and others can follow."""
Program = Callable[[], Any]
Report = dict[str, Any]


def bits(value: Any) -> list[Any]:
    """Return everything that a result holds, in order, as comparable values."""
    return [one for part in leaves(value) for one in bits_of(part)]


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, nn.Module):
        named = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        yield from leaves(named)
        yield from leaves([p.grad for p in value.parameters()])
    elif isinstance(value, torch.optim.Optimizer):
        yield from leaves(value.state_dict()["state"])
    elif isinstance(value, dict):
        for name, item in value.items():
            yield str(name)
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def bits_of(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return [repr(value)]
    if value.requires_grad:
        value = value.detach()
    if value.layout == torch.sparse_coo:
        value = value.coalesce()
        return bits([list(value.shape), value.indices(), value.values()])
    if value.layout == torch.sparse_csr:
        return bits([list(value.shape), value.crow_indices(), value.col_indices(), value.values().clone()])
    if value.is_quantized:
        return bits([value.q_scale(), value.q_zero_point(), value.int_repr()])
    if value._is_zerotensor():  # has no memory
        return ["zeros", str(value.dtype), list(value.shape)]
    flat = value.resolve_conj().resolve_neg().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # one element may have any stride
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.numel() < 2:  # contiguous whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    # tolist of the bytes, eight at a time: values that differ never compare equal, and NaN equals itself.
    flat = flat.view(torch.uint8)
    if flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0:
        flat = flat.view(torch.int64)
    return [str(value.dtype), list(value.shape), list(value.stride()), flat.tolist()]


def outcome(program: Program) -> tuple[Any, list[Any]]:
    """Return the result of a fresh run, and its bits with the final state of the generators."""
    torch.manual_seed(7)
    random.seed(7)
    result = program()
    return result, bits([result, torch.get_rng_state(), str(random.getstate())])


def plain(program: Program) -> list[Any]:
    return outcome(program)[1]


def difference(expected: list[Any], found: list[Any]) -> str:
    """Return where two lists of bits first differ; empty if they don't."""
    for place, (one, other) in enumerate(zip(expected, found, strict=False)):
        if one != other:
            return f"value {place} of {len(expected)}: {str(one)[:200]} became {str(other)[:200]}"
    return "" if len(expected) == len(found) else f"{len(expected)} values became {len(found)}"


def assert_same(expected: list[Any], found: list[Any], when: str) -> None:
    told = difference(expected, found)
    assert not told, f"{when}: {told}"


def run_inside(
    program: Program,
    budget_bytes: int | None,
    *,
    by_address: bool = False,
    careful: bool = True,
    host: bool = False,
    results_leave: int = 0,
    **options: Any,
) -> tuple[list[Any], dict[str, Any]]:
    """Run under dtrrun; return the bits after the session's end (equal to those inside it) and the report.

    by_address: whether native code may touch evicted memory, which is then brought back for it. careful: as
    in `tests.care.budget`. host: whether constants leave for the host as well, from the beginning, unless
    they are tiny. results_leave: then whether results do, as in `core.ledger.Ledger`.
    """
    host_budget = f"4GB:{gettempdir()}" if host else "none"
    given = {"verify": True, "host_budget": host_budget, **options}
    with budget(budget_bytes, careful=careful, **given) as session:
        if host:
            session.ledger.results_leave = results_leave
            session.ledger.least_copy_bytes = 128  # PyTorch reads scalars by address, such as a graph's
            session.ledger.let_constants_leave()
        result, inside = outcome(program)
        report = session.report()
        generator = torch.get_rng_state()
    native = report["native"]
    assert by_address or native is None or native["read_by_address"] == 0, "read without an operator"
    mismatches = session.report()["mismatches"]
    assert mismatches == [], mismatches
    torch.set_rng_state(generator)
    assert_same(
        inside, bits([result, torch.get_rng_state(), str(random.getstate())]), "after the session's end"
    )
    return inside, report


def let_copies_overlap(session: Session) -> None:
    """Replace the file of a session on the CPU by one to which copies are made ahead, as for a GPU."""
    host = session.ledger.host
    assert host is not None
    file = session.ledger, gettempdir(), host["most_bytes"], COPYING, COPYING
    session._native.open_host_file(*file, True, True)


def check_stress(
    program: Program,
    expected: list[Any] | None = None,
    *,
    by_address: bool = False,
    host: bool = True,
) -> dict[str, Any]:
    """Check that the bits are the same under a one-byte budget, with care and without (`tests.care`).

    host: whether, in one of the two runs (for half of the programs each), constants leave for the host as
    well, and for half of these, results do, too, instead of being recomputed.
    """
    expected = plain(program) if expected is None else expected
    number = crc32(program.__qualname__.encode())
    when_careful = number % 2 == 0
    for careful in (False, True):
        given = {
            "over_budget": "evict",
            "careful": careful,
            "by_address": by_address,
            "host": host and careful == when_careful,
            "results_leave": 2 * (number >> 1 & 1),
        }
        found, report = run_inside(program, 1, **given)
        assert_same(expected, found, f"under stress, careful={careful}")
        assert report["evictions"] + report["copies_out"] > 0, "nothing was evicted: the test does not bite"
    return report


def check_budget(program: Program, expected: list[Any] | None = None) -> Report:
    """Check at half of the program's peak, or the least feasible share above: same bits, never over it."""
    expected = plain(program) if expected is None else expected
    found, counted = run_inside(program, None)
    assert_same(expected, found, "counted only")
    for share in (0.5, 0.7, 0.9):
        budget_bytes = int(counted["peak_bytes"] * share)
        try:
            found, report = run_inside(program, budget_bytes)
        except dtrrun.BudgetError:
            continue
        assert_same(expected, found, f"at {share:.0%} of the peak")
        assert report["evictions"] > 0
        assert report["peak_bytes"] <= budget_bytes
        return report
    raise AssertionError("no budget below the peak was feasible")


def check(program: Program, *, host: bool = True) -> None:
    """Check under stress and inside a budget, against a plain run. host: as in `check_stress`."""
    expected = plain(program)
    assert_same(expected, plain(program), "the program itself repeats")
    check_stress(program, expected, host=host)
    check_budget(program, expected)


def train(
    model: nn.Module,
    make_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
) -> dict[str, Any]:
    """Run a plain training loop; return what a user would want to be equal afterwards."""
    losses = []
    for _ in range(steps):
        inputs, targets = make_batch()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return {"losses": losses, "model": model, "optimizer": optimizer}


def in_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is not evicted, without bringing it back."""
    return not is_empty(own_storage_of(tensor))


def living_nodes(session: Session) -> tuple[int, int]:
    """Return how many versions and operations exist, of all sessions."""
    gc.collect()
    if session._native is not None:  # the garbage collector does not track these
        versions, operations = session._native.living()
        return versions, operations
    kinds = [type(one) for one in gc.get_objects()]
    return kinds.count(Version), kinds.count(Operation)


def mlp(depth: int = 6, width: int = 32, *extra: Callable[[], nn.Module]) -> nn.Sequential:
    """Linear layers with ReLU, and `extra` modules after each."""
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(), *(make() for make in extra)]
    return nn.Sequential(*layers)


def batch(rows: int = 64, width: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width)


def chain(x: torch.Tensor, length: int = 8) -> list[torch.Tensor]:
    """Return a chain of activations that are all kept, each computed from the one before."""
    kept = [x]
    for step in range(length):
        kept.append(torch.sin(kept[-1] * 1.1 + step))
    return kept


def most_recent(size: int, staleness: int, cost: float, projected_cost: float) -> float:
    """A heuristic that evicts what was used last, and so protects nothing that is about to be used."""
    return staleness


most_recent.neighbourhood = "none"
