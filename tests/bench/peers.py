"""dtrrun and its alternatives for a model that takes too much memory, on the same models in one run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import dtrrun
from tests.bench.checkpointing import Blocks, residual_network, transformer
from tests.bench.runs import ROOT, environment
from tests.bench.section import Section

TEXT = """\
Each model is trained in the ways in which a program can be made to take less memory, and unchanged inside
the peak that each of these reaches. The peak is that of all memory which PyTorch's allocator gives out, by
its profiler, in the same way for all. The times are processor times, medians of the steps after the second,
as multiples of the plain model's. "Equal" says whether the loss and all gradients of the last step are
those of the plain model, to the last bit. "Lines" is how many lines of the program have to be written or
changed. What dtrrun needs in the same memory is in the last two columns: its time, and its own peak as a
share of the plain one. Saving on the CPU moves nothing where the model is on the CPU already: only on a GPU
does it save anything. `torch.compile` with a budget is `activation_memory_budget`. A compiled model is run
by dtrrun without being compiled."""

BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2)
LINES = {
    "plain": 0,
    "checkpoint by block": 1,
    "selective checkpoint by block": 8,
    "gradients of 2 parts": 4,
    "gradients of 4 parts": 4,
    "save_on_cpu": 1,
    "torch.compile": 1,
    **{f"torch.compile, budget {budget}": 2 for budget in BUDGETS},
}
"""The ways, and the number of lines of a program that each changes."""


class Recurrent(nn.Module):
    """An LSTM whose time steps are a Python loop; blocks of ten steps."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every
        self.embedding, self.cell, self.last = (
            nn.Embedding(64, 128),
            nn.LSTMCell(128, 256),
            nn.Linear(256, 64),
        )

    def some(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = []
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
            outputs.append(self.last(h))
        return torch.stack(outputs, 1), h, c

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = c = torch.zeros(len(words), 256)
        outputs = []
        for part in self.embedding(words).split(10, 1):
            if self.every:
                output, h, c = checkpoint(self.some, part, h, c, use_reentrant=False)
            else:
                output, h, c = self.some(part, h, c)
            outputs.append(output)
        return torch.cat(outputs, 1)


def recurrent(every: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    words = torch.randint(0, 64, (64, 41))
    return Recurrent(every), words[:, :-1], words[:, 1:]


MODELS: dict[str, Callable[[int], Any]] = {
    "transformer": transformer,
    "residual network": residual_network,
    "LSTM": recurrent,
}


class Peak:
    """The peak bytes allocated by PyTorch, from the profiler's record of one step."""

    def __init__(self, before: int) -> None:
        """before: bytes that existed already."""
        self._before = before

    def __enter__(self) -> Peak:
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )
        self._profile.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._profile.__exit__(*exc)
        results = self._profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        changes = [(one.start_ns(), one.nbytes()) for one in results if one.name() == "[memory]"]
        now = self.nbytes = self._before
        for _, nbytes in sorted(changes, key=lambda change: change[0]):
            now += nbytes
            self.nbytes = max(self.nbytes, now)


def selective(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `checkpoint` that saves the results of matrix products and convolutions."""
    saved = {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.convolution.default,
    }

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda *args, **kwargs: original(*args, **kwargs, context_fn=contexts)


@contextlib.contextmanager
def prepared(way: str) -> Iterator[None]:
    """Context in which a model is trained in a way."""
    with contextlib.ExitStack() as stack:
        if way == "save_on_cpu":
            stack.enter_context(torch.autograd.graph.save_on_cpu())
        if way.startswith("selective"):
            for module in (sys.modules[Blocks.__module__], sys.modules[__name__]):
                original = module.checkpoint  # type: ignore[attr-defined]
                module.checkpoint = selective(original)  # type: ignore[attr-defined]
        if "budget" in way:
            from torch._functorch import config

            config.activation_memory_budget = float(way.rpartition(" ")[2])
        yield


def train(name: str, way: str, steps: int) -> dict[str, Any]:
    """Train a model in one way, in this process. Returns the time of a step, its peak, and a digest."""
    torch.manual_seed(0)
    model, inputs, targets = MODELS[name](1 if "checkpoint" in way else 0)
    run = torch.compile(model) if way.startswith("torch.compile") else model
    parts = int(way.split()[2]) if way.startswith("gradients") else 1
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    times = []

    def step() -> torch.Tensor:
        total = torch.zeros(())
        for part, wanted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            loss = nn.functional.cross_entropy(run(part).flatten(0, -2), wanted.flatten()) / parts
            loss.backward()
            total += loss.detach()
        return total

    with prepared(way):
        for _ in range(steps):
            optimizer.zero_grad()
            start = time.process_time()
            step()
            optimizer.step()
            times.append(time.process_time() - start)
        optimizer.zero_grad()
        held = [*model.parameters(), *model.buffers(), inputs, targets]
        state = [
            one for of in optimizer.state.values() for one in of.values() if isinstance(one, torch.Tensor)
        ]
        with Peak(sum(one.nbytes for one in (*held, *state))) as peak:
            loss = step()
            optimizer.step()
    digest = hashlib.sha256(loss.numpy().tobytes())
    for parameter in model.parameters():
        assert parameter.grad is not None
        digest.update(parameter.grad.contiguous().numpy().tobytes())
    return {"seconds": median(times[2:]), "peak": peak.nbytes, "digest": digest.hexdigest()}


def in_a_process(name: str, way: str, steps: int, budget: int | None = None) -> dict[str, Any] | None:
    """Return the same from a separate process; None if it fails. budget: dtrrun's, in bytes."""
    words = [name, way, str(steps), *([] if budget is None else [str(budget)])]
    command = [sys.executable, "-m", "tests.bench.peers", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode != 0:
        if "BudgetError" in done.stderr or way.startswith("selective"):  # selective refuses in-place changes
            return None
        raise RuntimeError(f"{name}, {way}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(quick: bool) -> Section:
    steps = 4 if quick else 8
    headers = ["Model, way", "Lines", "Peak", "Time", "Equal", "dtrrun: time", "Peak"]
    section = Section("23. Other ways to save memory", TEXT, headers)
    for name in ("transformer",) if quick else MODELS:
        ways = ["plain", "checkpoint by block", "torch.compile, budget 0.4"] if quick else [*LINES]
        theirs: dict[str, Any] = {}
        ours: dict[str, Any] = {}
        for way in ways:
            theirs[way] = in_a_process(name, way, steps)
            found = theirs[way]
            ours[way] = None if found is None else in_a_process(name, "plain", steps, found["peak"])
        for way in ways:
            cells = _cells(theirs[way], theirs["plain"])
            dtrrun_cells = _cells(ours[way], theirs["plain"]) if cells else []
            if dtrrun_cells and dtrrun_cells[2] == "no":
                section.missed.append(f"{name}, {way}: dtrrun's bits are others")
            cells = cells or ["fails", "", ""]
            if cells[0] != "fails":
                cells += [dtrrun_cells[1], dtrrun_cells[0]] if dtrrun_cells else ["too small", ""]
            cells += [""] * (5 - len(cells))
            section.rows.append([f"{name}, {way}", str(LINES[way]), *cells])
    return section


def _cells(run: dict[str, Any] | None, plain: dict[str, Any]) -> list[str]:
    """Return peak, time, and whether the bits are equal; [] if the run failed."""
    if run is None:
        return []
    equal = "yes" if run["digest"] == plain["digest"] else "no"
    return [f"{run['peak'] / plain['peak']:.0%}", f"{run['seconds'] / plain['seconds']:.2f}", equal]


def main(name: str, way: str, steps: str, budget: str = "") -> None:
    torch.set_num_threads(1)
    with dtrrun.budget(int(budget), device="cpu") if budget else contextlib.nullcontext():
        print(json.dumps(train(name, way, int(steps))))


if __name__ == "__main__":
    main(*sys.argv[1:])
