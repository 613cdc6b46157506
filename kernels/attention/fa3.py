"""FlashAttention-3: the fastest exact attention on Hopper (H200, 40 heads of 75600 x 128: 170 ms, cuDNN 206, PyTorch's flash 326).

Built from its sources (`flash_attn_interface`), or from the wheel `fa3_fwd`, which has no float16.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import half
from ..shapes import Geometry
from . import fused

NAME = "fa3"


def why_not(geometry: Geometry) -> str | None:
    if geometry.capability not in (None, (9, 0)):
        return "is for Hopper (compute capability 9.0)"
    lacking = fused.why_not(geometry)
    if lacking or fused.flash_attn_func("flash_attn_interface")[0]:
        return lacking
    lacking = fused.flash_attn_func("fa3_fwd_interface")[1]
    return lacking or ("the wheel fa3_fwd has no float16" if geometry.dtype == torch.float16 else None)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    function = fused.flash_attn_func("flash_attn_interface")[0] or fused.flash_attn_func("fa3_fwd_interface")[0]
    bshd = (half(t).transpose(1, 2) for t in (q, k, v))
    out, lse = function(*bshd, softmax_scale=scale, return_attn_probs=True)
    return out.transpose(1, 2).to(q.dtype), lse
