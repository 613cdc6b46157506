"""Dense attention of every backend that can run here, against the definition; what each takes; and the real failures of a GPU."""
import subprocess
import sys

import pytest
import torch

from mc_sparse.kernels import Geometry, dense_attention, registry
from mc_sparse.kernels.attention import cudnn, fa3, fa4, fused, torch_dense
from mc_sparse.kernels.attention import reference as definition
from mc_sparse.kernels.dtypes import half
from mc_sparse.kernels.testing import KINDS, assert_no_worse_than, make_qkv

NAMES = ("fa3", "fa4", "cudnn", "flash-attn", "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def geometry(head_dim=64, dtype=torch.bfloat16, device="cuda", capability=(9, 0)):
    return Geometry(1, 2, 300, 300, head_dim, dtype, device, capability)


@pytest.mark.parametrize(
    "lacks, reason",
    [
        (fused.why_not(geometry()), None),
        (fused.why_not(geometry(dtype=torch.float32)), None),
        (fused.why_not(geometry(60)), "takes head dims that are multiples of 8 up to 256, not 60"),
        (fused.why_not(geometry(264)), "takes head dims that are multiples of 8 up to 256, not 264"),
        (fused.why_not(geometry(capability=(7, 5))), "needs compute capability 8.0 or newer, not 7.5"),
        (fused.why_not(geometry(device="cpu", capability=None)), "runs on NVIDIA GPUs, not on cpu"),
        (fused.why_not(geometry(dtype=torch.float64)), "takes float32, bfloat16 and float16, not float64"),
        (fa3.why_not(geometry(capability=(10, 0))), "is for Hopper (compute capability 9.0)"),
        (fa4.why_not(geometry(capability=(8, 6))), "needs compute capability 9.0 or newer, not 8.6"),
        (fa4.why_not(geometry(256, capability=(10, 0))), "takes head dims that are multiples of 8 up to 128, not 256"),
        (torch_dense.why_not(geometry(256, torch.float32)), None),
    ],
)
def test_what_each_takes(lacks, reason):
    assert lacks == reason


def test_without_cudnn_there_is_no_attention_by_it():
    found = cudnn.why_not(geometry())
    assert (found is None) == (torch.backends.cudnn.is_available() and not torch.version.hip)


def test_half_copies_nothing_that_kernels_can_read():
    q, k, _ = make_qkv(dtype=torch.bfloat16, layout="bshd")
    assert half(q).data_ptr() == q.data_ptr() and half(q).stride() == q.stride()
    turned = k.mT
    assert half(turned).stride(-1) == 1 and torch.equal(half(turned), turned)
    assert half(q.float()).dtype == torch.bfloat16 and torch.equal(half(q.float()), q)


def test_torch_compile_is_noticed():
    def shifted(x):
        return x + 1 if registry._is_recording(Geometry.of(x, x)) else x - 1

    x = torch.zeros(1, 1, 4, 8)
    assert torch.equal(shifted(x), x - 1)
    assert torch.equal(torch.compile(shifted, backend="eager")(x), x + 1)


# On a GPU.


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(registry, "_verified", set())
    monkeypatch.setattr(registry, "_demoted", {})


def need(name, q, k):
    """Skips where the backend says it cannot run."""
    reason = registry.reasons("dense_attention", Geometry.of(q, k))[name]
    if reason:
        pytest.skip(f"{name} {reason}")


@pytest.mark.gpu
@pytest.mark.parametrize("layout, nan_slack", [("bhsd", 0), ("bshd", 5)])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_the_definition_within_rounding(name, dtype, dim, layout, nan_slack):
    for length, keys in ((1, 1), (63, 63), (1000, 1000), (57, 1311)):
        for kind in KINDS:
            q, k, v = make_qkv(2, 3, keys, dim, kind=kind, dtype=dtype, device="cuda", layout=layout, nan_slack=nan_slack)
            q = q[:, :, :length]
            need(name, q, k)
            out, lse = dense_attention(q, k, v, backend=name)
            assert out.dtype == dtype and out.shape == q.shape and lse.dtype == torch.float32
            q16, k16, v16 = (half(x) for x in (q, k, v))  # what the backend computes with
            truth, true_lse = definition.dense_attention(q16.float(), k16.float(), v16.float(), dim**-0.5)
            plain = (q16 @ k16.mT * dim**-0.5).softmax(-1) @ v16
            assert_no_worse_than(out, truth, plain)
            torch.testing.assert_close(lse, true_lse, atol=2e-3, rtol=1e-5)
    assert registry.demotions() == () and registry._verified


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_strided_views_are_read_where_they_lie(name):
    """(B, S, H, D) views of one packed tensor: the call needs no memory beside its output and some statistics."""
    packed = torch.randn(1, 4096, 3, 8, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    need(name, q, k)
    dense_attention(q, k, v, backend=name)  # compiles, checks
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = dense_attention(q, k, v, backend=name)
    torch.cuda.synchronize()
    size = out.numel() * out.element_size()
    assert torch.cuda.max_memory_allocated() - before < 1.5 * size  # a copy of one input would be another 1.0


@pytest.mark.gpu
def test_auto_takes_the_first_that_can():
    q, k, v = make_qkv(1, 2, 1000, 128, dtype=torch.bfloat16, device="cuda")
    reasons = registry.reasons("dense_attention", Geometry.of(q, k))
    dense_attention(q, k, v)
    assert [key[1] for key in registry._verified] == [next(name for name, reason in reasons.items() if reason is None)]


@pytest.mark.gpu
def test_nothing_is_checked_inside_a_graph_capture():
    q, k, v = make_qkv(1, 2, 1000, 128, dtype=torch.bfloat16, device="cuda")
    expected = torch_dense.dense_attention(q, k, v, 0.125)  # warms up
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch_dense.dense_attention(q, k, v, 0.125)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out, _ = dense_attention(q, k, v, scale=0.125, backend="torch")
    graph.replay()
    assert torch.equal(out, expected[0]) and not registry._verified and registry.demotions() == ()
    dense_attention(q, k, v, scale=0.125, backend="torch")
    assert len(registry._verified) == 1


@pytest.mark.gpu
def test_running_out_of_memory_is_no_demotion():
    q = torch.randn(1, 32, 16384, 128, device="cuda", dtype=torch.bfloat16)  # 128 MiB
    dense_attention(q[:, :, :16000], q, q)  # compiles and checks
    torch.cuda.empty_cache()
    free = torch.cuda.memory_reserved() + (64 << 20)
    torch.cuda.set_per_process_memory_fraction(free / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            dense_attention(q, q, q)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert registry.demotions() == ()
    dense_attention(q, q, q)


LOST = """
import sys, torch
from types import ModuleType
from mc_sparse.kernels import dense_attention, registry
from mc_sparse.kernels.attention import reference
wild = ModuleType("mc_sparse.kernels._wild")
def compute(q, k, v, scale):
    result = reference.dense_attention(q, k, v, scale)
    torch.zeros(4, device="cuda")[torch.full((1,), 10**6, device="cuda")]  # an assertion of the device, noticed later
    return result
wild.NAME, wild.why_not, wild.dense_attention = "wild", lambda g: None, compute
sys.modules[wild.__name__] = wild
registry._CANDIDATES["dense_attention"] = (registry.Candidate("wild", "._wild"), *registry._CANDIDATES["dense_attention"])
try:
    dense_attention(*torch.randn(3, 1, 2, 300, 64, device="cuda", dtype=torch.bfloat16))
except RuntimeError as error:
    print(error, registry.demotions())
"""


@pytest.mark.gpu
def test_a_lost_device_names_the_backend():
    done = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, check=False)
    assert "the GPU stopped while backend wild ran" in done.stdout and done.stdout.rstrip().endswith("()"), done.stderr
