"""A command whose budget is too small, after a run of it without one."""

import re

from dtrrun.sizes import parse_size
from tests.inject.test_auto_verb import cache

__all__ = ["cache"]

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[part for _ in range(8) for part in (nn.Linear(64, 64), nn.Tanh())])
optimizer = torch.optim.Adam(model.parameters())
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(1024, 64)).square().mean().backward()
    optimizer.step()
with torch.no_grad():
    model(torch.randn(8192, 64)).square().mean().item()  # takes the most, and comes last
"""


def test_a_run_without_a_budget_tells_what_is_enough(dtrrun, program, cache):
    """What comes last is not known when the first step does not fit, but its peak is."""
    script = program("train.py", SCRIPT)
    peak = dtrrun("--quiet", script, env=cache).report["peak_bytes"]
    refused = dtrrun("--quiet", "--budget", "900kB", script, env=cache)
    assert refused.report["error"]["plain_bytes"] == peak
    (advised,) = re.findall(r"Try --budget (\S+) \(.*without a budget it takes", refused.err)
    assert parse_size(advised) <= 1.01 * peak
    assert dtrrun("--quiet", "--budget", advised, script, env=cache).status == 0
    changed = program("train.py", SCRIPT.replace("8192", "512"))
    assert dtrrun("--quiet", "--budget", "900kB", changed, env=cache).report["error"]["plain_bytes"] == 0
