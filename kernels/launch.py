"""Launch parameters of the Triton kernels: one pure function of what is known before a launch."""
from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """tile: rows of the streamed operand in one step of the inner loop; warps of a program; stages of its load pipeline."""

    tile: int
    warps: int
    stages: int


# Cards by what decides: "hopper" (wgmma, 227 KB of shared memory), "wide" (mma.sync, 163 KB or more: A100, B200), "narrow" (99 KB:
# RTX 30, 40, 50, L4, L40).
_TABLE: dict[str, dict[tuple[int, str], Launch]] = {}


def card(capability: tuple[int, int] | None) -> str:
    """None (the interpreter) counts as "narrow"."""
    if capability is None:
        return "narrow"
    return {(9, 0): "hopper", (8, 0): "wide", (10, 0): "wide", (10, 3): "wide"}.get(tuple(capability), "narrow")


def launch(kernel: str, head_dim: int, capability: tuple[int, int] | None) -> Launch:
    """Parameters of `kernel` for a head dim padded to a power of two (16 to 256)."""
    table = _TABLE[kernel]
    return table[max(64, head_dim), card(capability)]
