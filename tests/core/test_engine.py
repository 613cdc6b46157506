"""The engine on real kernels and small tensors: what each action computes, and when each is taken."""
import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mc_sparse.mcsparse_core.context import AttentionCall, TokenLayout
from mc_sparse.mcsparse_core.engine import attend, why_dense, why_not_self_attention
from mc_sparse.mcsparse_core.plan import SparsePlan
from mc_sparse.mcsparse_core.run import SparseRun
from mc_sparse.mcsparse_core.schedule import Schedule, Span
from mc_sparse.mcsparse_core.stats import report_text

GRID = (3, 19, 23)  # 1311 tokens
TOKENS = GRID[0] * GRID[1] * GRID[2]


def plan(**changes):
    return SparsePlan(**{"preset": "custom", "density": 0.2, "min_tokens": 1024, "schedule": Schedule(Span(steps=2)), **changes})


def new_run(the_plan, steps=6, **kwargs):
    sigmas = [1 - i / steps for i in range(steps + 1)]
    return SparseRun(the_plan, sigmas, [1 - s for s in sigmas], **kwargs)


def tensors(rows=1, heads=2, seed=0, tokens=TOKENS):
    """q, k, v with structure: smooth in token order, so that neighbours attend to neighbours."""
    g = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, heads, tokens, 64, generator=g)
    kernel = torch.ones(1, 1, 9) / 9
    smooth = F.conv1d(base.transpose(2, 3).reshape(-1, 1, tokens), kernel, padding=4).view(rows, heads, 64, tokens).transpose(2, 3)
    q, k, v = (smooth * 4 + 0.3 * torch.randn(rows, heads, tokens, 64, generator=g) for _ in range(3))
    return q, k, v


def call_of(run, q, k, v, block=0, layout=None, exact=True, host=None):
    def dense(rows):
        return (host or F.scaled_dot_product_attention)(q[rows], k[rows], v[rows])

    site = run.site("double", block, 2)
    branches = run.branches(q.shape[0], q.shape[2])
    return AttentionCall(q, k, v, q.shape[-1] ** -0.5, site, branches, layout or TokenLayout(GRID), dense, exact)


def sample(run, per_step, conds=(("u", 0),), blocks=1, **kwargs):
    """Runs every step of `run`; per_step(step) gives q, k, v. Returns the output of each step and block, dense where attend left it."""
    outputs = []
    for step, sigma in enumerate(run.sigmas[:-1]):
        run.begin_evaluation(sigma)
        q, k, v = per_step(step)
        run.begin_forward(conds, q.shape[0])
        for block in range(blocks):
            call = call_of(run, q, k, v, block, **kwargs)
            out = attend(run, call)
            outputs.append(call.dense(slice(None)) if out is None else out)
    return outputs


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


CONFIGS = [
    {},
    {"tail": 0, "grouping": "pddp", "residual": "bf16"},
    {"tail": 32, "granularity": "cell32", "residual": "rank-8"},
    {"tail": 128, "residual": "int4"},
    {"residual": "off"},
]


@pytest.mark.parametrize("config", CONFIGS)
def test_counts_and_outputs_follow_the_schedule(config):
    run = new_run(plan(**config))
    fixed = tensors()
    dense = F.scaled_dot_product_attention(*fixed)
    outputs = sample(run, lambda _: fixed, blocks=2)
    assert dict(run.stats.counts) == {"dense": 2, "anchor": 2, "reuse": 8}
    assert run.stats.reasons == {"dense start": 2}
    for out in outputs[:4]:  # the dense step and the anchor
        assert relative(out, dense) < 1e-6
    loss = {"bf16": 1e-3, "rank-8": 0.2, "int4": 0.03, "off": 0.6}.get(config.get("residual"), 0.021)  # auto stays within its bound
    for out in outputs[4:]:  # unchanged inputs: only the residual's rounding is left
        assert relative(out, dense) < loss
        assert torch.equal(out, outputs[4])


def test_the_residual_brings_reuse_closer_when_inputs_drift():
    def drifting(step):
        return tuple(a + 0.05 * step * b for a, b in zip(tensors(seed=1), tensors(seed=2), strict=True))

    errors = {}
    for residual in ("off", "bf16"):
        outputs = sample(new_run(plan(residual=residual, tail=0)), drifting)
        errors[residual] = [relative(o, F.scaled_dot_product_attention(*drifting(s))) for s, o in enumerate(outputs)]
    assert all(b < 0.8 * a for a, b in zip(errors["off"][2:], errors["bf16"][2:], strict=True))
    assert errors["bf16"][2] < errors["bf16"][-1]  # it ages


