"""attend(): dense, anchor or reuse for one attention call; the only place where they meet."""
from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..kernels import (
    BackendUnavailable,
    auto_residual,
    compress_residual,
    dense_attention,
    group_queries,
    registry,
    select_keys,
    sparse_residual,
    token_sparse_attention,
)
from ..kernels.shapes import Geometry
from .cache import AnchorState
from .context import AttentionCall, BranchKey
from .plan import SparsePlan
from .precision import choose_precision, in_plan_words
from .run import SparseRun
from .schedule import Action, Decision, decide

RESIDUAL_BOUND = 0.02  # `residual auto`: largest relative error of the output at the anchor that compression may add


def why_not_self_attention(q: Tensor, k: Tensor, v: Tensor, min_tokens: int) -> str | None:
    """A reason if q, k, v (B, H, S, D) are no long self-attention: such calls are no candidates and pass through. Else None."""
    if q.shape != k.shape or k.shape != v.shape:
        return "cross-attention" if q.shape[:2] == k.shape[:2] else "grouped heads"
    if q.shape[2] < min_tokens:
        return f"short, below {min_tokens} tokens"
    return None


def why_dense(plan: SparsePlan, q: Tensor, k: Tensor, v: Tensor, has_mask: bool) -> str | None:
    """A reason if a long self-attention call cannot be sparse, None if it can. Settled by shapes alone, alike on every step."""
    if has_mask:
        return "attention mask"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        return "gradients are recorded (use torch.inference_mode)"
    if len({q.dtype, k.dtype, v.dtype}) > 1:
        return "mixed dtypes"
    if plan.backend == "auto":
        return registry.why_none(Geometry.of(q, k))
    return None


def attend(run: SparseRun, call: AttentionCall, reason: str | None = None) -> Tensor | None:
    """Attention of one call, (B, H, S, D) in q's dtype, or None where every row is dense: the host then runs its own.

    reason: why the call cannot be sparse (`why_dense`), if so.
    """
    reason = run.decline or reason or (None if call.branches else "the host names no conditioning")
    if reason:
        for _ in call.branches or (None,):
            run.stats.count(run.step, call.site, Action.DENSE, reason)
        return None
    geometry = Geometry.of(call.q, call.k)
    wish = run.plan.precision, geometry, run.family, call.low_precision, run.plan.backend
    precision, why_half = choose_precision(*wish)
    decisions = [_decide(run, call, branch, rows, precision) for branch, rows in call.branches]
    outputs = []
    if any(d.action is not Action.DENSE for d in decisions):
        try:
            outputs = [_branch(run, call, branch, rows, d, precision) for (branch, rows), d in zip(call.branches, decisions, strict=True)]
        except BackendUnavailable as error:  # the last backend of some operation was demoted during this call
            if run.plan.backend != registry.AUTO and choose_precision(*wish)[0] == precision:  # it was not for the precision
                raise
            decisions = [Decision(Action.DENSE, registry.why_none(geometry) or str(error))] * len(decisions)
    for decision in decisions:
        run.stats.count(run.step, call.site, decision.action, decision.reason)
        if decision.action is Action.REUSE:
            backend = registry.pick(registry.SPARSE, replace(geometry, precision=precision), run.plan.backend).NAME
            run.stats.reused(backend, in_plan_words(precision), why_half)
    if not outputs:
        return None
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _decide(run: SparseRun, call: AttentionCall, branch: BranchKey, rows: slice, precision: str) -> Decision:
    state = run.cache.get(call.site, branch, run.evaluation)
    if state is not None and state.shape != _shape(call, rows, precision):
        run.cache.drop(call.site, branch)
        state = None
    layer_is_dense = call.site.is_layer(run.recipe.schedule.dense_layers)
    decision = decide(run.timeline, layer_is_dense, run.step, state.step if state else None)
    if decision.action is Action.ANCHOR and (call.site, branch, run.timeline.due(run.step)) in run.unfit:
        return Decision(Action.DENSE, "memory cap")
    return decision


def _shape(call: AttentionCall, rows: slice, precision: str) -> tuple:
    return (*call.q[rows].shape, call.q.dtype, call.q.device, call.layout, precision)


def _branch(run: SparseRun, call: AttentionCall, branch: BranchKey, rows: slice, decision: Decision, precision: str) -> Tensor:
    kind = decision.action.value
    with run.stats.timed(kind, call.q.device):
        if decision.action is Action.DENSE:
            return call.dense(rows)
        if decision.action is Action.ANCHOR:
            return _anchor(run, call, branch, rows, precision)
        return _reuse(run, call, branch, rows, precision)


def _anchor(run: SparseRun, call: AttentionCall, branch: BranchKey, rows: slice, precision: str) -> Tensor:
    q, k, v = call.q[rows], call.k[rows], call.v[rows]
    recipe, backend, due = run.recipe, run.plan.backend, run.timeline.due(run.step)
    cells = run.cells(call.layout, q.device)
    output, lse = dense_attention(q, k, v, scale=call.scale, backend=backend)
    if not call.exact_dense:
        output = call.dense(rows)
    groups = group_queries(q, method=recipe.grouping, cells=cells, backend=backend)
    selection = select_keys(
        q, k, lse, groups, density=run.timeline.densities[due], cells=cells, granularity=recipe.granularity,
        kept=call.layout.exact, scale=call.scale, backend=backend,
    )  # fmt: skip
    run.stats.anchored(selection.retained.mean(), selection.counts.float().mean() / len(cells))
    residual = None
    if recipe.residual != "off":
        r = sparse_residual(
            q, k, v, groups, selection, output, tail=recipe.tail or None, scale=call.scale, precision=precision, backend=backend
        )
        residual = auto_residual(r, output, RESIDUAL_BOUND) if recipe.residual == "auto" else compress_residual(r, recipe.residual)
        run.stats.residuals[residual.format] += 1
    if not run.cache.put(call.site, branch, AnchorState(run.step, _shape(call, rows, precision), groups, selection, residual)):
        run.unfit.add((call.site, branch, due))
        run.note("the cache reached its memory cap: some layers stayed dense (lower the density or the resolution, or use residual rank-8)")
    return output


def _reuse(run: SparseRun, call: AttentionCall, branch: BranchKey, rows: slice, precision: str) -> Tensor:
    state = run.cache.get(call.site, branch, run.evaluation)
    q, k, v = call.q[rows], call.k[rows], call.v[rows]
    output = token_sparse_attention(
        q, k, v, state.groups, state.selection, tail=run.recipe.tail or None, residual=state.residual, scale=call.scale,
        precision=precision, backend=run.plan.backend,
    )  # fmt: skip
    for start, stop in call.layout.exact:
        output[:, :, start:stop] = dense_attention(q[:, :, start:stop], k, v, scale=call.scale, backend=run.plan.backend)[0]
    return output
