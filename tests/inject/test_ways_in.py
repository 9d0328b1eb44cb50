"""The two ways in to the native fast path, and PyTorch's own use of the key of one of them."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dtrrun.native import build, building, ways_in

pytestmark = pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < build.OLDEST,
    reason="there is no native fast path",
)

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
assert report["native"]["operators"] > report["native"]["in_python"] > 0
print(report["native"]["way_in"], report["warnings"])
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
    command = [*building.compiler(), str(SOURCE), "-o", str(folder / "fake_mode.so"), *build.flags()]
    subprocess.run([argument.replace("-O2", "-O0") for argument in command], check=True)
    return folder


@pytest.fixture
def environment(environment):
    """An environment that does not choose the way in."""
    return environment | {"DTRRUN_WAY_IN": ""}


def test_a_fallback_that_is_there_already(plain, program, built):
    """As with PyTorch's own in the future, all runs natively by the other way in, with the same bits."""
    ended = plain(sys.executable, program("block.py", IN_A_BLOCK), env={"PYTHONPATH": str(built)})
    assert (ended.status, ended.err, ended.out) == (0, "", "custom-rng []\n")


def test_a_fallback_that_comes_later(plain, dtrrun, program, built):
    """It gets the key if dtrrun uses the other way in. If not, PyTorch refuses it, and says what to do."""
    script = program("later.py", LATER)
    expected = plain(sys.executable, script, env={"PYTHONPATH": str(built)})
    env = {"PYTHONPATH": str(built), "DTRRUN_WAY_IN": "custom-rng"}
    ended = dtrrun("--budget", "0.8MB", "--quiet", script, env=env)
    assert (ended.status, ended.out, ended.err) == (0, expected.out, "")
    assert ended.report["native"]["way_in"] == "custom-rng"
    assert ended.report["evictions"] > 0
    ended = dtrrun("--budget", "0.8MB", script, env=env | {"DTRRUN_WAY_IN": "fake"})
    assert ended.status != 0
    assert "by dtrrun, which leaves this key alone with DTRRUN_WAY_IN=custom-rng" in ended.err


@pytest.mark.parametrize("way_in", ["fake", "custom-rng"])
def test_each_can_be_chosen(dtrrun, program, way_in):
    script = program("train.py", TRAINS + "print(steps())\n")
    ended = dtrrun("--budget", "0.8MB", "--quiet", script, env={"DTRRUN_WAY_IN": way_in})
    assert (ended.status, ended.err) == (0, "")
    assert ended.report["native"]["way_in"] == ended.processes[0]["native"]["way_in"] == way_in


def test_one_that_does_not_exist(dtrrun, plain, program):
    script = program("train.py", TRAINS + "print(steps())\n")
    why = "DTRRUN_WAY_IN: 'back-door' is not one of fake, custom-rng"
    for words in (["--budget", "1MB", script], ["doctor"]):
        ended = dtrrun(*words, env={"DTRRUN_WAY_IN": "back-door"})
        assert (ended.status, ended.out, ended.err) == (2, "", f"dtrrun: error: {why}\n")
    block = program("block.py", "import dtrrun\nwith dtrrun.budget(1): pass\n")
    ended = plain(sys.executable, block, env={"DTRRUN_WAY_IN": "back-door"})
    assert (ended.status, ended.err.splitlines()[-1]) == (1, f"RuntimeError: dtrrun: {why}")


TAKEN = """
import torch
library = torch.library.Library("_", "IMPL", "Fake")
library.fallback(lambda op, *args, **kwargs: op(*args, **kwargs), "Fake")
import dtrrun
with dtrrun.budget("1MB") as session:
    kept = [torch.ones(1000, 100)]
    for _ in range(9):
        kept.append(kept[-1] + 1)
    print(sum(int(one.sum()) for one in kept), session.report()["native"]["way_in"])
"""


def test_one_that_is_closed(plain, program):
    script = program("taken.py", TAKEN)
    ended = plain(sys.executable, script)
    assert (ended.status, ended.err, ended.out) == (0, "", "5500000 custom-rng\n")
    ended = plain(sys.executable, script, env={"DTRRUN_WAY_IN": "fake"})
    assert (ended.status, ended.err.splitlines()[-1]) == (
        1,
        f"RuntimeError: dtrrun: {ways_in.Closed()}",
    )
