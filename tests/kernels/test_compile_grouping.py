"""The grouping kernels compiled for every supported card: registers suffice, shared memory fits."""
import pytest

from mc_sparse.kernels.grouping import triton_pddp
from mc_sparse.kernels.triton_compile import SHARED_LIMIT, TARGETS, compile_for
from mc_sparse.kernels.triton_support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels cannot be compiled")

POINTERS = {"q": "*bf16", "order": "*i32", "out": "*i32", "keys": "*i32", "gram": "*fp32", "total": "*fp32", "axis": "*fp32"}
STRIDES = ("stride_b", "stride_h", "stride_s")
KERNELS = ("moments", "direction", "project", "partition", "split")


def compiled(name: str, target: int, head_dim: int):
    """Report of kernel `name` as it is launched for contiguous bfloat16 queries of head_dim on sm_<target>."""
    kernel = getattr(triton_pddp, f"_{name}")
    constants, options = triton_pddp.parameters(name, head_dim, divmod(target, 10))
    constants |= {"C": triton_pddp.GROUP_SIZE} | ({"D": head_dim, "EXACT": True} if "D" in kernel.arg_names else {})
    signature = {k: "i32" for k in kernel.arg_names if k not in constants}
    signature |= {k: f"{v}:16" for k, v in POINTERS.items() if k in signature} | {k: "i32:16" for k in STRIDES if k in signature}
    return compile_for(target, kernel, signature, constants, options.pop("num_warps"), options.pop("num_stages"), **options)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_fit_every_card(name, target, head_dim):
    report = compiled(name, target, head_dim)
    assert report.stack == 0
    assert report.shared <= SHARED_LIMIT[target]