def test_density_one_without_residual_is_dense():
    outputs = sample(new_run(plan(density=1.0, residual="off")), lambda s: tensors(seed=s))
    for step, out in enumerate(outputs):
        assert relative(out, F.scaled_dot_product_attention(*tensors(seed=step))) < 1e-5


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_low_precision_errs_and_the_residual_makes_up_for_it(precision):
    fixed = tensors()
    dense = F.scaled_dot_product_attention(*fixed)
    errors = {}
    for asked in ("bf16", precision):
        for residual in ("off", "bf16"):
            run = new_run(plan(precision=asked, density=1.0, residual=residual))
            errors[asked, residual] = relative(sample(run, lambda _: fixed)[-1], dense)
            assert run.stats.precisions == {asked: 4} and run.stats.backends == {"reference": 4} and not run.stats.precision_reasons
    assert errors["bf16", "off"] < 1e-5 < 1e-3 < errors[precision, "off"]
    assert errors[precision, "bf16"] < 1e-3  # unchanged inputs: only the residual's rounding is left


@pytest.mark.parametrize("allowed", [(True, False), (False, True)])
def test_a_change_of_precision_anchors_anew(allowed):
    """At step 4 of 7 the host changes its mind about low precision: the state of steps 1 to 3 is of no use to it."""
    run = new_run(plan(precision="int8"), steps=7)
    fixed = tensors()
    for step, sigma in enumerate(run.sigmas[:-1]):
        run.begin_evaluation(sigma)
        run.begin_forward((("u", 0),), 1)
        out = attend(run, replace(call_of(run, *fixed), low_precision=allowed[step >= 4]))
    assert [what for what, _ in run.stats.timeline.values()] == ["dense", "anchor", "reuse", "reuse", "anchor", "reuse", "reuse"]
    assert relative(out, F.scaled_dot_product_attention(*fixed)) < 0.021
    report = run.close()
    assert report["precisions"] == {"int8": 2, "bf16": 2} and report["precision_reasons"] == {"the model rules low precision out": 2}
    assert "sparse in bf16 because: the model rules low precision out 2" in report_text(report)


def test_batched_split_reordered_and_alternating_branches_agree():
    pair = [tensors(seed=s) for s in (3, 4)]
    both = tuple(torch.cat(t) for t in zip(*pair, strict=True))
    batched = sample(new_run(plan()), lambda _: both, conds=(("u", 1), ("u", 0)))
    alone = [sample(new_run(plan()), lambda _, p=p: p) for p in pair]
    alternating, run = [], new_run(plan())
    for step, sigma in enumerate(run.sigmas[:-1]):
        run.begin_evaluation(sigma)
        halves = [None, None]
        if step % 2:
            run.begin_forward((("u", 1), ("u", 0)), 2)
            out = attend(run, call_of(run, *both))
            halves = list((F.scaled_dot_product_attention(*both) if out is None else out).split(1))
        else:
            for i, cond in ((1, 0), (0, 1)) if step == 2 else ((0, 1), (1, 0)):
                run.begin_forward((("u", cond),), 1)
                out = attend(run, call_of(run, *pair[i]))
                halves[i] = F.scaled_dot_product_attention(*pair[i]) if out is None else out
        alternating.append(torch.cat(halves))
    for step in range(6):
        expected = torch.cat([a[step] for a in alone])
        assert relative(batched[step], expected) < 1e-5  # the CPU's dense kernel rounds by the number of rows
        assert relative(alternating[step], expected) < 1e-5
    assert dict(run.stats.counts) == {"dense": 2, "anchor": 2, "reuse": 8}


def test_rows_of_one_branch_have_their_own_selection():
    pair = [tensors(seed=s) for s in (5, 6)]
    both = tuple(torch.cat(t) for t in zip(*pair, strict=True))
    config = plan(grouping="pddp", tail=0, residual="bf16")
    together = sample(new_run(config), lambda _: both)
    for row, p in enumerate(pair):
        for out, alone in zip(together, sample(new_run(config), lambda _, p=p: p), strict=True):
            assert relative(out[row], alone[0]) < 1e-5


def test_a_mixed_call_is_dense_and_sparse_by_rows():
    run = new_run(plan())
    late = tensors(seed=8)
    for step, sigma in enumerate(run.sigmas[:-1]):
        run.begin_evaluation(sigma)
        present = 1 if step < 4 else 2
        run.begin_forward([("a", 0), ("b", 0)][:present], present)
        q, k, v = (torch.cat([t] * present) for t in late)
        attend(run, call_of(run, q, k, v))
    # b appears at step 4, anchors there and reuses at step 5
    assert dict(run.stats.counts) == {"dense": 1, "anchor": 2, "reuse": 5}


