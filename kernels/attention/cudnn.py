"""cuDNN's attention, through PyTorch's operator that also returns the log-sum-exp."""
from __future__ import annotations

import torch
from torch import Tensor

from ..dtypes import half
from ..shapes import Geometry
from . import fused

NAME = "cudnn"


def why_not(geometry: Geometry) -> str | None:
    if torch.version.hip or not torch.backends.cudnn.is_available():
        return "this PyTorch has no cuDNN"
    if not hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention"):
        return f"PyTorch {torch.__version__} has no attention by cuDNN"
    return fused.why_not(geometry, most_head_dim=128)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    q16, k16, v16 = (half(t) for t in (q, k, v))
    # No bias, a log-sum-exp, no dropout, not causal, no debug mask.
    out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q16, k16, v16, None, True, 0.0, False, False, scale=scale)[:2]
    return out.to(q.dtype), lse.reshape(q.shape[:3])
