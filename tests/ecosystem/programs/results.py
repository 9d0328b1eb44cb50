"""A run's final state, as hashes: each program of this folder calls `write` last.

Each process writes its own file: `RESULTS` names a folder, `RANK` numbers torchrun's processes.
"""

import json
import os
import random
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.bench.capture import digest, module_bits, optimizer_bits, rng_bits

WARM = 2
"""Steps left out of the step time: sizes are still unknown, caches cold."""

random.seed(0)  # so that a draw by any other code would show
_ends: list[float] = []
register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _ends.append(time.perf_counter()))


def write(**values: object) -> None:
    """Write modules, optimizers, losses and all else that must be equal in two runs, and the generators."""
    bits = {}
    for name, value in values.items():
        if isinstance(value, nn.Module):
            found = module_bits(value)
        elif isinstance(value, torch.optim.Optimizer):
            found = optimizer_bits(value)
        else:
            found = {"value": digest(value)}
        bits |= {f"{name}.{key}": sha for key, sha in found.items()}
    bits |= {f"generator.{key}": sha for key, sha in rng_bits().items()}
    steps = [after - before for before, after in pairwise(_ends)][WARM:]
    seconds = sum(steps) / len(steps)
    path = Path(os.environ["RESULTS"], f"{os.environ.get('RANK', '0')}.json")
    path.write_text(json.dumps({"bits": bits, "step_seconds": seconds}))
