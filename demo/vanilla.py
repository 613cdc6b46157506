"""Vanilla block-sparse attention, the demo's baseline: mean-pooled 128x128 blocks, selected anew at every call, no residual, no tail."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import dense_attention, group_queries, token_sparse_attention
from ..kernels.cells import cell_order
from ..kernels.selection import pack_bits
from ..kernels.shapes import GROUP_SIZE, KeySelection, ceil_div, key_budget
from ..mcsparse_core.plan import SparsePlan
from ..mcsparse_core.schedule import lay_out


class VanillaBlockSparse:
    """The attention function of `self_attention`: dense in the warm-up and dense layers of `plan`, block-sparse after them.

    Blocks are 128 consecutive tokens; each query block keeps the key blocks of largest mean-query by mean-key product.
    """

    def __init__(self, plan: SparsePlan, progress: tuple[float, ...], backend: str):
        recipe = plan.recipe(len(progress))
        self.timeline = lay_out(recipe.schedule, recipe.density, progress)
        self.density, self.dense_layers, self.backend = recipe.density, recipe.schedule.dense_layers, backend
        self.step = self.dense_calls = self.sparse_calls = 0
        self._seen: dict[int, tuple[float, float]] = {}  # block -> realised density and retained mass at its first sparse call

    def is_sparse(self, step: int) -> bool:
        """True after the warm-up, which the first anchor of MC-Sparse ends."""
        return step > self.timeline.anchors[0]

    def __call__(self, block: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if not self.is_sparse(self.step) or block in self.dense_layers:
            self.dense_calls += 1
            return F.scaled_dot_product_attention(q, k, v, mask)
        self.sparse_calls += 1
        length = q.shape[2]
        raster = cell_order(None, after=length).to(q.device)
        groups = group_queries(q, method="cells", cells=raster, backend=self.backend)
        selection = self._select(q, k, raster)
        if block in self._seen:
            return token_sparse_attention(q, k, v, groups, selection, backend=self.backend)
        out, lse = token_sparse_attention(q, k, v, groups, selection, return_lse=True, backend=self.backend)
        dense_lse = dense_attention(q, k, v, backend=self.backend)[1]
        self._seen[block] = (selection.realised_density, (lse - dense_lse).exp().mean().item())
        return out

    def measured(self) -> dict[str, float]:
        """Means over the blocks, at the first sparse step."""
        density, mass = (sum(column) / len(self._seen) for column in zip(*self._seen.values(), strict=True))
        return {"realised_density": density, "retained_mass": mass}

    def _select(self, q: Tensor, k: Tensor, raster) -> KeySelection:
        length = q.shape[2]
        blocks, sizes = ceil_div(length, GROUP_SIZE), raster.sizes(GROUP_SIZE)
        score = _block_means(q, sizes) @ _block_means(k, sizes).transpose(-1, -2)
        kept = score.topk(key_budget(self.density, blocks * GROUP_SIZE) // GROUP_SIZE, dim=-1).indices
        chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, kept, True)
        keys = chosen.repeat_interleave(GROUP_SIZE, -1)[..., :length]
        unknown = score.new_zeros(score.shape[:3], dtype=torch.float32)
        return KeySelection(pack_bits(keys), keys.sum(-1, dtype=torch.int32), unknown, "token", raster)


def _block_means(x: Tensor, sizes: Tensor) -> Tensor:
    """Mean of each 128-token block of x (B, H, S, D), float32 (B, H, blocks, D)."""
    padded = F.pad(x.float(), (0, 0, 0, len(sizes) * GROUP_SIZE - x.shape[2]))
    return padded.unflatten(2, (-1, GROUP_SIZE)).sum(3) / sizes[:, None]