def test_a_second_pass_with_the_same_uuid_has_its_own_state():
    run, (one, two) = new_run(plan(residual="bf16")), (tensors(seed=1), tensors(seed=2))
    for sigma in run.sigmas[:-1]:
        run.begin_evaluation(sigma)
        for inputs in (one, two):
            run.begin_forward((("u", 0),), 1)
            out = attend(run, call_of(run, *inputs))
            if out is not None:
                assert relative(out, F.scaled_dot_product_attention(*inputs)) < 1e-3
    assert run.stats.counts["anchor"] == 2


def test_other_shapes_and_dtypes_anchor_anew_and_never_raise():
    run = new_run(plan(schedule=Schedule(Span(steps=0))))
    large, small = tensors(), tensors(tokens=1100)
    changed = tuple(t.to(torch.bfloat16) for t in small)  # by a model that was cast under us
    for sigma, inputs in zip(run.sigmas, (large, small, large, changed, large, small), strict=False):
        run.begin_evaluation(sigma)
        run.begin_forward((("u", 0),), 1)
        attend(run, call_of(run, *inputs, layout=TokenLayout(GRID) if inputs is large else TokenLayout(None, after=1100)))
    # large: A R R; small: A, then A as bf16, and no step left when that is gone
    assert run.stats.counts == {"anchor": 3, "reuse": 2, "dense": 1}


def test_the_clock_never_goes_back_and_substeps_reuse():
    run, inputs = new_run(plan(schedule=Schedule(Span(steps=1)))), tensors()
    order = (0, 1, 2, 1, 2, 3, 2, 3, 3)  # heunpp2
    for i in order:
        run.begin_evaluation(run.sigmas[i])
        run.begin_forward((("u", 0),), 1)
        attend(run, call_of(run, *inputs))
    assert dict(run.stats.counts) == {"anchor": 1, "reuse": 8}
    assert run.step == 3


def test_exact_ranges_are_dense_and_their_keys_kept():
    layout = TokenLayout((3, 19, 22), before=57, exact=((0, 57),))  # 57 + 1254 = 1311
    inputs = tensors(seed=3)
    dense = F.scaled_dot_product_attention(*inputs)
    run = new_run(plan(residual="off", tail=0))
    out = sample(run, lambda _: inputs, layout=layout)[-1]
    assert relative(out[:, :, :57], dense[:, :, :57]) < 1e-5
    assert relative(out[:, :, 57:], dense[:, :, 57:]) > 1e-3
    # 20 % of the 1254 other keys, rounded up to two tiles of 128, plus the kept ones
    assert run.stats.numbers()["realised_density"] == pytest.approx((256 + 57) / TOKENS, abs=1e-6)


def test_a_foreign_dense_path_stays_the_output_of_anchors():
    run, inputs = new_run(plan(residual="bf16")), tensors()

    def foreign(q, k, v):
        return 1.5 * F.scaled_dot_product_attention(q, k, v)

    outputs = sample(run, lambda _: inputs, host=foreign, exact=False)
    for out in outputs:
        assert relative(out, foreign(*inputs)) < 2e-3


def test_a_declined_run_leaves_every_call_to_the_host():
    run = new_run(plan(), decline="multi-GPU")
    run.begin_evaluation(1.0)
    run.begin_forward((("u", 0),), 1)
    assert attend(run, call_of(run, *tensors())) is None
    report = run.close()
    assert report["reasons"] == {"multi-GPU": 1} and "this run was dense: multi-GPU" in report["notes"]


def test_no_conditioning_identity_is_dense_with_a_reason():
    run = new_run(plan())
    run.begin_evaluation(0.3)
    assert attend(run, call_of(run, *tensors())) is None
    run.begin_forward((("u", 0), ("u", 1)), 3)  # three rows cannot be two equal shares
    assert attend(run, call_of(run, *tensors(rows=3))) is None
    assert run.stats.reasons == {"the host names no conditioning": 2}


def test_the_memory_cap_keeps_calls_dense_without_anchoring_again():
    run = new_run(plan(residual="bf16"), budget_bytes=400_000)  # the residual of one block alone needs 335 616 bytes
    sample(run, lambda _: tensors(), blocks=2)
    assert run.stats.counts == {"dense": 2 + 4, "anchor": 2, "reuse": 4}
    assert run.stats.reasons == {"dense start": 2, "memory cap": 3, "no step to reuse": 1}
    assert 0 < run.cache.peak_bytes <= 400_000
    assert any("memory cap" in n for n in run.close()["notes"])


