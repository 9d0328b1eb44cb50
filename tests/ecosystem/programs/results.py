"""What a run ended with, as hashes: each program of this folder calls `write` last.

The file is the process's own: `RESULTS` names a folder, `RANK` numbers the processes of torchrun.
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
"""Steps that are left out of the time of a step: sizes are still unknown, caches cold."""

random.seed(0)  # so that a draw by anybody but the program would show
_ends: list[float] = []
register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _ends.append(time.perf_counter()))


def write(**values: object) -> None:
    """Modules, optimizers, losses or whatever else must be equal in two runs; the generators are added."""
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
