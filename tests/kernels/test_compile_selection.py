"""What the compiler makes of the selection kernels, for cards that are not here."""
import re

import pytest

from mc_sparse.kernels.launch import launch
from mc_sparse.kernels.triton_support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels cannot be compiled")
triton_compile = pytest.importorskip("mc_sparse.kernels.triton_compile")
from mc_sparse.kernels.selection import triton_heaviest, triton_lagged, triton_select  # noqa: E402

STRIDES = ("q_batch", "q_head", "q_token", "members_batch", "members_head")
NUMBERS = ("first_program", "first_row", "first_head", "heads", "groups", "q_length", "k_length")
CAPABILITY = {target: divmod(target, 10) for target in triton_compile.TARGETS}


def signature(kernel, head_dim, tile, described, dtype="bf16"):
    """Types of a mass kernel's arguments, those of them that `kernel` has."""
    pointers = dict(q=dtype, k=dtype, v=dtype, lse="fp32", weights="fp32", members="i32", mass="fp32", out=dtype, far="i8")
    types = {name: f"*{kind}:16" for name, kind in pointers.items()}
    if described:
        types["k"] = types["v"] = f"tensordesc<{dtype}[{tile}, {head_dim}]>"
    types |= dict.fromkeys(NUMBERS, "i32") | {"width": "i32:16", "scale": "fp32"}
    types |= dict.fromkeys((*STRIDES, "out_batch", "out_head", "out_token"), "i32:16")
    return {name: types[name] for name in kernel.arg_names if name in types}


def compile_as(chosen, target, kernel, types, constants):
    limit = {} if chosen.registers is None else {"maxnreg": chosen.registers}
    return triton_compile.compile_for(target, kernel, types, constants, chosen.warps, chosen.stages, **limit)


def mass(target, head_dim, dtype="bf16", per_bit=1):
    """Compiled as it runs on the card."""
    chosen, described = launch("mass", head_dim, CAPABILITY[target]), triton_select.described(CAPABILITY[target])
    constants = {"D": head_dim, "D_PADDED": head_dim, "TILE": chosen.tile, "PER_BIT": per_bit, "DESCRIBED": described}
    constants |= {"PAIR": chosen.queries == 256}
    types = signature(triton_select.mass_kernel, head_dim, chosen.tile, described, dtype)
    return compile_as(chosen, target, triton_select.mass_kernel, types, constants)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("target", triton_compile.TARGETS)
def test_masses(target, head_dim):
    """No spills, 16-byte asynchronous loads of K, tensor cores, and one exponential a score."""
    report = mass(target, head_dim)
    assert report.stack == 0 and report.shared <= triton_compile.SHARED_LIMIT[target]
    chosen = launch("mass", head_dim, CAPABILITY[target])
    assert report.count(r"MUFU\.EX2") == chosen.tile * chosen.queries // (32 * chosen.warps)
    if target == 90:
        assert report.count("HGMMA") > 0 and report.count("UTMALDG") > 0
    else:
        assert report.count("HMMA") > 0 and report.count(r"LDGSTS\S*128") > 0


@pytest.mark.parametrize("per_bit", [1, 32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_exponentials_run_beside_the_products_on_hopper(head_dim, per_bit):
    """Most of them stand between the issue of a product and the wait for it, products are not serialised, and two programs fit an SM."""
    report = mass(90, head_dim, per_bit=per_bit)
    assert report.stack == 0 and 2 * (report.shared + 1024) <= 228 << 10
    waits, beside, in_flight = 0, 0, False
    for name in re.findall(r"WARPGROUP\.ARRIVE|WARPGROUP\.DEPBAR|MUFU\.EX2", report.sass):
        waits += name == "WARPGROUP.DEPBAR"
        in_flight = name == "WARPGROUP.ARRIVE" or (in_flight and name == "MUFU.EX2")
        beside += in_flight and name == "MUFU.EX2"
    assert waits == 2
    assert beside >= 0.6 * report.count(r"MUFU\.EX2")


def test_masses_on_hopper_otherwise():
    """float16; large heads."""
    assert mass(90, 128, "fp16").count("HGMMA") > 0
    assert mass(90, 256).stack == 0


def choice(target, name, per_bit, kept, times=1):
    """Compiled as it runs on the card; times 2: for long rows."""
    kernel = getattr(triton_heaviest, f"{name}_kernel")
    launches = triton_heaviest.Launches(*(launch(n, 64, CAPABILITY[target]) for n in triton_heaviest.Launches._fields))
    room = times * triton_heaviest.ROOM * launches.bracket.tile
    chosen = getattr(launches, name)
    chosen = chosen._replace(tile=times * chosen.tile, warps=times * chosen.warps)
    constants = {"PER_BIT": per_bit, "KEPT": kept, "SAMPLE": chosen.tile, "ROOM": room, "BLOCK": chosen.tile}
    if not kept:
        constants["always"] = None
    constants = {n: value for n, value in constants.items() if n in kernel.arg_names}
    pointers = dict(masses="fp32", always="i8", order="i64", found="i32", candidates="i64", sums="fp32")
    types = dict.fromkeys(kernel.arg_names, "i32") | {"width": "i32:16"}
    types |= {n: f"*{kind}:16" for n, kind in (pointers | dict(bits="i32", counts="i32", retained="fp32")).items()}
    return compile_as(chosen, target, kernel, {n: types[n] for n in kernel.arg_names if n not in constants}, constants)


@pytest.mark.parametrize("per_bit, kept", [(1, False), (32, True)])
@pytest.mark.parametrize("target", triton_compile.TARGETS)
def test_choice(target, per_bit, kept):
    """No spills; also with the sample doubled, as for long rows."""
    for name, times in (("bracket", 1), ("bracket", 2), ("divide", 1), ("heaviest", 1), ("heaviest", 2)):
        report = choice(target, name, per_bit, kept, times)
        assert report.stack == 0 and report.shared <= triton_compile.SHARED_LIMIT[target], name


@pytest.mark.parametrize("target", triton_compile.TARGETS)
def test_masses_are_divided_where_they_were_loaded(target):
    """16 bytes a load, and a candidate is stored by the thread that has it: shared memory is for what is counted."""
    chosen = launch("divide", 64, CAPABILITY[target])
    report = choice(target, "divide", 1, False)
    each = chosen.tile // (32 * chosen.warps)
    assert report.count(r"LDG\S*\.128") == each // 4 and report.count(r"STG\S*\.64") == each
    assert report.shared <= chosen.tile // 8


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("target", triton_compile.TARGETS)
def test_lagged(target, head_dim):
    """The pass that computes output and masses, and the rare one that corrects an lse, neither with spills."""
    chosen, described = launch("lagged", head_dim, CAPABILITY[target]), triton_select.described(CAPABILITY[target])
    constants = {"D": head_dim, "D_PADDED": head_dim, "TILE": chosen.tile, "DESCRIBED": described}
    attend = {"PER_BIT": 1, "LIFT": 0, "AGAIN": True, "out_column": 1}
    kernels = {triton_lagged.lagged_kernel: constants | attend, triton_lagged.correct_kernel: constants | {"REACH": 60}}
    for kernel, values in kernels.items():
        types = signature(kernel, head_dim, chosen.tile, described)
        report = compile_as(chosen, target, kernel, types, values)
        assert report.stack == 0 and report.shared <= triton_compile.SHARED_LIMIT[target]
        assert report.count("HGMMA" if described else "HMMA") > 0
        assert report.count("UTMALDG" if described else r"LDGSTS\S*128") > 0
