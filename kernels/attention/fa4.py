"""FlashAttention-4 (`flash_attn.cute`), for Hopper and Blackwell. It compiles its kernels when they are first called, for seconds."""
from __future__ import annotations

from torch import Tensor

from ..dtypes import half
from ..shapes import Geometry
from . import fused

NAME = "fa4"


def why_not(geometry: Geometry) -> str | None:
    lacking = fused.why_not(geometry, since=(9, 0), most_head_dim=256 if geometry.capability == (9, 0) else 128)
    return lacking or fused.flash_attn_func("flash_attn.cute")[1]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    bshd = (half(t).transpose(1, 2) for t in (q, k, v))
    out, lse = fused.flash_attn_func("flash_attn.cute")[0](*bshd, softmax_scale=scale, return_lse=True)
    return out.transpose(1, 2).to(q.dtype), lse
