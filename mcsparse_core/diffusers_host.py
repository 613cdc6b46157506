"""The same engine behind diffusers: sparse self-attention in a Wan transformer for the length of one sampling run."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from .context import AttentionCall, TokenLayout
from .engine import attend, why_dense, why_not_self_attention
from .plan import SparsePlan
from .run import SparseRun


@contextmanager
def sparsify(transformer, plan: SparsePlan, sigmas: Sequence[float], progress: Sequence[float]) -> Iterator[SparseRun]:
    """Runs a diffusers WanTransformer3DModel sparse inside the `with` block and restores its processors after it.

    sigmas: the run's noise levels, the last one ends it; progress: of each of them (`flow_progress`). The caller calls
    `run.begin_evaluation(sigma)` before each model evaluation; forwards within one evaluation (cond, then uncond) are told apart by
    their order. Use it without gradients (`torch.inference_mode`), else all is dense. The run's report is `run.close()`'s; leaving the
    block lets the cache go in any case. Raises TypeError for other models.
    """
    if type(transformer).__name__ != "WanTransformer3DModel":
        raise TypeError(f"sparsify takes a diffusers WanTransformer3DModel, not {type(transformer).__name__}")
    run = SparseRun(plan, sigmas, progress, family=type(transformer).__name__)
    patch, blocks = transformer.config.patch_size, len(transformer.blocks)
    layout = TokenLayout(None)

    def before_forward(_, args, kwargs):
        nonlocal layout
        if run.evaluation < 0:
            raise RuntimeError("sparsify: call run.begin_evaluation(sigma) before each model evaluation; it is the clock of the schedule")
        latents = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        layout = TokenLayout(tuple(n // p for n, p in zip(latents.shape[2:], patch, strict=True)))
        run.begin_forward([("diffusers", 0)], latents.shape[0], shape=tuple(latents.shape))

    @torch.compiler.disable  # decisions change from step to step; a traced one would stay as it was
    def attention(block: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        def dense(rows: slice) -> Tensor:
            return F.scaled_dot_product_attention(q[rows], k[rows], v[rows], None if mask is None else mask[rows])

        reason = why_not_self_attention(q, k, v, plan.min_tokens)
        if reason:
            run.stats.passed[reason] += 1
            return dense(slice(None))
        site = run.site("block", block, blocks)
        call = AttentionCall(
            q, k, v, q.shape[-1] ** -0.5, site, run.branches(q.shape[0], q.shape[2]), layout, dense, exact_dense=True
        )  # fmt: skip
        out = attend(run, call, why_dense(plan, q, k, v, mask is not None))
        if out is None:
            with run.stats.timed("dense", q.device):
                out = dense(slice(None))
        return out

    hook = transformer.register_forward_pre_hook(before_forward, with_kwargs=True)
    try:
        with self_attention(transformer, attention):
            yield run
    finally:
        hook.remove()
        run.cache.clear()


@contextmanager
def self_attention(transformer, attention: Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]):
    """Inside the block, a WanTransformer3DModel's self-attention is attention(block index, q, k, v, mask) on (B, H, S, D) views."""
    originals = [block.attn1.processor for block in transformer.blocks]
    try:
        for i, block in enumerate(transformer.blocks):
            block.attn1.set_processor(_SelfAttention(i, attention))
        yield
    finally:
        for block, processor in zip(transformer.blocks, originals, strict=True):
            block.attn1.set_processor(processor)


class _SelfAttention:
    """Wan's projections, qk norm and rotary embedding around an attention function."""

    def __init__(self, block: int, attention: Callable):
        self.block, self.attention = block, attention

    def __call__(self, attn, hidden_states: Tensor, encoder_hidden_states=None, attention_mask=None, rotary_emb=None) -> Tensor:
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, -1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k, v = (t.unflatten(2, (attn.heads, -1)) for t in (attn.norm_q(q), attn.norm_k(k), v))
        if rotary_emb is not None:
            q, k = _rotate(q, *rotary_emb), _rotate(k, *rotary_emb)
        out = self.attention(self.block, *(t.transpose(1, 2) for t in (q, k, v)), attention_mask)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2).type_as(hidden_states)))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (B, S, H, D) with interleaved pairs, as Wan defines it; cos, sin (1, S, 1, D) hold each angle twice."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x)
