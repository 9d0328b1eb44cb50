"""PyTorch's cost of passing an operator to Python and back: a part of the slowdown that our clocks miss.

Our clock starts when the mode's handler is entered and stops when it returns. Before and after that, PyTorch
packs the arguments, calls into Python, calls back into the dispatcher, and works with colder caches than it
would without us. On small operators this exceeds everything that we measure. So it is measured separately: a
tiny network runs a few training steps with a mode like the session's and without. The difference, less the
time that the handler has accounted for, is taken as the extra cost of each operator.

The time is the thread's CPU time, which other processes do not disturb, scaled by how much they slow the
thread down.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from statistics import median, quantiles
from time import perf_counter_ns, thread_time_ns
from typing import Any

import torch
from torch.nn.functional import linear, relu
from torch.utils._python_dispatch import _disable_current_modes

from dtrrun.core.dtr import DTR
from dtrrun.core.search import make_policy
from dtrrun.runtime import storage
from dtrrun.runtime.ambient import Ambient
from dtrrun.runtime.dispatch.mode import DTRMode
from dtrrun.runtime.dispatch.signatures import Signatures
from dtrrun.runtime.dispatch.slow_path import SlowPath
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.execute import Executor

_C: Any = torch._C
_engine: Any = torch.autograd.Variable._execution_engine
_set_eval_frame: Any = _C._dynamo.eval_frame.set_eval_frame
SETTLING = 3  # steps
ROUNDS = 40  # of one step each
AGAIN = (1, 16, 64, 256, 1024)
"""Steps after which the cost is measured again, while there are fewer measurements than that."""
WORTH_IT = 5000  # operators, in a program without steps
NEVER = 1 << 62


class DispatchCost:
    """The cost per operator in ns, as the median of all measurements."""

    def __init__(self) -> None:
        self._measured: list[float] = []

    def of(self, operators: int) -> int:
        """Return the cost of this many operators; 0 before the first measurement."""
        return round(operators * median(self._measured)) if self._measured else 0

    def step_ended(self, steps: int) -> int:
        """Measure if it is time to after this many steps. Returns the nanoseconds that this took."""
        if steps in AGAIN and len(self._measured) <= AGAIN.index(steps):
            return self.measure(backward=True)
        return 0

    def program_ended(self, operators: int) -> int:
        """Measure at the end of a program without steps. Returns the nanoseconds that this took."""
        return self.measure(backward=False) if not self._measured and operators >= WORTH_IT else 0

    def measure(self, *, backward: bool) -> int:
        """Measure once more, in tens of milliseconds. Draws no random numbers and leaves no tensors behind.

        backward: include backward passes. Nothing is measured if the state of PyTorch would make the
        measurement visible to the program, or its timing different from the program's.
        """
        started = perf_counter_ns()
        if not _watched():
            with suppress(Exception):  # the program may have changed PyTorch in any way
                self._measured.append(_measure(backward and _top_hooks is not None))
        return perf_counter_ns() - started


dispatch_cost = DispatchCost()
"""Of this process: later sessions need not measure it again."""


# In PyTorch 2.6, nothing tells whether the program's hooks on saved tensors are on.
_top_hooks = getattr(_C._autograd, "_top_saved_tensors_default_hooks", None)


def _watched() -> bool:
    return (
        (_top_hooks is not None and _top_hooks(False) is not None)
        or _C._functorch.peek_interpreter_stack() is not None
        or _C._autograd._profiler_enabled()
        or torch.is_anomaly_enabled()
        or _C._is_tracing()
    )


def _measure(backward: bool) -> float:
    with ExitStack() as around:
        around.callback(_set_eval_frame, _set_eval_frame(None))  # Dynamo must not trace this
        around.enter_context(_disable_current_modes())
        around.enter_context(torch.inference_mode(False))
        around.enter_context(torch.enable_grad())
        around.enter_context(torch.autocast("cpu", enabled=False))
        around.enter_context(_C.DisableTorchFunction())
        network, mode = _Network(backward), _private_mode()
        for _ in range(SETTLING):  # the first call of an operator takes longer
            network.step()
            with mode:
                network.step()
        first_operator = mode.ledger.age
        rounds = []
        wall, cpu = perf_counter_ns(), thread_time_ns()
        for _ in range(ROUNDS):
            plain, accounted = network.step(), mode.bookkeeping_ns
            with mode:
                under_mode = network.step()
            rounds.append((plain, under_mode, mode.bookkeeping_ns - accounted))
        contention = (perf_counter_ns() - wall) / max(thread_time_ns() - cpu, 1)
        plain_ns, under_mode_ns, _ = map(median, zip(*rounds, strict=True))
        # The handler's clock includes time of other processes; the shortest rounds had none.
        accounted_ns = quantiles([accounted for *_, accounted in rounds])[0]
        operators = (mode.ledger.age - first_operator) / ROUNDS
    cost: float = max(under_mode_ns - plain_ns - accounted_ns, 0.0) / operators * max(contention, 1.0)
    return cost


def _private_mode() -> DTRMode:
    """Return a mode over its own ledger, without a budget."""
    dtr = DTR(
        make_policy("lru"),
        storage,
        Executor(ambient := Ambient("cpu"), storage, None),
        budget_bytes=None,
        budget_error=BudgetError,
        out_of_memory=torch.OutOfMemoryError,
    )
    lock = threading.RLock()
    slow_path = SlowPath(
        dtr,
        ambient,
        Signatures(dtr.ledger, None),
        lock,
        threading.Condition(lock),
        device=None,
        kernels={},
        tick=_nothing,
        met_leaf=_nothing,
        met_thread=_nothing,
        too_small=_nothing,
    )
    slow_path.home, slow_path.next_tick = threading.get_ident(), NEVER
    return DTRMode(slow_path)


def _nothing(*_: Any) -> None:
    pass


class _Network:
    """Two small layers, made by operators that draw no random numbers."""

    def __init__(self, backward: bool) -> None:
        self._backward = backward

        def new(*size: int) -> torch.Tensor:
            return torch.full(size, 0.1, dtype=torch.float32, device="cpu")

        self._input = new(8, 16)
        self._parameters = [new(16, 16), new(16), new(16, 16), new(16)]
        for parameter in self._parameters:
            parameter.requires_grad_()
        self._seed = new(1).reshape(())

    def step(self) -> int:
        """Run one step. Returns the thread's CPU time in ns."""
        first, first_bias, second, second_bias = self._parameters
        started = thread_time_ns()
        hidden = relu(linear(self._input, first, first_bias))
        loss = (relu(linear(hidden, second, second_bias)) ** 2).mean()
        if self._backward:
            gradients = _engine.run_backward(
                (loss,),
                (self._seed,),
                False,
                False,
                tuple(self._parameters),
                allow_unreachable=True,
                accumulate_grad=False,
            )
            updates = [gradient * 0.01 for gradient in gradients]
            del gradients, updates
        del hidden, loss
        return thread_time_ns() - started
