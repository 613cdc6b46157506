"""What the fused dense attentions for NVIDIA cards have in common.

All are exact up to the rounding of their 16-bit inputs and weights. SageAttention rounds to 8 bits, so it is not among them.
"""
from __future__ import annotations

import torch

from ..checks import DTYPES
from ..shapes import Geometry


def why_not(
    geometry: Geometry, *, since: tuple[int, int] = (8, 0), most_head_dim: int = 256, dtypes: tuple[torch.dtype, ...] = DTYPES
) -> str | None:
    """None when the card (from compute capability `since` on), the dtype and the head dim fit."""
    if geometry.device_type != "cuda" or geometry.capability is None:
        return f"runs on NVIDIA GPUs, not on {geometry.device_type}"
    if geometry.capability < since:
        return "needs compute capability {}.{} or newer, not {}.{}".format(*since, *geometry.capability)
    if geometry.dtype not in dtypes:
        return f"takes {', '.join(map(_name, dtypes))}, not {_name(geometry.dtype)}"
    if geometry.head_dim % 8 or geometry.head_dim > most_head_dim:
        return f"takes head dims that are multiples of 8 up to {most_head_dim}, not {geometry.head_dim}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
