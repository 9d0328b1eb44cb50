"""Every setting that kernels read is restored for a replay, and put back afterwards."""

from __future__ import annotations

import pytest
import torch

from dtrrun.extensions import build
from dtrrun.runtime.operators import reads_backends

SETTINGS = {
    "grad mode": (torch.set_grad_enabled, False, True),
    "default dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "oneDNN": (torch._C._set_mkldnn_enabled, False, True),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "threads": (torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "denormals": (torch.set_flush_denormal, True, False),
    "precision": (torch.set_float32_matmul_precision, "medium", "highest"),
    "deterministic oneDNN": (torch._C._set_mkldnn_deterministic, True, False),
    "NNPACK": (torch._C._set_nnpack_enabled, False, True),
}


@pytest.fixture(scope="module")
def native():
    return build.load(print)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_restored_and_put_back(name, native):
    write, other, usual = SETTINGS[name]
    write(usual)
    before = native.present_state(False, True)
    write(other)
    try:
        changed = native.present_state(False, True)
        assert changed != before
        assert native.with_state(before, lambda: native.present_state(False, True), True) == before
        assert native.present_state(False, True) == changed
        with pytest.raises(ZeroDivisionError):
            native.with_state(before, lambda: 1 / 0, True)
        assert native.present_state(False, True) == changed
    finally:
        write(usual)
    assert native.present_state(False, True) == before


def test_settings_of_backends_are_read_where_they_matter(native):
    torch.set_float32_matmul_precision("highest")
    before = [native.present_state(general, True) for general in (True, False)]
    torch.set_float32_matmul_precision("medium")
    try:
        after = [native.present_state(general, True) for general in (True, False)]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_settings_of_a_gpu_are_restored(native):
    before = native.present_state(False, False)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    changed = native.present_state(False, False)

    def look():
        matmul = torch.backends.cuda.matmul
        flags = torch.backends.cudnn.benchmark, matmul.allow_fp16_reduced_precision_reduction
        return flags, native.present_state(False, False)

    try:
        assert native.with_state(before, look, True) == ((False, True), before)
        assert look() == ((True, False), changed)
    finally:
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    assert native.present_state(False, False) == before


@pytest.mark.parametrize(
    ("namespace", "name", "reads"),
    [
        ("aten", "add", False),
        ("aten", "addmm", True),
        ("aten", "_scaled_dot_product_flash_attention_for_cpu", True),
        ("aten", "convolution_backward", True),
        ("aten", "mkldnn_rnn_layer", True),
        ("aten", "_linalg_svd", True),
        ("torchvision", "roi_align", True),
    ],
)
def test_which_operators_read_settings_of_backends(namespace, name, reads):
    assert reads_backends(namespace, name) == reads
