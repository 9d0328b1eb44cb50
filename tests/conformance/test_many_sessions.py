"""A session leaves nothing behind in its process that a later one would decide by."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from programs import batch, mlp, train
from torch import nn

import dtrrun
from tests.decisions.runs import apart, told

Program = Callable[[], Any]
"""Makes what exists before a session, and returns what to run inside it."""


def of_layers() -> Program:
    model = mlp(4, 32, lambda: nn.BatchNorm1d(32), lambda: nn.Dropout(0.1))
    batches, optimizer = [batch() for _ in range(3)], torch.optim.Adam(model.parameters())
    assert sum(one.untyped_storage().nbytes() for pair in batches for one in pair)  # Python has seen these
    return lambda: train(model, iter(batches).__next__, optimizer)


def compiled() -> Program:
    torch._dynamo.reset()
    model = mlp(3, 32, lambda: nn.BatchNorm1d(32))
    batches, optimizer = [batch() for _ in range(3)], torch.optim.SGD(model.parameters(), 0.1)
    run = torch.compile(model, backend="aot_eager")
    return lambda: train(run, iter(batches).__next__, optimizer)


def failing_to_compile() -> Program:
    """After such an error, Dynamo goes on watching frames."""
    torch._dynamo.reset()

    def backend(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("my backend")

    with contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.randn(8, 8))
    return of_layers()


def nested() -> Program:
    model, parts = mlp(3), [torch.randn(rows, 32) for rows in (40, 20, 30)]
    return lambda: model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().sum().backward()


def threaded() -> Program:
    thread = threading.Thread(target=of_layers())
    return lambda: (thread.start(), thread.join())


def handing_out() -> Program:
    model, x = mlp(4), torch.randn(64, 32)

    def run() -> None:
        made = model(x)
        array = made.detach().numpy()
        copy.deepcopy(model)(made).sum().backward()
        array[0] = 1

    return run


def refused() -> Program:
    run = of_layers()

    def refuse() -> None:
        with contextlib.suppress(dtrrun.BudgetError):
            kept = [nn.Parameter(torch.randn(256, 64)).sin() for _ in range(12)]
            kept[0].add(torch.cat(kept).sum())
        run()

    return refuse


def in_mixed_precision() -> Program:
    model, x = mlp(6), torch.randn(512, 32)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            kept = [x]
            for layer in model:
                kept.append(layer(kept[-1]))
            kept[1].float().add(kept[-1].float().sum())

    return run


PROGRAMS: tuple[Callable[[], Program], ...] = (
    *(of_layers, compiled, failing_to_compile, nested, threaded, handing_out, refused, in_mixed_precision),
)
HEURISTICS = itertools.cycle(("h_dtr", "h_dtr_eq", "h_next", "lru"))
RUNS = [(place, heuristic) for place, heuristic in zip(range(len(PROGRAMS)), HEURISTICS, strict=False)]


def decided(runs: list[tuple[int, str]]) -> list[str]:
    """Return the decisions of programs that run one after another, each inside three budgets."""
    found = []
    for place, heuristic in runs:
        for nbytes in (None, 400_000, 200_000):
            torch.manual_seed(1)
            run = PROGRAMS[place]()
            over = "warn" if nbytes == 200_000 else "error"
            with dtrrun.budget(
                nbytes, heuristic=heuristic, cost="model", device="cpu", quiet=True, over_budget=over
            ) as session:
                run()
                found.append(f"{PROGRAMS[place].__name__} {nbytes} {told(session)}")
    return found


def test_each_decides_as_in_a_process_of_its_own() -> None:
    alone = {run: apart(decided, [run]) for run in RUNS}
    evicting = [one for found in alone.values() for one in found if " 200000 " in one]
    assert not [one for one in evicting if one.split()[2] == "0"], "these programs say nothing"
    for runs in (RUNS, RUNS[::-1]):
        assert apart(decided, runs) == [one for run in runs for one in alone[run]]
