"""What the Hopper selection does around its masses, in Triton: keys laid out in tiles, and the choice of the heaviest."""
from __future__ import annotations

import logging
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import triton_support
from ..registry import is_out_of_memory
from ..shapes import CellOrder, Geometry, ceil_div
from .torch_steps import TILE
from .triton_heaviest import Choice

__all__ = ["Choice", "in_tiles", "why_not"]

_log = logging.getLogger(__name__)


def why_not(geometry: Geometry) -> str | None:
    return triton_support.why_not(geometry) or _why_no_launch(geometry.device_type)


@cache
def _why_no_launch(device: str) -> str | None:
    """None when a kernel can be made and launched here, for which Triton wants a C compiler, too. Found out by trying."""
    try:
        order = torch.arange(TILE, device=device)
        in_tiles(torch.zeros((1, 1, TILE, 64), dtype=torch.bfloat16, device=device), CellOrder(order, order), range(1))
    except Exception as error:  # whatever is missing
        if is_out_of_memory(error):  # says nothing of the next time
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _log.warning("MC-Sparse: Triton cannot run kernels here (%s): PyTorch chooses keys instead, so anchors are slower", reason)
        return f"cannot run kernels here: {reason}"
    return None


def in_tiles(x: Tensor, cells: CellOrder, heads: range) -> Tensor:
    """Rows of x (B, H, S, D), last stride 1, of some of the B * H heads in cell order: (heads, tiles, TILE * D), 0 past the end.

    The order inside a tile is that of `swizzle`.
    """
    per_batch, length, dim = x.shape[1:]
    tiles = x.new_empty(len(heads), ceil_div(length, TILE), TILE * dim)
    for b in range(heads.start // per_batch, (heads.stop - 1) // per_batch + 1):
        some = range(max(heads.start, b * per_batch), min(heads.stop, (b + 1) * per_batch))
        part = tiles[some.start - heads.start : some.stop - heads.start]
        swizzle[(len(some), tiles.shape[1])](
            x[b], cells.order, part, *x.stride()[1:3], length, some.start - b * per_batch, D=dim, TILE=TILE
        )
    return tiles


@triton.jit(do_not_specialize=["length", "first"], do_not_specialize_on_alignment=["order"])
def swizzle(x, order, tiles, x_h, x_s, length, first, D: tl.constexpr, TILE: tl.constexpr):
    """One tile of one head of x (H, S, D): TILE places of the cell order.

    A tile is D / 64 blocks of 64 columns; in a block each row is 128 bytes, whose 16-byte pieces are permuted by (piece ^ row % 8).
    """
    here = tl.program_id(0).to(tl.int64)  # heads vary fastest: their rows are neighbours where the model keeps (B, S, H, D)
    row = tl.arange(0, TILE)[:, None, None]
    piece = tl.arange(0, D // 8)[None, :, None]
    column = tl.arange(0, 8)[None, None, :]
    place = tl.program_id(1) * TILE + row
    live = place < length
    token = tl.load(order + place, mask=live, other=0)
    values = tl.load(x + (first + here) * x_h + token * x_s + piece * 8 + column, mask=live, other=0)
    to = piece // 8 * (TILE * 64) + row * 64 + ((piece % 8) ^ (row % 8)) * 8 + column
    tl.store(tiles + (here * tl.num_programs(1) + tl.program_id(1)) * (TILE * D) + to, values)
