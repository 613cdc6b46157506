"""What the compiled kernels of sparse attention share on the host: numbers for what happens at the end, and how many heads go at once."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..residual import Residual
from ..residual.reference import rank_of
from ..shapes import ceil_div

# What a kernel does at the end, by residual format.
EPILOGUES = {"none": 0, "bf16": 1, "fp8": 2, "int4": 3, "int2": 4, "rank": 5, "difference": 6}
# Bytes for what is laid out for the heads that are computed together.
SCRATCH_SHARE, SCRATCH_LEAST, SCRATCH_MOST = 1 / 40, 128 << 20, 3 << 30


def epilogue_of(residual: Residual | None, dense: Tensor | None, unused: Tensor) -> tuple[int, Tensor, Tensor, int]:
    """Number in EPILOGUES, payload tensors as bytes and rank. unused: any tensor of the device."""
    if residual is None:
        unused = unused.new_empty(1, dtype=torch.uint8)
        return EPILOGUES["none" if dense is None else "difference"], unused, unused, 1
    values, *scales = residual.payload
    scales = scales[0] if scales else values
    rank = rank_of(residual.format)
    number, rank = (EPILOGUES[residual.format], 1) if rank is None else (EPILOGUES["rank"], values.shape[-1])
    return number, values.view(torch.uint8), scales.view(torch.uint8), rank


def heads_at_once(heads: int, bytes_each: int, device: torch.device) -> Iterator[slice]:
    """The heads in equal parts that take no more than the scratch allows, one head at least."""
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    budget = min(SCRATCH_MOST, max(SCRATCH_LEAST, int(total * SCRATCH_SHARE)))
    launches = ceil_div(heads, max(1, budget // bytes_each))
    step = ceil_div(heads, launches)
    for start in range(0, heads, step):
        yield slice(start, min(heads, start + step))


def add_mean(lse: Tensor, q: Tensor, mean: Tensor, scale: float) -> None:
    """Turns the lse (H, S) of smoothed keys into that of the keys as they came, in place. q (H, S, D), mean (H, D or more) of the keys."""
    for row, queries, m in zip(lse, q, mean, strict=True):
        row += (queries.float() * m[: q.shape[2]]).sum(1) * scale
