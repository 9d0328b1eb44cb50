"""The models of tests/bench/gpu on a GPU, in tiny sizes: run this before the long bench."""

import pytest
import torch

from tests.bench.gpu.cases import CASES
from tests.bench.gpu.children import Setting, run
from tests.bench.gpu.driver import first_device

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of PyTorch"
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_same_bits_plainly_and_under_dtrrun(case):
    setting = Setting("cuda", tiny=True, warm_up=0, steps=3, device=first_device())
    # Without dtrrun, a process may crash at exit after its last backward pass: a race in PyTorch itself.
    tries = (run(setting, case.name, 120, deterministic=True) for _ in range(3))
    plain = next((one for one in tries if one.ok), None)
    assert plain is not None
    assert plain.allocated
    counted = run(setting, case.name, 120, deterministic=True, counted=True)
    assert counted.ok, counted.said
    assert (counted.losses, counted.parameters) == (plain.losses, plain.parameters)
