"""PyTorch's own fused attention, through the operators that also return the log-sum-exp."""
from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..dtypes import half
from ..shapes import Geometry
from . import fused

NAME = "torch"


def why_not(geometry: Geometry) -> str | None:
    if geometry.device_type == "cpu":
        return _why_not_cpu_flash()
    return fused.why_not(geometry)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return _cpu_flash(*(t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v)), scale)
    q16, k16, v16 = (half(t) for t in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q16, k16, v16, scale=scale)[:2]
    return out.to(q.dtype), lse[..., : q.shape[2]]


def _cpu_flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)


@cache
def _why_not_cpu_flash() -> str | None:
    """None when the CPU operator exists and agrees with the definition on a small case; it is private to PyTorch, so look first."""
    q = torch.linspace(-2, 2, 2 * 3 * 8).view(1, 2, 3, 8)
    k = q.flip(2).cos()
    try:
        out, lse = _cpu_flash(q, k, k.sin(), 0.5)
    except (AttributeError, RuntimeError, TypeError) as error:
        return f"PyTorch {torch.__version__} lacks flash attention for the CPU ({error})"
    scores = q @ k.mT * 0.5
    expected = scores.softmax(-1) @ k.sin(), scores.logsumexp(-1)
    if out.shape != q.shape or lse.shape != q.shape[:3] or not all(map(torch.allclose, (out, lse), expected)):
        return f"flash attention for the CPU of PyTorch {torch.__version__} does not return what is needed"
    return None
