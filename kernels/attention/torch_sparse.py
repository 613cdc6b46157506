"""Token-sparse attention on the CPU: rows gathered per group, then PyTorch's fused flash attention with groups as the batch."""
from __future__ import annotations

from torch import Tensor

from ..residual import Residual
from ..shapes import Geometry, KeySelection, PooledTail, QueryGroups
from .reference import by_gathering
from .torch_dense import cpu_flash, why_not_cpu_flash

NAME = "torch"


def why_not(geometry: Geometry) -> str | None:
    if geometry.device_type != "cpu":
        return f"gathers rows into copies, which does not pay on {geometry.device_type}"
    return why_not_cpu_flash()


def token_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, groups: QueryGroups, selection: KeySelection,
    tail: PooledTail | None, residual: Residual | None, scale: float,
) -> tuple[Tensor, Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        bias = None if bias is None else bias[:, None, None, :]
        out, lse = cpu_flash(q[:, None], k[:, None], v[:, None], bias, scale)
        return out.squeeze(1), lse.squeeze(1)

    return by_gathering(q, k, v, groups, selection, tail, residual, attend)
