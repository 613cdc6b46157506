"""What the compiler makes of the selection kernels, for cards that are not here."""
import pytest

from mc_sparse.kernels.launch import launch
from mc_sparse.kernels.triton_support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels cannot be compiled")
triton_compile = pytest.importorskip("mc_sparse.kernels.triton_compile")
from mc_sparse.kernels.selection import triton_heaviest, triton_lagged, triton_select  # noqa: E402

STRIDES = ("q_batch", "q_head", "q_token", "k_batch", "k_head", "k_token", "members_batch", "members_head")
CAPABILITY = {target: divmod(target, 10) for target in triton_compile.TARGETS}


def mass(target, head_dim, dtype="bf16", described=None, polynomial=0):
    """Compiled as it runs on the card, but for the given variant."""
    chosen = launch("mass", head_dim, CAPABILITY[target])
    described = target == 90 if described is None else described
    pointers = {name: f"*{kind}:16" for name, kind in dict(q=dtype, k=dtype, lse="fp32", members="i32", keys="i32", mass="fp32").items()}
    if described:
        pointers["k"] = f"tensordesc<{dtype}[1, 1, {chosen.tile}, {head_dim}]>"
    numbers = dict.fromkeys(("first_row", "heads", "groups", "q_length", "k_length"), "i32") | {"width": "i32:16", "scale": "fp32"}
    constants = {"D": head_dim, "D_PADDED": head_dim, "TILE": chosen.tile, "DESCRIBED": described, "POLYNOMIAL": polynomial}
    limit = {} if chosen.registers is None else {"maxnreg": chosen.registers}
    signature = pointers | numbers | dict.fromkeys(STRIDES, "i32:16")
    return triton_compile.compile_for(target, triton_select.mass_kernel, signature, constants, chosen.warps, chosen.stages, **limit)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("target", triton_compile.TARGETS)
def test_masses(target, head_dim):
    """No spills, 16-byte asynchronous loads of K, tensor cores, and one exponential a score."""
    report = mass(target, head_dim)
    assert report.stack == 0 and report.shared <= triton_compile.SHARED_LIMIT[target]
    chosen = launch("mass", head_dim, CAPABILITY[target])
    assert report.count(r"MUFU\.EX2") == chosen.tile * 128 // (32 * chosen.warps)
    if target == 90:
        assert report.count("HGMMA") > 0 and report.count("UTMALDG") > 0
    else:
        assert report.count("HMMA") > 0 and report.count(r"LDGSTS\S*128") > 0


def test_masses_on_hopper_otherwise():
    """float16; some exponentials as polynomials."""
    assert mass(90, 128, "fp16").count("HGMMA") > 0
    mixed = mass(90, 128, polynomial=2)
    assert mixed.stack == 0 and mixed.count(r"MUFU\.EX2") == 48


@pytest.mark.parametrize("per_bit, kept", [(1, False), (32, True)])
@pytest.mark.parametrize("target", triton_compile.TARGETS)
def test_heaviest(target, per_bit, kept):
    chosen = launch("heaviest", 64, CAPABILITY[target])
    pointers = dict(masses="fp32", candidates="i32", always="i8", order="i64", bits="i32", counts="i32", retained="fp32")
    constants = {"PER_BIT": per_bit, "KEPT": kept, "SAMPLE": chosen.tile, "ROOM": triton_heaviest.ROOM * chosen.tile}
    if not kept:
        del pointers["always"]
        constants["always"] = None
    numbers = dict.fromkeys(("first_row", "units", "keys", "budget", "step", "rank_low", "rank_high"), "i32") | {"width": "i32:16"}
    signature = {name: f"*{kind}:16" for name, kind in pointers.items()} | numbers
    report = triton_compile.compile_for(target, triton_heaviest.heaviest_kernel, signature, constants, chosen.warps, chosen.stages)
    assert report.stack == 0 and report.shared <= triton_compile.SHARED_LIMIT[target]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("target", triton_compile.TARGETS)
def test_lagged(target, head_dim):
    """The pass that computes output and masses, and the rare one that corrects an lse, neither with spills."""
    chosen = launch("lagged", head_dim, CAPABILITY[target])
    described = target == 90
    pointers = dict(q="bf16", k="bf16", v="bf16", weights="fp32", members="i32", keys="i32", mass="fp32", out="bf16", lse="fp32", far="i8")
    signature = {name: f"*{kind}:16" for name, kind in pointers.items()}
    if described:
        signature["k"] = signature["v"] = f"tensordesc<bf16[1, 1, {chosen.tile}, {head_dim}]>"
    signature |= dict.fromkeys(("first_row", "heads", "groups", "q_length", "k_length"), "i32") | {"width": "i32:16", "scale": "fp32"}
    signature |= dict.fromkeys((*STRIDES, "v_batch", "v_head", "v_token", "out_batch", "out_head", "out_token"), "i32:16")
    constants = {"D": head_dim, "D_PADDED": head_dim, "TILE": chosen.tile, "DESCRIBED": described}
    attend = {"LIFT": 0, "AGAIN": True, "out_column": 1}
    kernels = {triton_lagged.lagged_kernel: constants | attend, triton_lagged.correct_kernel: constants | {"REACH": 60}}
    for kernel, values in kernels.items():
        types = {name: signature[name] for name in kernel.arg_names if name in signature}
        report = triton_compile.compile_for(target, kernel, types, values, chosen.warps, chosen.stages)
        assert report.stack == 0 and report.shared <= triton_compile.SHARED_LIMIT[target]
        assert report.count("HGMMA" if described else "HMMA") > 0
        assert report.count("UTMALDG" if described else r"LDGSTS\S*128") > 0
