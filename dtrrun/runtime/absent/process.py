"""The process of `dtrrun estimate`: the program's first steps on an absent GPU, logged."""

from __future__ import annotations

import os
from contextlib import suppress
from time import perf_counter_ns as now_ns
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer

from dtrrun.extensions import build
from dtrrun.extensions.building import CannotBuild
from dtrrun.runtime.absent import cuda
from dtrrun.runtime.absent.attention import attention
from dtrrun.runtime.absent.recorder import Recorder
from dtrrun.runtime.absent.tensors import Tensors, here
from dtrrun.runtime.launcher import Launcher
from dtrrun.runtime.observe.steps import StepClock
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.fields import COUNTERS

STEPS, PEAK = COUNTERS.index("steps"), COUNTERS.index("peak_bytes")
BUDGET, DEVICE = COUNTERS.index("budget_bytes"), COUNTERS.index("device_index")
UNFIT = (
    "this PyTorch cannot run a backward pass on a GPU that is not there",
    "use PyTorch 2.9 or later on Linux",
)
CAPABILITY = (8, 0)
"""The oldest generation that has tf32 and bf16, as all cards of the table but the oldest do."""

WHOLE = "silu_backward", "mish_backward", "_fused_rms_norm"
"""Operators that are one kernel on a GPU, but are made of others where PyTorch has no kernel for it."""

RECURRENT = "lstm", "gru", "rnn_tanh", "rnn_relu"
WITHOUT_CUDNN = "recurrent layers count step by step: with cuDNN they take less"


class Absent:
    """Stands in for a `Session`, as far as a process started by the launcher needs one."""

    running = False

    def __init__(self, settings: RuntimeSettings) -> None:
        assert settings.gpu is not None
        self._name, self._total = settings.gpu
        self._each_steps = settings.max_steps
        self._recorder = Recorder(settings.log)
        self._tensors = Tensors(self._recorder)
        self._library = torch.library.Library("aten", "IMPL")
        self._started_ns = now_ns()
        self.steps = StepClock(self._times, self._step_ended, self._stepped)
        self._optimizers: dict[int, None] = {}
        self._launcher = Launcher(settings.record_dir)
        self._error: str | None = None
        self.writer: Any = None

    def start(self, writer: Any = None) -> None:
        """Let the program have a GPU. Raises CannotBuild."""
        self.writer = writer
        if not build.load(lambda _: None).stand_in_for_gpu():
            raise CannotBuild(*UNFIT)
        if hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
            torch._C._ensureCUDADeviceGuardSet()
        torch._C._set_only_lift_cpu_tensors(
            True
        )  # `torch.tensor` moves its result by an operator that we see
        for name, value in cuda.functions(self._name, self._total, CAPABILITY, self._recorder).items():
            setattr(torch.cuda, name, value)
        torch.Generator = cuda.Generator  # type: ignore[misc]
        torch.Tensor.__format__ = _formatted  # type: ignore[method-assign]
        # What `nn.Module.to` does to the parameters of a module on the CPU: they stay the same objects.
        torch.__future__.set_swap_module_params_on_conversion(True)
        torch.utils.swap_tensors = self._tensors.swap
        optimizer._foreach_supported_types.append(FakeTensor)
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        self._library.impl("scaled_dot_product_attention", attention, "AutogradCUDA")
        for name in WHOLE:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                self._library.impl(name, _never, "CUDA")
        for name in RECURRENT:
            setattr(torch._VF, name, self._noting(getattr(torch._VF, name), WITHOUT_CUDNN))
        if writer is not None:
            writer.counters[BUDGET] = writer.counters[DEVICE] = -1
        self.steps.install()
        self._tensors.__enter__()  # type: ignore[no-untyped-call]
        self._publish()
        os.register_at_fork(after_in_child=self._forked)

    def stop(self) -> None:
        """This process turned out to be a helper: its log is not wanted."""
        self.steps.remove()
        self._recorder.discard()

    def _noting(self, function: Any, text: str) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._recorder.note(text)
            return function(*args, **kwargs)

        return noted

    def _forked(self) -> None:
        self._recorder.discard()
        if self.writer is not None:
            self.writer.forked()
            self.writer = None

    def _times(self) -> dict[str, int]:
        wall = now_ns() - self._started_ns
        return {"wall_ns": wall, "operators_ns": wall}

    def _stepped(self, stepped: Any) -> None:
        self._optimizers[id(stepped)] = None

    def _step_ended(self) -> None:
        self._recorder.step_ended(self.steps.count)
        self._launcher.look()
        # A program with several optimizers has as many kinds of steps.
        each, kinds = self._each_steps, len(self._optimizers)
        ends = each is not None and self.steps.count >= each * kinds
        if ends:
            self._close()
        self._publish()
        if ends:
            raise SystemExit(0)

    def ended(self) -> None:
        """Called when the program ends by itself: what it did after its last step counts as another one."""
        if self.steps.count:
            self._recorder.step_ended(self.steps.count + 1)
            self._close()
        else:
            self._recorder.discard()

    def _close(self) -> None:
        try:
            self._recorder.close()
        except OSError as error:
            self._error = error.strerror

    def _publish(self) -> None:
        if self.writer is not None:
            with suppress(OSError, ValueError):
                self.writer.counters[STEPS] = self.steps.count
                self.writer.counters[PEAK] = self._recorder.most
                steps = {"step": self.steps.last, "latest_steps": list(self.steps.latest)}
                self.writer.publish(steps | {"log_error": self._error})


def _never(*_: Any, **__: Any) -> Any:
    """The kernel of an operator that only needs to have one: it is run for its shapes."""
    raise NotImplementedError


_format: Any = torch.Tensor.__format__


def _formatted(tensor: torch.Tensor, how: str) -> str:
    """Replaces `Tensor.__format__`, which writes numbers of plain tensors only."""
    if here(tensor) and not tensor.dim():
        return format(tensor.item(), how)
    return str(_format(tensor, how))
