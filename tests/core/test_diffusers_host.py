"""The engine behind diffusers: the demo model for a few steps of 1248 tokens."""
import pytest
import torch

pytest.importorskip("diffusers")
from mc_sparse import SparsePlan, flow_progress, sparsify  # noqa: E402
from mc_sparse.demo import model, prompts  # noqa: E402
from mc_sparse.mcsparse_core.schedule import Schedule, Span  # noqa: E402

STEPS, GRID = 4, (8, 24, 26)
SIGMAS = [model.shifted(1 - i / STEPS) for i in range(STEPS + 1)]
PROGRESS = flow_progress(SIGMAS, model.SHIFT)


@pytest.fixture(scope="module")
def transformer():
    return model.load()


def plan(**changes):
    return SparsePlan(**{"preset": "custom", "density": 0.3, "min_tokens": 1024, "schedule": Schedule(Span(steps=2)), **changes})


def denoise(transformer, run=None, passes=1):
    """Latents after all steps; `passes` forwards per evaluation, as serial guidance does."""
    x = torch.randn(1, 16, *GRID, generator=torch.Generator().manual_seed(0))
    text = prompts.embedding(prompts.names()[0])
    for sigma, following in zip(SIGMAS, SIGMAS[1:], strict=False):
        if run:
            run.begin_evaluation(sigma)
        for _ in range(passes):
            velocity = transformer(x, torch.tensor([1000 * sigma]), text, return_dict=False)[0]
        x = x + (following - sigma) * velocity
    return x


@pytest.fixture(scope="module")
def dense(transformer):
    with torch.inference_mode():
        return denoise(transformer)


def test_counts_closeness_and_restored_processors(transformer, dense):
    before = [b.attn1.processor for b in transformer.blocks]
    with torch.inference_mode(), sparsify(transformer, plan(), SIGMAS, PROGRESS) as run:
        out = denoise(transformer, run)
        report = run.close()
    assert report["counts"] == {"dense": 6, "anchor": 6, "reuse": 12} and report["passed_through"] == {}
    assert ((out - dense).norm() / dense.norm()).item() < 0.2
    assert [b.attn1.processor for b in transformer.blocks] == before
    with torch.inference_mode():
        assert torch.equal(denoise(transformer), dense)


def test_precision_of_the_plan_is_used(transformer, dense):
    errors = {}
    for precision in ("bf16", "fp8"):
        with torch.inference_mode(), sparsify(transformer, plan(precision=precision), SIGMAS, PROGRESS) as run:
            errors[precision] = ((denoise(transformer, run) - dense).norm() / dense.norm()).item()
            report = run.close()
        assert report["precisions"] == {precision: 12} and report["precision_reasons"] == {}
    assert errors["bf16"] != errors["fp8"] < 0.2


def test_density_one_without_residual_is_dense(transformer, dense):
    with torch.inference_mode(), sparsify(transformer, plan(density=1.0, residual="off"), SIGMAS, PROGRESS) as run:
        assert ((denoise(transformer, run) - dense).norm() / dense.norm()).item() < 1e-4


def test_serial_passes_have_their_own_anchors(transformer):
    with torch.inference_mode(), sparsify(transformer, plan(), SIGMAS, PROGRESS) as run:
        denoise(transformer, run, passes=2)
        assert run.close()["counts"] == {"dense": 12, "anchor": 12, "reuse": 24}


def test_with_gradients_all_is_dense_for_a_reason(transformer):
    with sparsify(transformer, plan(), SIGMAS, PROGRESS) as run:
        denoise(transformer, run).sum().backward()
        assert list(run.close()["reasons"]) == ["gradients are recorded (use torch.inference_mode)"]
    transformer.zero_grad()


def test_misuse_is_said(transformer):
    with pytest.raises(TypeError, match="sparsify takes a diffusers WanTransformer3DModel, not Linear"), sparsify(
        torch.nn.Linear(1, 1), plan(), SIGMAS, PROGRESS
    ):
        pass
    with torch.inference_mode(), sparsify(transformer, plan(), SIGMAS, PROGRESS), pytest.raises(RuntimeError, match="begin_evaluation"):
        denoise(transformer)


def test_an_exception_inside_restores_and_lets_go(transformer):
    before = [b.attn1.processor for b in transformer.blocks]
    with pytest.raises(KeyError), torch.inference_mode(), sparsify(transformer, plan(), SIGMAS, PROGRESS) as run:
        denoise(transformer, run)
        raise KeyError
    assert [b.attn1.processor for b in transformer.blocks] == before and len(run.cache) == 0
