"""The shapes the kernels speak, with their invariants.

Letters used everywhere: B batch rows, H heads, S tokens (Sq, Sk where they differ), D head dim, C = 128 queries per group,
G = ceil(S / C) groups, T = 128 budget tile, b tokens per cell, nb = ceil(S / b) cells.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index

import torch
from torch import Tensor

GROUP_SIZE = 128  # C: queries that share one selection
BUDGET_TILE = 128  # T: selections are rounded up to whole tiles of real keys
CELL_SIZES = (32, 64, 128)  # b: sizes a pooled tail can have; runs of one cell order, so they nest
GRANULARITIES = {"token": 1, "cell32": 32}  # keys per selection bit


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Geometry:
    """What a backend decides on. `capability` is the CUDA compute capability, None off CUDA.

    precision: what the sparse attention multiplies queries and keys in, one of quantise.PRECISIONS; other operations know half alone.
    """

    batch: int
    heads: int
    q_len: int
    k_len: int
    head_dim: int
    dtype: torch.dtype
    device_type: str
    capability: tuple[int, int] | None = None
    precision: str = "half"

    @classmethod
    def of(cls, q: Tensor, k: Tensor, precision: str = "half") -> Geometry:
        """Geometry of q (B, H, Sq, D) against k (B, H, Sk, D)."""
        capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
        return cls(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.shape[3], q.dtype, q.device.type, capability, precision)


@dataclass(frozen=True, eq=False)
class CellOrder:
    """One order of the S tokens by position; cells of b tokens, and `cells` query groups, are consecutive runs in it.

    order (S,) int64: token at each place of the cell order; place (S,) int64: its inverse.
    """

    order: Tensor
    place: Tensor

    def __len__(self) -> int:
        return self.order.numel()

    def sizes(self, b: int) -> Tensor:
        """Tokens in each cell of b, (ceil(S / b),) int32: b everywhere but in the last one."""
        nb = ceil_div(len(self), b)
        sizes = torch.full((nb,), b, dtype=torch.int32, device=self.order.device)
        sizes[-1] = len(self) - (nb - 1) * b
        return sizes

    def to(self, device: torch.device | str) -> CellOrder:
        return replace(self, order=self.order.to(device), place=self.place.to(device))


@dataclass(frozen=True, eq=False)
class QueryGroups:
    """Groups of exactly C similar queries; only the last may be short.

    order (B or 1, H or 1, G*C) int32: [..., :length] is a permutation of 0..length-1, the rest is -1 (never index with it).
    """

    order: Tensor
    length: int

    @property
    def count(self) -> int:
        """G, groups per head."""
        return self.order.shape[-1] // GROUP_SIZE

    def expanded(self, batch: int, heads: int) -> Tensor:
        """order as (B, H, G*C), without a copy."""
        return self.order.expand(batch, heads, -1)

    @property
    def nbytes(self) -> int:
        return self.order.numel() * self.order.element_size()


@dataclass(frozen=True, eq=False)
class KeySelection:
    """The keys each group attends to, one bit per key (`token`) or per cell of 32 (`cell32`), in cell order.

    bits (B, H, G, ceil(n / 32)) int32, n = S or ceil(S / 32): bit i of word w stands for place (or cell) 32*w + i; bits past n are 0.
    counts (B, H, G) int32: selected keys (not cells). retained (B, H, G) float32: share of the group's attention mass they hold.
    """

    bits: Tensor
    counts: Tensor
    retained: Tensor
    granularity: str
    cells: CellOrder

    @property
    def realised_density(self) -> float:
        """Mean share of the keys that is selected (reads the device)."""
        return self.counts.float().mean().item() / len(self.cells)

    @cached_property
    def most(self) -> int:
        """The largest count (reads the device, once)."""
        return int(self.counts.max())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.bits, self.counts, self.retained))


@dataclass(frozen=True, eq=False)
class PooledTail:
    """One mean key and value per cell of `size` keys: k, v (B, H, nb, D), over all keys of the cell, in q's dtype."""

    k: Tensor
    v: Tensor
    size: int


def key_budget(density: float, keys: int) -> int:
    """Keys to select of `keys` candidates: density rounded up to whole tiles of T real keys."""
    return min(keys, BUDGET_TILE * math.ceil(density * keys / BUDGET_TILE - 1e-6))


def key_runs(kept: tuple[tuple[int, int], ...], length: int) -> tuple[tuple[int, int], ...]:
    """Half-open token ranges, checked: integers inside 0..length, ascending, not overlapping. Raises ValueError or TypeError."""
    last = 0
    for start, stop in kept:
        if not last <= start < stop <= length:
            raise ValueError(f"key ranges {kept} must be ascending, disjoint and inside 0..{length}")
        last = stop
    return tuple((index(start), index(stop)) for start, stop in kept)
