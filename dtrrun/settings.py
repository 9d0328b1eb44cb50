"""What a run was asked to do: the options that reach the training process.

Standard library only: the launcher writes these settings into the environment of the target as one
JSON text, and the injected runtime reads them there, perhaps in an environment that has no `dtrrun`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

VARIABLE = "DTRRUN_RUNTIME"
"""Environment variable that carries the settings from the launcher to every process of the target."""

OverBudget = Literal["error", "warn"]
Deallocation = Literal["eager", "banish", "ignore"]
CostSource = Literal["measured", "model"]
OnThrash = Literal["warn", "stop"]
ReturnMemory = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class RuntimeSettings:
    """One training process's share of the command line; sizes in bytes.

    `budget_bytes` None means: count, but never evict. `record_dir` is the private folder in which each
    training process writes its record (`telemetry`); None means: keep no record.
    """

    budget_bytes: int | None = None
    device: str = "auto"
    heuristic: str = "h_dtr_eq"
    deallocation: Deallocation = "eager"
    ignore_small: float = 0.0
    """Storages under this share of the mean evictable size are evicted last (App. E.2: 0.01)."""
    sample: bool = False
    """Search a random sample of √n of the n evictable storages instead of all (App. E.2)."""
    seed: int = 0
    """Of the `random` heuristic and of sampling; never touches the program's own generators."""
    cost: CostSource = "measured"
    costs: str | None = None
    """A file of operators' costs that are known before (`dtrrun profile` makes it)."""
    over_budget: OverBudget = "error"
    return_memory: ReturnMemory = "auto"
    """When the pages of evicted storages go back to the system (`runtime.heap`)."""
    max_slowdown: float | None = None
    on_thrash: OnThrash = "warn"
    max_steps: int | None = None
    verify: bool = False
    where: bool = False
    """Note the module and the line of the program that each operator was called from (`runtime.where`)."""
    log: str | None = None
    """Where to write the log of a step (`dtrrun record`)."""
    log_first: int = 2
    log_last: int = 2
    """The first and the last step of the log, counted from 1."""
    plain: bool = False
    """Leave the program as it is, and count its steps alone."""
    state: bool = False
    """Write digests of the training state at each step's end (`runtime.training_state`)."""
    trace_events: bool = False
    """Write down what is evicted and run again, and when (`runtime.tracing`)."""
    manual_seed: int | None = None
    """For the random generators of PyTorch, Python and NumPy, before the program begins."""
    record_dir: str | None = None

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self), separators=(",", ":"))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> RuntimeSettings | None:
        """The settings that the launcher left, or None where this process was not started by it."""
        text = environ.get(VARIABLE)
        if not text:
            return None
        return cls.from_values(json.loads(text))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> RuntimeSettings:
        """From what `asdict` gave, perhaps in another version."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
