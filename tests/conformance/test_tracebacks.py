"""Tracebacks show the program, as without a budget: none of dtrrun's frames, and the sentence last.

What a program catches is compared with what it catches without dtrrun, frame by frame; what it does not catch
read from the output of a command.
"""

import queue
import subprocess
import sys
import threading
import traceback

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtrrun
from dtrrun.runtime.tracebacks import PACKAGE, hide


@torch.library.custom_op("dtrrun_test::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    raise LookupError("the operator's own")


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, where):
        ctx.save_for_backward(x)
        ctx.where = where
        if where == "forward":
            raise ValueError("forward")
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        if ctx.saved_tensors[0] is not None:
            torch.ones(2, 3) @ gradient.new_ones(2, 3)
        return gradient, None


class Raising(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mul" in str(func):
            raise KeyError("in a mode of the program's")
        return func(*args, **(kwargs or {}))


def in_a_mode():
    with Raising():
        torch.ones(2) * 2


def while_handling():
    try:
        raise OSError("the program's own trouble")
    except OSError:
        torch.ones(2, 3) @ torch.ones(2, 3)


def in_a_hook():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: gradient @ torch.ones(7))
    y.sum().backward()


def checkpointed():
    def part(x):
        if part.runs:
            raise ValueError("when run again")
        part.runs = True
        return x.sin()

    part.runs = False
    checkpoint(part, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()


ERRORS = {
    "operator": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
    "second operator": lambda: [torch.ones(2) @ torch.ones(2), torch.ones(2) @ torch.ones(3)],
    "in place": lambda: torch.ones(3).add_(torch.ones(4)),
    "module": lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 6))(torch.ones(2, 3)),
    "view": lambda: torch.ones(6).view(4, 2),
    "index": lambda: torch.ones(3)[7],
    "embedding": lambda: nn.Embedding(3, 4)(torch.tensor([5])),
    "constructor": lambda: torch.tensor([[1.0], [2.0, 3.0]]),
    "escape": lambda: torch.ones(3, requires_grad=True).numpy(),
    "custom operator": lambda: torch.ops.dtrrun_test.picky(torch.ones(3)),
    "backward": lambda: torch.ones(3, requires_grad=True).mul(2).backward(),
    "backward twice": lambda: [loss := (torch.ones(3, requires_grad=True) ** 2).sum(), loss.backward()][
        0
    ].backward(),
    "function's forward": lambda: Fails.apply(torch.ones(3, requires_grad=True), "forward"),
    "function's backward": lambda: Fails.apply(torch.ones(3, requires_grad=True), "b").sum().backward(),
    "hook": in_a_hook,
    "mode": in_a_mode,
    "while handling": while_handling,
    "checkpoint": checkpointed,
    "inference": lambda: torch.inference_mode()(lambda: nn.Linear(3, 4)(torch.ones(2, 5)))(),
    "vmap": lambda: torch.vmap(lambda x: x @ torch.ones(7))(torch.ones(2, 3)),
    "optimizer": lambda: torch.optim.SGD([torch.ones(3) * 2], lr=-1.0),
    "optimizer's group": lambda: torch.optim.SGD([torch.ones(3, requires_grad=True) * 2], lr=1.0),
    "storage": lambda: torch.ones(3).untyped_storage().resize_(-5),
}


def caught(program):
    try:
        program()
    except BaseException as error:
        return error
    raise AssertionError("it did not fail")


def frames(error):
    """Return file and function of each frame, in the error and in those that it was raised from."""
    found = []
    while error is not None:
        found.append([(entry.filename, entry.name) for entry in traceback.extract_tb(error.__traceback__)])
        error = error.__cause__ or error.__context__
    return found


def inside_of(program, budget, **options):
    with dtrrun.budget(budget, **options):
        return caught(program)


def in_a_thread(program):
    results = queue.Queue()
    thread = threading.Thread(target=lambda: results.put(caught(program)))
    thread.start()
    thread.join()
    return results.get()


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("way", ["fast", "slow", "stress"])
def test_a_programs_error_has_the_frames_of_a_plain_run(name, way):
    options = {"verify": True} if way == "slow" else {"over_budget": "evict"}
    plain = caught(ERRORS[name])
    found = inside_of(ERRORS[name], 1 if way == "stress" else None, **options)
    assert type(found) is type(plain)
    assert frames(found) == frames(plain)


