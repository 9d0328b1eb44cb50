"""The settings that kernels read are restored for a replay, each of them, and put back."""

from __future__ import annotations

import pytest
import torch

from dtrrun.runtime.ambient import ANY, GENERAL, Ambient, family_of

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


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_restored_and_put_back(name):
    write, other, usual = SETTINGS[name]
    ambient = Ambient("cpu")
    read = ambient.readers[ANY]
    write(usual)
    before = read()
    write(other)
    try:
        changed = read()
        assert changed != before
        with ambient.restored(ANY, before):
            assert read() == before
        assert read() == changed
        with pytest.raises(ZeroDivisionError), ambient.restored(ANY, before):
            raise ZeroDivisionError
        assert read() == changed
    finally:
        write(usual)
    assert read() == before


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_each_family_reads_the_general_settings_first(device_type):
    ambient = Ambient(device_type)
    general = ambient.readers[GENERAL]()
    for read in ambient.readers.values():
        assert read()[: len(general)] == general


@pytest.mark.parametrize(
    ("namespace", "name", "family"),
    [
        ("aten", "add", "general"),
        ("aten", "addmm", "matmul"),
        ("aten", "_scaled_dot_product_flash_attention_for_cpu", "matmul"),
        ("aten", "convolution_backward", "convolution"),
        ("aten", "mkldnn_rnn_layer", "recurrent"),
        ("aten", "_linalg_svd", "linalg"),
        ("torchvision", "roi_align", "any"),
    ],
)
def test_the_family_of_an_operator(namespace, name, family):
    assert family_of(namespace, name) == family