def test_windows_that_moved_on_are_let_go():
    run = new_run(plan(schedule=Schedule(Span(steps=0))), steps=12)
    held = []
    for step, sigma in enumerate(run.sigmas[:-1]):
        run.begin_evaluation(sigma)
        for window in ((0, 1), (step, step + 1)):
            run.begin_forward((("u", 0),), 1, window=window)
            attend(run, call_of(run, *tensors()))
        held.append(len(run.cache))
    assert max(held) <= 6 and run.stats.counts["reuse"] >= 11


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
def test_close_lets_every_tensor_go(status):
    run = new_run(plan())
    sample(run, lambda _: tensors())
    state = weakref.ref(next(iter(run.cache._states.values())))
    report = run.close(status)
    gc.collect()
    assert state() is None and run.cache.bytes == 0 and len(run.cache) == 0
    assert report["status"] == status and report["counts"]["reuse"] == 4 and report["cache_bytes"] > 0


def test_inputs_are_never_changed():
    inputs = tensors()
    copies = [t.clone() for t in inputs]
    sample(new_run(plan()), lambda _: inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


def test_a_run_repeats_bitwise():
    for config in CONFIGS[:3]:
        first, second = (sample(new_run(plan(**config)), lambda s: tensors(seed=s)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_eligibility():
    q = torch.zeros(1, 2, 2000, 64)
    assert why_not_self_attention(q, q, q, 1024) is None
    assert why_not_self_attention(q, q[:, :, :77], q[:, :, :77], 1024) == "cross-attention"
    assert why_not_self_attention(q[:, :, :500], q[:, :, :500], q[:, :, :500], 1024) == "short, below 1024 tokens"
    assert why_not_self_attention(q, q[:, :1], q[:, :1], 1024) == "grouped heads"
    assert why_dense(plan(), q, q, q, has_mask=True) == "attention mask"
    assert why_dense(plan(), q, q.half(), q, has_mask=False) == "mixed dtypes"
    assert why_dense(plan(), q, q, q, has_mask=False) is None


def test_report_notes_name_a_run_that_gained_nothing():
    run = new_run(plan(schedule=Schedule(Span(steps=1))), steps=1)
    sample(run, lambda _: tensors())
    assert any(n.startswith("0 calls were sparse: 1 step is too few") for n in run.close()["notes"])
    assert any("no attention call reached MC-Sparse" in n for n in new_run(plan()).close()["notes"])
    one = new_run(plan(schedule=Schedule(Span(steps=2))), steps=3)
    sample(one, lambda _: tensors())
    assert any("at most one step" in n for n in one.close()["notes"])


def test_latents_of_equal_tokens_but_other_shape_have_their_own_anchors():
    run, inputs = new_run(plan(residual="bf16")), (tensors(seed=1), tensors(seed=2))
    grids = ((3, 19, 23), (3, 23, 19))
    for sigma in run.sigmas[:-1]:
        run.begin_evaluation(sigma)
        for (q, k, v), grid in zip(inputs, grids, strict=True):
            run.begin_forward((("u", 0),), 1, shape=grid)
            out = attend(run, call_of(run, q, k, v, layout=TokenLayout(grid)))
            assert out is None or relative(out, F.scaled_dot_product_attention(q, k, v)) < 1e-3
    assert run.stats.counts == {"dense": 2, "anchor": 2, "reuse": 8}


@pytest.mark.parametrize("residual", ["auto", "rank-8", "int4"])
def test_no_number_in_the_inputs_goes_through_as_dense_attention_would(residual):
    q, k, v = tensors()
    v[0, 0, 5] = float("nan")
    run = new_run(plan(residual=residual))
    sample(run, lambda _: (q, k, v))
    report = run.close()
    assert report["counts"]["reuse"] == 4
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_others_does_not_matter(dtype):
    expected = sample(new_run(plan()), lambda _: tensors())
    inputs = tensors()
    torch.set_default_dtype(dtype)
    try:
        found = sample(new_run(plan()), lambda _: inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_sigmas_may_be_tensors_and_progress_must_match():
    run = SparseRun(plan(), torch.linspace(1, 0, 7), torch.linspace(0, 1, 7))
    sample(run, lambda _: tensors())
    assert run.stats.counts["reuse"] == 4
    with pytest.raises(ValueError, match="progress has 3 values and sigmas 7"):
        SparseRun(plan(), torch.linspace(1, 0, 7), (0, 0.5, 1))
    assert SparseRun(plan(), (float("nan"), 0.5, 0), (0, 0.5, 1)).decline == "a noise level is not a number"


def test_recorded_gradients_are_a_reason_to_be_dense():
    q, k, v = tensors()
    q.requires_grad_()
    assert "gradients are recorded" in why_dense(plan(), q, k, v, has_mask=False)
    with torch.no_grad():
        assert why_dense(plan(), q, k, v, has_mask=False) is None
