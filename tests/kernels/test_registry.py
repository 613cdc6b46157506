"""Choosing a backend: first that can, or the named one, with every reason in words."""
import sys
from types import SimpleNamespace

import pytest
import torch

from mc_sparse.kernels import BackendUnavailable, Geometry, backend_names, pick, registry, why_none
from mc_sparse.kernels.attention import torch_dense
from mc_sparse.kernels.registry import Candidate, candidates

CPU = Geometry(1, 2, 300, 300, 64, torch.float32, "cpu")
CUDA = Geometry(1, 2, 300, 300, 64, torch.bfloat16, "cuda", (9, 0))
OPS = ["group_queries", "pool_cells", "dense_attention", "select_keys", "token_sparse_attention"]


@pytest.fixture
def with_fast(monkeypatch):
    """A backend "fast" of token_sparse_attention that takes head dim 64 only, and "gone" whose package is missing."""
    fast = SimpleNamespace(NAME="fast", why_not=lambda g: None if g.head_dim == 64 else f"takes head dim 64, not {g.head_dim}")
    monkeypatch.setitem(sys.modules, "mc_sparse.kernels.attention.fast", fast)
    table = dict(registry._CANDIDATES)
    table["token_sparse_attention"] = (
        Candidate("gone", "._missing_third_party"), Candidate("fast", ".attention.fast"), *table["token_sparse_attention"],
    )
    monkeypatch.setattr(registry, "_CANDIDATES", table)
    real = registry.import_module

    def importing(name, package):
        if name == "._missing_third_party":
            raise ModuleNotFoundError("No module named 'gone_package'", name="gone_package")
        return real(name, package)

    monkeypatch.setattr(registry, "import_module", importing)
    registry._load.cache_clear()
    yield fast
    registry._load.cache_clear()


@pytest.mark.parametrize("op", OPS)
def test_every_candidate_keeps_its_promises(op):
    for candidate in candidates(op):
        module, reason = registry._load(candidate.module)
        assert module is not None, reason
        assert candidate.name == module.NAME
        assert callable(getattr(module, op))
        assert module.why_not(CPU) is None
    assert candidates(op)[-1].name == "reference"


def test_auto_on_the_cpu():
    assert why_none(CPU) is None
    assert pick("token_sparse_attention", CPU).NAME == "reference"
    assert pick("dense_attention", CPU).NAME == "torch"


def test_the_reference_is_never_automatic_on_a_gpu_but_runs_by_name():
    with pytest.raises(BackendUnavailable, match="ask for it by name"):
        pick("select_keys", CUDA)
    assert pick("select_keys", CUDA, "reference").NAME == "reference"
    assert "cuda sm_90" in why_none(CUDA)


def test_first_that_can(with_fast):
    assert pick("token_sparse_attention", CPU) is with_fast
    odd = Geometry(1, 2, 300, 300, 96, torch.float32, "cpu")
    assert pick("token_sparse_attention", odd).NAME == "reference"
    assert backend_names() == ("auto", "reference", "gone", "fast")


def test_a_named_backend_that_cannot_run_raises_with_every_reason(with_fast):
    odd = Geometry(1, 2, 300, 300, 96, torch.float32, "cpu")
    with pytest.raises(BackendUnavailable) as error:
        pick("token_sparse_attention", odd, "fast")
    reasons = ["fast: takes head dim 64, not 96", "gone: No module named 'gone_package'", "reference: can run"]
    for part in ("backend 'fast' cannot run", *reasons):
        assert part in str(error.value)
    with pytest.raises(BackendUnavailable, match="gone_package"):
        pick("token_sparse_attention", CPU, "gone")


def test_a_name_that_only_other_operations_have_is_auto(with_fast):
    assert pick("pool_cells", CPU, "fast").NAME == "reference"
    with pytest.raises(BackendUnavailable, match="ask for it by name"):
        pick("pool_cells", CUDA, "fast")


@pytest.mark.parametrize("op", OPS)
def test_an_unknown_name_raises(op):
    with pytest.raises(ValueError, match="there is no backend 'turbo'; choose one of auto, reference"):
        pick(op, CPU, "turbo")


def test_a_missing_module_of_our_own_is_a_bug():
    registry._load.cache_clear()
    with pytest.raises(ModuleNotFoundError):
        registry._load(".attention.does_not_exist")


@pytest.mark.parametrize(
    "geometry, reason",
    [
        (Geometry(1, 1, 9, 9, 64, torch.float32, "cuda", (9, 0)), "takes bfloat16 and float16"),
        (Geometry(1, 1, 9, 9, 60, torch.float16, "cuda", (9, 0)), "multiples of 8"),
        (Geometry(1, 1, 9, 9, 64, torch.float16, "cuda", (7, 5)), "compute capability 8.0"),
        (Geometry(1, 1, 9, 9, 64, torch.float16, "mps"), "on mps"),
    ],
)
def test_fused_dense_attention_says_what_it_lacks(geometry, reason):
    assert reason in torch_dense.why_not(geometry)
