"""What the fused dense attentions for NVIDIA cards have in common.

All are exact up to the rounding of their 16-bit inputs and weights. SageAttention rounds to 8 bits, so it is not among them.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

from ..checks import DTYPES
from ..shapes import Geometry


def why_not(geometry: Geometry, *, since: tuple[int, int] = (8, 0), most_head_dim: int = 256) -> str | None:
    """None when the card (from compute capability `since` on), the dtype and the head dim fit."""
    if geometry.device_type != "cuda" or geometry.capability is None:
        return f"runs on NVIDIA GPUs, not on {geometry.device_type}"
    if geometry.capability < since:
        return "needs compute capability {}.{} or newer, not {}.{}".format(*since, *geometry.capability)
    if geometry.dtype not in DTYPES:
        return f"takes float32, bfloat16 and float16, not {str(geometry.dtype).removeprefix('torch.')}"
    if geometry.head_dim % 8 or geometry.head_dim > most_head_dim:
        return f"takes head dims that are multiples of 8 up to {most_head_dim}, not {geometry.head_dim}"
    return None


@cache
def flash_attn_func(module: str) -> tuple[Callable | None, str | None]:
    """The function of that name of a FlashAttention package, or None and what keeps the package from loading.

    To be asked after `why_not`: these packages take seconds to import, so only cards that can use them do.
    """
    try:
        return import_module(module).flash_attn_func, None
    except Exception as error:  # large binary packages: a broken one can raise anything
        return None, f"{type(error).__name__}: {error}"
