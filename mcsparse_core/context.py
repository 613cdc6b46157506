"""Frozen facts of one attention call."""
from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class SiteKey(NamedTuple):
    """One attention place in the network: the ordinal-th eligible call inside a block. blocks: how many of its type, 0 = unknown."""

    block_type: str
    block_index: int
    ordinal: int
    blocks: int

    def is_layer(self, layers: tuple[int, ...]) -> bool:
        """True if the block is among `layers`; negative ones count from the end."""
        return any(self.block_index == (i if i >= 0 else self.blocks + i) for i in layers)


class BranchKey(NamedTuple):
    """One conditioning stream. pass_ordinal: how often this evaluation ran it before (extra guidance passes repeat uuid and sigma).
    shape: of the latent it denoises."""

    uuid: Hashable
    cond: int
    window: tuple[int, ...] | None
    pass_ordinal: int
    shape: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class TokenLayout:
    """Token order of a sequence: `before` tokens, then F*H*W raster tokens of `grid`, then `after` tokens.

    exact: ascending half-open token ranges (text, conditioning) whose queries stay dense and whose keys are always kept.
    """

    grid: tuple[int, int, int] | None
    before: int = 0
    after: int = 0
    exact: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        f, h, w = self.grid or (0, 0, 0)
        return self.before + f * h * w + self.after


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One self-attention call: q, k, v (B, H, S, D) views that nobody may change.

    branches: the rows of each branch, together all B rows. dense: the host's own attention for a range of rows, (rows, H, S, D).
    exact_dense: True if `dense` is plain softmax attention, so our own exact kernels may stand in for it. low_precision: False where the
    host rules quantised attention out.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    site: SiteKey
    branches: tuple[tuple[BranchKey, slice], ...]
    layout: TokenLayout
    dense: Callable[[slice], Tensor]
    exact_dense: bool
    low_precision: bool = True
