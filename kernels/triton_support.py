"""What the Triton backends share: whether they can run, and the dtypes and strides they take."""
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .dtypes import half as half
from .shapes import Geometry

NAME = "triton"
# First release whose compiler was tried; older ones miscompile or lack what the kernels use.
OLDEST = (3, 2)
MOST_HEAD_DIM = 256
INTERPRETED = triton.knobs.runtime.interpret if hasattr(triton, "knobs") else False
VERSION = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])
if VERSION < OLDEST:  # before a kernel asks it for what it does not know
    raise ImportError(f"needs Triton {OLDEST[0]}.{OLDEST[1]} or newer, this is {triton.__version__}")


def needs_fence(capability: tuple[int, int] | None) -> bool:
    """Whether kernels must order cp.async before wgmma themselves (`fence`): on Hopper, before Triton 3.7 (its change 9610)."""
    return not INTERPRETED and capability is not None and capability[0] == 9 and VERSION < (3, 7)


_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def operand(x):
    """x for tl.dot: as it is, but float32 in the interpreter, which multiplies no bfloat16."""
    if _INTERPRETED:
        x = x.to(tl.float32)
    return x


@triton.jit
def popcount(x):
    """Set bits of each int32."""
    if _INTERPRETED:  # it knows no assembly
        x -= (x >> 1) & 0x55555555
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        x += x >> 8
        count = (x + (x >> 16)) & 0x3F
    else:
        count = tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    return count


@triton.jit
def fence(x):
    """Makes what cp.async wrote visible to wgmma. x: an int32 tensor that the same loop step loaded, so that the wait comes before.

    To be called first in a pipelined loop whose loads feed tl.dot, under a constexpr from `needs_fence`. Without it such loops give wrong
    results now and then (seen on an H200 with Triton 3.6).
    """
    tl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta; "
        "mov.b32 $0, $8; mov.b32 $1, $9; mov.b32 $2, $10; mov.b32 $3, $11; "
        "mov.b32 $4, $12; mov.b32 $5, $13; mov.b32 $6, $14; mov.b32 $7, $15;",
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r", [x], dtype=tl.int32, is_pure=False, pack=8,
    )  # fmt: skip


def why_not(geometry: Geometry) -> str | None:
    """None when Triton kernels can run this geometry: CUDA from Ampere on, or the CPU under TRITON_INTERPRET=1."""
    if geometry.head_dim > MOST_HEAD_DIM:
        return f"takes head dims up to {MOST_HEAD_DIM}, not {geometry.head_dim}"
    if INTERPRETED:
        return None if geometry.device_type == "cpu" else "is interpreted on the CPU (TRITON_INTERPRET)"
    if geometry.device_type != "cuda" or geometry.capability is None:
        return f"runs on NVIDIA GPUs, not on {geometry.device_type}"
    if torch.version.hip:
        return "is not tried on AMD GPUs"
    if geometry.capability < (8, 0):
        return "needs compute capability 8.0 (Ampere) or newer"
    return None


def padded(head_dim: int) -> int:
    """The power of two, at least 16, that a head dim is computed in."""
    return max(16, 1 << (head_dim - 1).bit_length())
