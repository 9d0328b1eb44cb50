"""Fake tensors in C++, as PyTorch is going to have them: a fallback at a dispatch key that they switch on."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtrrun.extensions import build, building

SOURCE = Path(__file__).with_name("fake_mode.cpp")

TRAINS = """
import hashlib
import torch
from torch import nn

def steps(fake_mode=None):
    '''Train for some steps; in each, ask fake tensors for a shape. Return a digest of losses and weights.'''
    torch.manual_seed(0)
    model = nn.Sequential(*[make() for _ in range(6) for make in (lambda: nn.Linear(64, 64), nn.GELU)])
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(256, 64)
    digest = hashlib.sha256()
    for _ in range(4):
        if fake_mode:
            fake_mode.begin()
            row = torch.zeros(3, 4)
            square = row @ row.t()
            fake_mode.end()
            square = square.relu() @ square  # outside of the mode
            assert (square.shape, square.device.type) == ((3, 3), "cpu"), square.shape
            assert "Fake" in str(torch._C._dispatch_keys(square))
        optimizer.zero_grad()
        loss = (model(batch) + torch.tensor([0.25] * 64)).square().mean()
        loss.backward()
        optimizer.step()
        digest.update(loss.detach().numpy().tobytes())
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()
"""

IN_A_BLOCK = (
    TRAINS
    + """
import fake_mode
import dtrrun
plain = steps()
with dtrrun.budget("0.8MB") as session:
    assert steps(fake_mode) == plain
    report = session.report()
assert fake_mode.count() == 4 * 5, fake_mode.count()
assert report["evictions"] > 0
assert report["native"]["operators"] > report["native"]["in_python"]
print(report["warnings"])
"""
)

LATER = TRAINS + "import fake_mode\nprint(steps(fake_mode))\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of a module `fake_mode`, which has a fallback at the dispatch key Fake."""
    if (
        not hasattr(torch._C, "_dispatch_keys")
        or "set_and_normalize_fake_device"
        not in (Path(torch.__file__).parent / "include" / "c10" / "core" / "TensorImpl.h").read_text()
    ):
        pytest.skip("this PyTorch has no fake tensors in C++ yet")
    folder = tmp_path_factory.mktemp("fake_mode")
    recipe = build.recipe()
    flags = *recipe.units[0].flags, *recipe.linking
    command = [*building.compiler(), str(SOURCE), "-o", str(folder / "fake_mode.so"), *flags]
    subprocess.run([argument.replace("-O2", "-O0") for argument in command], check=True)
    return folder


def test_a_fallback_that_is_there_already(plain, program, built):
    """dtrrun leaves the key alone: fake tensors that come first work inside a session, with the same bits."""
    ended = plain(sys.executable, program("block.py", IN_A_BLOCK), env={"PYTHONPATH": str(built)})
    assert (ended.status, ended.err, ended.out) == (0, "", "[]\n")


def test_a_fallback_that_comes_later(plain, dtrrun, program, built):
    script, env = program("later.py", LATER), {"PYTHONPATH": str(built)}
    expected = plain(sys.executable, script, env=env)
    ended = dtrrun("--budget", "0.8MB", "--quiet", script, env=env)
    assert (ended.status, ended.out, ended.err) == (0, expected.out, "")
    assert ended.report["evictions"] > 0
