"""A run whose last backend is demoted goes on dense, and its report says why."""
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from mc_sparse.kernels import BackendUnavailable, registry
from mc_sparse.kernels.attention import reference
from mc_sparse.kernels.registry import Candidate
from mc_sparse.mcsparse_core.context import AttentionCall, TokenLayout
from mc_sparse.mcsparse_core.engine import attend, why_dense
from mc_sparse.mcsparse_core.plan import SparsePlan
from mc_sparse.mcsparse_core.run import SparseRun
from mc_sparse.mcsparse_core.schedule import Schedule, Span
from mc_sparse.mcsparse_core.stats import one_line, report_text

GRID = (3, 19, 23)
TOKENS = 3 * 19 * 23


@pytest.fixture
def only(monkeypatch):
    """only(function, precisions): sparse attention has the one backend "frail", which computes it with function, in precisions."""
    monkeypatch.setattr(registry, "_verified", set())
    monkeypatch.setattr(registry, "_demoted", {})

    def register(function, precisions=("half",)):
        module = ModuleType("mc_sparse.kernels._frail")
        module.PRECISIONS = precisions
        module.NAME, module.why_not, module.token_sparse_attention = "frail", lambda geometry: None, function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(registry._CANDIDATES, "token_sparse_attention", (Candidate("frail", "._frail"),))
        registry.load.cache_clear()

    yield register
    registry.load.cache_clear()


def sample(backend="auto", steps=6, rows=1, **changes):
    """Runs 6 steps: dense, anchor, then reuse, as long as there is a backend. Returns the report and each step's output."""
    schedule = Schedule(Span(steps=2))
    plan = SparsePlan("custom", density=0.2, residual="bf16", min_tokens=1024, schedule=schedule, backend=backend, **changes)
    sigmas = [1 - i / steps for i in range(steps + 1)]
    run = SparseRun(plan, sigmas, [1 - s for s in sigmas])
    q, k, v = torch.randn(3, rows, 2, TOKENS, 32, generator=torch.Generator().manual_seed(0))
    outputs = []
    for sigma in sigmas[:-1]:
        run.begin_evaluation(sigma)
        run.begin_forward([(str(row), 0) for row in range(rows)], rows)

        def dense(part):
            return F.scaled_dot_product_attention(q[part], k[part], v[part])

        call = AttentionCall(
            q, k, v, 32**-0.5, run.site("block", 0, 1), run.branches(rows, TOKENS), TokenLayout(GRID), dense=dense, exact_dense=True
        )
        out = attend(run, call, why_dense(plan, q, k, v, has_mask=False))
        outputs.append(dense(slice(None)) if out is None else out)
    return run.close(), outputs


@pytest.mark.parametrize("rows", [1, 2])
def test_a_backend_that_fails_in_the_middle_of_a_run(only, rows):
    calls = []

    def third_fails(*args):
        calls.append(1)
        if len(calls) == 3 * rows:
            raise RuntimeError("no kernel image is available")
        return reference.token_sparse_attention(*args)

    only(third_fails)
    report, outputs = sample(rows=rows)
    # Step 0 dense, 1 anchor, 2 reuse; 3 fails in its last row, 4 and 5 do not try.
    assert report["counts"] == {"dense": 4 * rows, "anchor": rows, "reuse": rows} and len(calls) == 3 * rows
    (reason,) = set(report["reasons"]) - {"dense start"}
    assert report["reasons"][reason] == 3 * rows and "frail: was demoted: RuntimeError: no kernel image is available" in reason
    for out in outputs[3:]:
        assert torch.equal(out, outputs[0])
    ((op, backend, geometry, why),) = [d.values() for d in report["demotions"]]
    assert (op, backend, why) == ("token_sparse_attention", "frail", "RuntimeError: no kernel image is available")
    assert "head dim 32" in geometry
    assert "demoted: frail for token_sparse_attention" in one_line(report)
    assert "demoted: backend frail for token_sparse_attention of 1311 queries" in report_text(report)


def test_a_backend_that_is_wrong_from_the_start_leaves_the_run_dense(only):
    only(lambda *args: reference.token_sparse_attention(*args[:7], 2 * args[7], *args[8:]))
    report, outputs = sample()
    assert report["counts"] == {"dense": 6, "anchor": 0, "reuse": 0}
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert any("0 calls were sparse" in note for note in report["notes"])


def test_a_named_backend_raises(only):
    only(lambda *args: reference.token_sparse_attention(*args[:7], 2 * args[7], *args[8:]))
    with pytest.raises(BackendUnavailable, match="backend 'frail' cannot run"):
        sample("frail")


def test_out_of_memory_passes_through(only):
    def fail(*args):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    only(fail)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        sample()
    assert registry.demotions() == ()


@pytest.mark.parametrize("backend", ["auto", "frail"])
def test_a_precision_that_no_backend_has_is_half_for_a_reason(only, backend):
    only(reference.token_sparse_attention)
    report, outputs = sample(backend, precision="int8")
    expected, as_half = sample(backend)
    assert report["counts"] == expected["counts"] and all(map(torch.equal, outputs, as_half))
    assert report["precisions"] == {"bf16": 4} and report["backends"] == {"frail": 4}
    ((reason, count),) = report["precision_reasons"].items()
    assert count == 4 and "no int8 here" in reason and "frail: does not compute in int8" in reason
    text = report_text(report)
    assert f"backend {'auto (frail)' if backend == 'auto' else 'frail'}, precision int8 (bf16)" in text
    assert text.count("sparse in bf16 because: no int8 here") == 1 and expected["precision_reasons"] == {}


@pytest.mark.parametrize("backend", ["auto", "frail"])
def test_states_of_a_demoted_precision_die(only, backend):
    """The int8 kernel fails at step 3; that call is dense, and step 4 anchors anew in half precision, also where the backend is named."""
    ran = []

    def third_int8_fails(*args):
        ran.append(args[10] if len(args) > 10 else "half")
        if ran == ["int8"] * 3:
            raise RuntimeError("no kernel image is available")
        return reference.token_sparse_attention(*args)

    only(third_int8_fails, ("half", "int8"))
    report, _ = sample(backend, precision="int8")
    assert ran == ["int8", "int8", "int8", "half", "half"]  # anchor, reuse, failure; anchor, reuse
    assert report["counts"] == {"dense": 2, "anchor": 2, "reuse": 2} and report["precisions"] == {"int8": 1, "bf16": 1}
    ((reason, count),) = report["precision_reasons"].items()
    assert count == 1 and "was demoted: RuntimeError: no kernel image is available" in reason


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_a_named_backend_raises_in_any_precision_where_another_operation_fails(only, monkeypatch, precision):
    def fail(*args):
        raise RuntimeError("no kernel image is available")

    only(reference.token_sparse_attention, ("half", "int8"))
    chooser = ModuleType("mc_sparse.kernels._chooser")
    chooser.NAME, chooser.why_not, chooser.select_keys = "frail", lambda geometry: None, fail
    monkeypatch.setitem(sys.modules, chooser.__name__, chooser)
    candidates = Candidate("frail", "._chooser"), *registry._CANDIDATES["select_keys"]
    monkeypatch.setitem(registry._CANDIDATES, "select_keys", candidates)
    with pytest.raises(BackendUnavailable, match="select_keys"):
        sample("frail", precision=precision)
