"""Tries a binary of the native extension: does a small network train to the same bits inside a budget?

Run in a child of the process that would load the binary (`extensions/shipped.py`). Prints "works" if it does.
Its arguments: the binary, and the parent's `sys.path` as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
STEPS = 3


def main(binary: str, path: str) -> None:
    """Run the trial. Raises an exception if it fails without crashing."""
    sys.path[:] = json.loads(path)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    _find_own_package()
    import torch

    from dtrrun import runtime
    from dtrrun.boot import dynamo
    from dtrrun.extensions import building, compiling

    dynamo.put_off()
    torch.set_num_threads(1)
    try:
        building.import_from(compiling.NAME, Path(binary))  # sessions use what has been imported
    except building.CannotBuild as error:
        sys.exit(error.why)
    rule = {"device": "cpu", "heuristic": "h_dtr_eq"}
    expected = train()
    with runtime.budget(None, **rule) as session:
        train()
    with runtime.budget(session.report()["peak_bytes"] * 6 // 10, **rule) as session:
        found = train()
    report = session.report()
    if found != expected:
        raise RuntimeError("results differ")
    if not report["rematerializations"] or report["native"]["in_python"] * 2 > report["native"]["operators"]:
        raise RuntimeError("operators do not reach it")


def train() -> list[str]:
    """Return the loss of each step, to the last bit."""
    import torch

    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.ones(2048, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def _find_own_package() -> None:
    """Make `dtrrun` refer to the package of this file, even if another one is installed."""
    spec = spec_from_file_location(
        "dtrrun", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules["dtrrun"] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main(*sys.argv[1:])
    print("works", flush=True)
    os._exit(0)  # tearing torch down would take longer
