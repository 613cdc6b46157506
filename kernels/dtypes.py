"""The number formats that GPU kernels take."""
from __future__ import annotations

import torch
from torch import Tensor


def half(x: Tensor) -> Tensor:
    """x as the kernels take it: bfloat16 or float16 (float32 becomes bfloat16, whose range it keeps), rows contiguous.

    A view whose last stride is 1 is passed on as it is; any other is copied.
    """
    if x.dtype == torch.float32:
        x = x.bfloat16()
    return x if x.stride(-1) == 1 else x.contiguous()
