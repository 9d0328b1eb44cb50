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


def of_layers() -> None:
    model = mlp(4, 32, lambda: nn.BatchNorm1d(32), lambda: nn.Dropout(0.1))
    train(model, batch, torch.optim.Adam(model.parameters()))


def compiled() -> None:
    torch._dynamo.reset()
    model = mlp(3, 32, lambda: nn.BatchNorm1d(32))
    run = torch.compile(model, backend="aot_eager")
    train(run, batch, torch.optim.SGD(model.parameters(), 0.1))


def failing_to_compile() -> None:
    """After such an error, Dynamo goes on watching frames."""
    torch._dynamo.reset()

    def backend(graph: Any, inputs: Any) -> Any:
        raise NotImplementedError("my backend")

    try:
        torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.randn(8, 8))
    except torch._dynamo.exc.BackendCompilerFailed:
        of_layers()


def nested() -> None:
    model = mlp(3)
    parts = [torch.randn(rows, 32) for rows in (40, 20, 30)]
    model(torch.nested.nested_tensor(parts, layout=torch.jagged)).values().sum().backward()


def threaded() -> None:
    thread = threading.Thread(target=of_layers)
    thread.start()
    thread.join()


def handing_out() -> None:
    made = mlp(4)(torch.randn(64, 32))
    array = made.detach().numpy()
    copy.deepcopy(mlp(2))(made).sum().backward()
    array[0] = 1


def refused() -> None:
    with contextlib.suppress(dtrrun.BudgetError):
        kept = [nn.Parameter(torch.randn(256, 64)).sin() for _ in range(12)]
        kept[0].add(torch.cat(kept).sum())
    of_layers()


def in_mixed_precision() -> None:
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        kept = [torch.randn(512, 32)]
        for layer in mlp(6):
            kept.append(layer(kept[-1]))
        kept[1].float().add(kept[-1].float().sum())


PROGRAMS: tuple[Callable[[], None], ...] = (
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
            over = "warn" if nbytes == 200_000 else "error"
            with dtrrun.budget(
                nbytes, heuristic=heuristic, cost="model", device="cpu", quiet=True, over_budget=over
            ) as session:
                PROGRAMS[place]()
                found.append(f"{PROGRAMS[place].__name__} {nbytes} {told(session)}")
    return found


def test_each_decides_as_in_a_process_of_its_own() -> None:
    alone = {run: apart(decided, [run]) for run in RUNS}
    evicting = [one for found in alone.values() for one in found if " 200000 " in one]
    assert not [one for one in evicting if one.split()[2] == "0"], "these programs say nothing"
    for runs in (RUNS, RUNS[::-1]):
        assert apart(decided, runs) == [one for run in runs for one in alone[run]]
