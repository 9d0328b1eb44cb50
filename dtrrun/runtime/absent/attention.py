"""Chooses kernels of scaled dot product attention for an absent GPU, as PyTorch does on one.

PyTorch decides in C++ (sdp_utils.cpp of ATen), in code that only a build for CUDA has, and that asks the GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.backends import cuda

aten: Any = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
WIDEST = 256
"""The largest head that the flash kernel takes."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Replaces `aten.scaled_dot_product_attention` for tensors on the GPU."""
    width = query.shape[-1]
    plain = query.dim() == key.dim() == value.dim() == 4 and width == value.shape[-1]
    if plain and attn_mask is None and query.dtype in HALF and width <= WIDEST and cuda.flash_sdp_enabled():
        pad = -width % 8
        scale = scale if scale is not None else 1 / math.sqrt(width)
        padded = [torch.nn.functional.pad(one, (0, pad)) if pad else one for one in (query, key, value)]
        out: torch.Tensor = aten._scaled_dot_product_flash_attention(
            *padded, dropout_p, is_causal, False, scale=scale
        )[0]
        return out[..., :width] if pad else out
    alignment = 8 if query.dtype in HALF else 4
    known = query.dtype in (*HALF, torch.float32) and width % alignment == 0
    if plain and known and not enable_gqa and cuda.mem_efficient_sdp_enabled():
        bias = _bias(query, key, attn_mask)
        saves = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        found = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, saves, dropout_p, is_causal, scale=scale
        )
    else:
        found = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    result: torch.Tensor = found[0]
    return result


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask as the efficient kernel takes it: numbers, in rows of a multiple of 16."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -math.inf)
    length = mask.shape[-1]
    if pad := -length % 16:
        mask = torch.nn.functional.pad(mask, (0, pad))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
