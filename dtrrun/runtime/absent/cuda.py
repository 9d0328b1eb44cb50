"""`torch.cuda` as if there were one GPU, of which only the name and the memory are known."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from dtrrun.runtime.absent.recorder import Recorder

NOTHING = (
    "_lazy_init",
    "init",
    "set_device",
    "synchronize",
    "empty_cache",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
    "set_stream",
    "reset_accumulated_memory_stats",
    "set_per_process_memory_fraction",
)
"""Functions that need to do nothing."""


def nothing(*_: Any, **__: Any) -> None:
    """Take any arguments, and do nothing."""


class Stream:
    """A stream of a GPU: work is in its order anyway."""

    device = torch.device("cuda", 0)
    device_index, cuda_stream, stream_id, priority = 0, 0, 0, 0
    __init__ = wait_event = wait_stream = synchronize = nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """An event, which has always happened."""

    __init__ = record = wait = synchronize = nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class Generator(torch.Generator):
    """Random numbers of the GPU are never drawn, so its generators may be the CPU's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        make: Any = super().__new__
        return make(cls, device="cpu" if torch.device(device).type == "cuda" else device)


def functions(name: str, total_bytes: int, capability: tuple[int, int], recorder: Recorder) -> dict[str, Any]:
    """Return what replaces the members of `torch.cuda` with these names."""
    properties = SimpleNamespace(
        name=name,
        total_memory=total_bytes,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=100,
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
    )
    stream = Stream()

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def reset(*_: Any, **__: Any) -> None:
        recorder.most = recorder.now

    found = dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), answer(True))
    found |= dict.fromkeys(("current_device", "utilization", "initial_seed"), answer(0))
    found |= dict.fromkeys(NOTHING, answer(None))
    for one in ("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"):
        found[one] = reset
    for one in ("memory_allocated", "memory_reserved"):
        found[one] = lambda *_, **__: recorder.now
    for one in ("max_memory_allocated", "max_memory_reserved"):
        found[one] = lambda *_, **__: recorder.most
    return found | {
        "device_count": answer(1),
        "get_device_name": answer(name),
        "get_device_capability": answer(capability),
        "get_device_properties": answer(properties),
        "get_arch_list": answer([f"sm_{capability[0]}{capability[1]}"]),
        "mem_get_info": lambda *_, **__: (max(total_bytes - recorder.now, 0), total_bytes),
        "memory_stats": lambda *_, **__: {
            "allocated_bytes.all.current": recorder.now,
            "allocated_bytes.all.peak": recorder.most,
        },
        "memory_summary": answer(""),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "get_rng_state_all": lambda *_, **__: [torch.get_rng_state()],
        "default_generators": (torch.default_generator,),
        "current_stream": answer(stream),
        "default_stream": answer(stream),
        "stream": lambda *_, **__: nullcontext(),
        "device": lambda *_, **__: nullcontext(),
        "Stream": Stream,
        "Event": Event,
    }
