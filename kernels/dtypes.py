"""The number formats that are computed in."""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def exact(x: Tensor) -> AbstractContextManager:
    """Without autocast where backends run: it would round products that are meant in float32, and refuses some dtypes."""
    return torch.autocast(x.device.type, enabled=False) if x.device.type in ("cpu", "cuda") else nullcontext()


def half(x: Tensor) -> Tensor:
    """x as the kernels take it: bfloat16 or float16 (float32 becomes bfloat16, whose range it keeps), rows contiguous.

    A view whose last stride is 1 is passed on as it is; any other is copied.
    """
    if x.dtype == torch.float32:
        x = x.bfloat16()
    return x if x.stride(-1) == 1 else x.contiguous()
