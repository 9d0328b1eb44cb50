"""Runs a training script as `__main__` and records the bits of its final state.

`python capture.py OUT.json SCRIPT [ARGS…]`, by itself or as a target of `dtrrun`. Two runs are equal when
their `state`, `rng` and `stdout` are. Also recorded: the peak of the resident set, and the CPU time of every
optimizer step, which other programs on the machine disturb less than wall time.
"""

import contextlib
import gc
import hashlib
import json
import random
import resource
import runpy
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook


def digest(value) -> str:
    """Return the SHA-256 of a tensor's dtype, shape and bytes, or of a structure of tensors and numbers."""
    sha = hashlib.sha256()
    if isinstance(value, torch.Tensor):
        sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key in value:
            sha.update(f"{key!r} {digest(value[key])}".encode())
    elif isinstance(value, (list, tuple)):
        for item in value:
            sha.update(digest(item).encode())
    else:
        sha.update(repr(value).encode())
    return sha.hexdigest()


def module_bits(module: nn.Module) -> dict[str, str]:
    bits = {name: digest(value) for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        bits[f"{name}.grad"] = digest(parameter.grad)
    return bits


def optimizer_bits(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    state = optimizer.state_dict()
    bits = {f"state.{index}": digest(value) for index, value in state["state"].items()}
    return bits | {"param_groups": digest(state["param_groups"])}


def state_bits(namespace: dict) -> dict[str, str]:
    """Return the bits of all modules and optimizers: by tensor if the script names them, else as a whole."""
    bits = {}
    for kind, bits_of in ((nn.Module, module_bits), (torch.optim.Optimizer, optimizer_bits)):
        named = {name: value for name, value in namespace.items() if isinstance(value, kind)}
        for name, value in named.items():
            bits |= {f"{name}.{key}": sha for key, sha in bits_of(value).items()}
        # type(), because isinstance() would evaluate __class__ on lazy proxies among the objects.
        found = [value for value in gc.get_objects() if issubclass(type(value), kind)]
        inner = [part for value in (*named.values(), *found) for part in parts(value)]
        known = {id(value) for value in (*named.values(), *inner)}
        others = sorted(f"{type(v).__name__} {digest(bits_of(v))}" for v in found if id(v) not in known)
        bits |= {f"{kind.__name__} without a name, {i}": sha for i, sha in enumerate(others)}
    return bits


def rng_bits() -> dict[str, str]:
    return {"torch": digest(torch.get_rng_state()), "python": digest(random.getstate())}


def parts(value) -> list[nn.Module]:
    """Return a module's submodules; an optimizer has none."""
    return list(value.modules())[1:] if isinstance(value, nn.Module) else []


def resident_peak() -> int:
    """Return it in bytes. On Linux, `ru_maxrss` would include what the process that forked us held."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Tee:
    """Writes to standard output and keeps a copy."""

    def __init__(self, stream):
        self.stream = stream
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return self.stream.write(text)

    def __getattr__(self, name):
        return getattr(self.stream, name)


def main() -> None:
    out, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)

    stamps: dict[int, list[float]] = {}
    start = time.process_time()
    register_optimizer_step_post_hook(
        lambda optimizer, args, kwargs: stamps.setdefault(id(optimizer), [start]).append(time.process_time())
    )
    random.seed(0)  # so that a draw by any other code would show
    with contextlib.redirect_stdout(Tee(sys.stdout)) as tee:
        namespace = runpy.run_path(script, run_name="__main__")
    peak = resident_peak()

    # A step ends where the first optimizer's step ends: a GAN has two optimizers.
    ends = next(iter(stamps.values()), [start])
    captured = {
        "state": state_bits(namespace),
        "rng": rng_bits(),
        "stdout": tee.text.splitlines(),
        "step_seconds": [after - before for before, after in pairwise(ends)],
        "resident_peak_bytes": peak,
    }
    Path(out).write_text(json.dumps(captured, indent=1))


if __name__ == "__main__":
    main()
