"""FlashAttention-4 (`flash_attn.cute`), for Hopper and Blackwell. It compiles its kernels when they are first called, for seconds."""
from __future__ import annotations

from collections.abc import Callable
from functools import cache

from torch import Tensor

from ..dtypes import half
from ..shapes import Geometry
from . import fused

NAME = "fa4"


def why_not(geometry: Geometry) -> str | None:
    lacking = fused.why_not(geometry, since=(9, 0), most_head_dim=256 if geometry.capability == (9, 0) else 128)
    return lacking or _function()[1]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    bshd = (half(t).transpose(1, 2) for t in (q, k, v))
    out, lse = _function()[0](*bshd, softmax_scale=scale, return_lse=True)
    return out.transpose(1, 2).to(q.dtype), lse


@cache
def _function() -> tuple[Callable | None, str | None]:
    """flash_attn_func, or None and what keeps it from loading. Importing it takes seconds, so only cards that can use it do."""
    try:
        from flash_attn.cute import flash_attn_func
    except Exception as error:  # whatever state its many packages are in
        return None, f"{type(error).__name__}: {error}"
    return flash_attn_func, None
