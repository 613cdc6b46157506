"""FlashAttention-2 (`flash_attn`), for NVIDIA cards from Ampere on."""
from __future__ import annotations

from torch import Tensor

from ..dtypes import half
from ..shapes import Geometry
from . import fused

NAME = "flash-attn"


def why_not(geometry: Geometry) -> str | None:
    return fused.why_not(geometry) or fused.flash_attn_func("flash_attn")[1]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    bshd = (half(t).transpose(1, 2) for t in (q, k, v))
    out, lse, _ = fused.flash_attn_func("flash_attn")[0](*bshd, softmax_scale=scale, return_attn_probs=True)
    return out.transpose(1, 2).to(q.dtype), lse
