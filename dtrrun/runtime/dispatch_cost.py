"""What PyTorch takes to hand an operator to Python and back: a part of the slowdown that our clocks miss.

Our clock starts when the mode's handler is entered and stops when it returns. Before and after that, PyTorch
packs the arguments, calls into Python, calls back into the dispatcher, and works with colder caches than it
would without us. On small operators this is more than all that we measure. So it is measured by itself: a few
training steps of a tiny network, with a mode of the session's kind and without, of which the difference less
what the handler has accounted for, for each operator, is what the others are taken to cost as well.

The time is the thread's own, so that other processes do not disturb it, and then scaled by as much as they
slow the thread down.
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

from dtrrun.policy import make_policy
from dtrrun.runtime.careful import Careful
from dtrrun.runtime.ledger import Ledger
from dtrrun.runtime.mode import DTRMode
from dtrrun.runtime.replay import Replay

_C: Any = torch._C
_engine: Any = torch.autograd.Variable._execution_engine
_set_eval_frame: Any = _C._dynamo.eval_frame.set_eval_frame
SETTLING = 3  # steps
ROUNDS = 40  # of a step each
AGAIN = (1, 16, 64, 256, 1024)
"""Steps of the program after which it is measured, as long as there are fewer measurements than that."""
WORTH_IT = 5000  # operators, in a program without steps
NEVER = 1 << 62


class DispatchCost:
    """Nanoseconds for each operator, as the median of all measurements."""

    def __init__(self) -> None:
        self._measured: list[float] = []

    def of(self, operators: int) -> int:
        """For so many operators; 0 as long as nothing has been measured."""
        return round(operators * median(self._measured)) if self._measured else 0

    def step_ended(self, steps: int) -> int:
        """After so many steps: measure where it is time to. Returns the nanoseconds that this took."""
        if steps in AGAIN and len(self._measured) <= AGAIN.index(steps):
            return self.measure(backward=True)
        return 0

    def program_ended(self, operators: int) -> int:
        """The same at the end of a program that has made no step."""
        return self.measure(backward=False) if not self._measured and operators >= WORTH_IT else 0

    def measure(self, *, backward: bool) -> int:
        """Measure once more, which takes tens of milliseconds; draws nothing and leaves no tensor behind.

        backward: with backward passes as well. Nothing is measured where PyTorch is in a state in which they
        would be seen by the program, or would take another time than its own operators.
        """
        started = perf_counter_ns()
        if not _watched():
            with suppress(Exception):  # whatever the program has done to PyTorch, it is no reason to fail
                self._measured.append(_measure(backward))
        return perf_counter_ns() - started


dispatch_cost = DispatchCost()
"""Of this process: sessions that follow one another need not measure it again."""


def _watched() -> bool:
    return (
        _C._autograd._top_saved_tensors_default_hooks(False) is not None
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
        for _ in range(SETTLING):  # every operator is met for the first time
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
        # The handler's clock goes on while another process runs: in the shortest rounds none did.
        accounted_ns = quantiles([accounted for *_, accounted in rounds])[0]
        operators = (mode.ledger.age - first_operator) / ROUNDS
    cost: float = max(under_mode_ns - plain_ns - accounted_ns, 0.0) / operators * max(contention, 1.0)
    return cost


def _private_mode() -> DTRMode:
    """A mode over a ledger of its own, without a budget."""
    ledger = Ledger(None, make_policy("lru"))
    replay = Replay(ledger)
    careful = Careful(ledger, replay, _nothing, _nothing, _nothing)
    careful.home, careful.met_thread = threading.get_ident(), _nothing
    careful.next_tick = NEVER
    return DTRMode(careful)


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
        """Returns the nanoseconds of the thread that it took."""
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