def test_a_programs_error_in_a_thread():
    plain = in_a_thread(ERRORS["module"])
    with dtrrun.budget(None):
        found = in_a_thread(ERRORS["module"])
    assert frames(found) == frames(plain)


def matmul():
    return torch.ones(200, 200) @ torch.ones(200, 200)


def backwards():
    x = torch.ones(100, 100, requires_grad=True)
    y = x.cos()
    y.backward(torch.ones(100, 100))


def escaping():
    kept = [torch.ones(100, 100) for _ in range(8)]
    addresses = [one.data_ptr() for one in kept]
    return kept, addresses


def replaying():
    """Need more than fits at once: replays fail, and are tried in other ways first."""
    kept = [torch.ones(100, 100) * 2 for _ in range(4)]
    sums = [torch.cat([one, one]) for one in kept]
    return torch.cat(sums)


@pytest.mark.parametrize("program", [matmul, backwards, escaping, replaying])
@pytest.mark.parametrize("way", [caught, in_a_thread])
def test_a_budget_error_ends_in_the_program(program, way):
    with dtrrun.budget(100_000):
        error = way(program)
    assert isinstance(error, dtrrun.BudgetError)
    (shown,) = frames(error)  # it was raised while no other exception was being handled
    assert not any(filename.startswith(PACKAGE) for filename, _ in shown)
    assert len(shown) <= (6 if program is backwards else 3)
    text = traceback.format_exception(error)
    assert text[-1].startswith("dtrrun.BudgetError: CPU out of memory. dtrrun's budget of 100 kB ")
    _, *table = text[-1].splitlines()
    assert all(line.startswith("  ") for line in table)
    assert table == [] or table[0].split()[0] == "held"


def test_our_own_mistakes_keep_their_frames():
    with dtrrun.budget(None) as session:
        session.callbacks.signatures.foretell = None  # asked about first calls
        error = caught(lambda: torch.ones(3).cumsum(0))
    assert isinstance(error, TypeError)
    assert any(filename.startswith(PACKAGE) for filename, _ in frames(error)[0])


def test_for_debugging_all_is_kept(monkeypatch):
    monkeypatch.setenv("DTRRUN_DEBUG", "1")
    error = inside_of(escaping, 100_000)
    assert any(filename.startswith(PACKAGE) for filename, _ in frames(error)[0])


def test_hiding_goes_through_a_cycle_of_errors():
    first, second = caught(ERRORS["operator"]), caught(ERRORS["view"])
    first.__context__, second.__context__ = second, first
    hide(first)
    assert first.__context__ is second


SCRIPT = """
import torch
kept = torch.ones(100, 100) * 2
def work():
    return torch.ones(200, 200) @ torch.ones(200, 200)
"""


@pytest.mark.parametrize(
    ("end", "lines"),
    [
        ("work()", 5),
        ("import threading; t = threading.Thread(target=work); t.start(); t.join()", 9),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    work()", 11),
    ],
)
def test_what_is_printed(tmp_path, end, lines):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + end + "\n")
    ended = subprocess.run(
        [sys.executable, "-m", "dtrrun", "--quiet", "--budget", "100kB", script],
        capture_output=True,
        text=True,
    )
    shown = ended.stderr.splitlines()
    assert not any(PACKAGE in line for line in shown)
    end = next(place for place, line in enumerate(shown) if line.startswith("dtrrun.BudgetError: "))
    table = shown[end + 1 :]
    assert all(line.startswith("  ") for line in table)
    shown = shown[: end + 1]
    assert len([line for line in shown if "^" not in line and "~" not in line]) <= lines + 2


def test_an_import_of_torch_that_fails(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart is missing')\n")
    script = tmp_path / "script.py"
    script.write_text("import torch\n")
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True)
    ended = subprocess.run(
        [sys.executable, "-m", "dtrrun", "--quiet", script], capture_output=True, text=True
    )
    assert "libcudart" in plain.stderr
    assert plain.stderr in ended.stderr
