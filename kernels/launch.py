"""Launch parameters of the Triton kernels: one pure function of what is known before a launch."""
from __future__ import annotations

from typing import NamedTuple


class Launch(NamedTuple):
    """tile: rows of the streamed operand in one step of the inner loop; warps of a program; stages of its load pipeline;
    registers: most per thread, None for the compiler's choice; queries: of a group in one program, where that is not always 128."""

    tile: int
    warps: int
    stages: int
    registers: int | None = None
    queries: int = 128

    @property
    def options(self) -> dict[str, int]:
        """As keyword arguments of a Triton launch."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


# Cards by what decides: "hopper" (wgmma, 227 KB of shared memory), "wide" (mma.sync, 163 KB or more: A100, B200), "narrow" (99 KB:
# RTX 30, 40, 50, L4, L40).
_CARDS = ("hopper", "wide", "narrow")
_TABLE: dict[str, dict[tuple[int, str], Launch]] = {
    "sparse": {(64, "hopper"): Launch(64, 4, 3), (64, "wide"): Launch(64, 8, 3), (64, "narrow"): Launch(64, 8, 3)}
    | {(128, "hopper"): Launch(64, 4, 3), (128, "wide"): Launch(64, 8, 3), (128, "narrow"): Launch(64, 8, 3)}
    | {(256, "hopper"): Launch(64, 8, 2, queries=64), (256, "wide"): Launch(32, 8, 2, queries=64)}
    | {(256, "narrow"): Launch(16, 8, 2, queries=64)},
    "sparse_online": {(64, "hopper"): Launch(64, 4, 3), (64, "wide"): Launch(64, 8, 3), (64, "narrow"): Launch(64, 8, 3)}
    | {(128, "hopper"): Launch(64, 8, 3, 128), (128, "wide"): Launch(64, 8, 3), (128, "narrow"): Launch(64, 8, 3)}
    | {(256, "hopper"): Launch(64, 8, 2, queries=64), (256, "wide"): Launch(32, 8, 2, queries=64)}
    | {(256, "narrow"): Launch(16, 8, 2, queries=64)},
    # One byte for the queries' and keys' products.
    "sparse_low": {(64, "hopper"): Launch(64, 4, 3), (64, "wide"): Launch(64, 8, 3), (64, "narrow"): Launch(64, 8, 3)}
    | {(128, "hopper"): Launch(64, 4, 3), (128, "wide"): Launch(64, 8, 3), (128, "narrow"): Launch(64, 8, 3)}
    | {(256, "hopper"): Launch(64, 8, 2, queries=64), (256, "wide"): Launch(32, 8, 2, queries=64)}
    | {(256, "narrow"): Launch(32, 8, 2, queries=64)},
    "sparse_low_online": {(64, "hopper"): Launch(64, 8, 3), (64, "wide"): Launch(64, 8, 3), (64, "narrow"): Launch(64, 8, 3)}
    | {(128, "hopper"): Launch(64, 8, 3), (128, "wide"): Launch(64, 8, 3), (128, "narrow"): Launch(64, 8, 3)}
    | {(256, "hopper"): Launch(64, 8, 2, queries=64), (256, "wide"): Launch(32, 8, 2, queries=64)}
    | {(256, "narrow"): Launch(32, 8, 2, queries=64)},
    # queries 256: two groups a program, and two programs to an SM. With 232 registers ptxas puts the exponentials beside the products;
    # without a limit it does not.
    "mass": {(64, "hopper"): Launch(64, 4, 3, 232, 256), (64, "wide"): Launch(64, 4, 3), (64, "narrow"): Launch(64, 4, 3)}
    | {(128, "hopper"): Launch(64, 4, 3, 232, 256), (128, "wide"): Launch(64, 4, 3), (128, "narrow"): Launch(64, 4, 3)}
    | {(256, "hopper"): Launch(64, 4, 3), (256, "wide"): Launch(64, 8, 3), (256, "narrow"): Launch(32, 8, 2)},
    "lagged": {(64, "hopper"): Launch(64, 4, 3), (64, "wide"): Launch(64, 4, 3), (64, "narrow"): Launch(64, 8, 3)}
    | {(128, "hopper"): Launch(64, 8, 3), (128, "wide"): Launch(32, 8, 3), (128, "narrow"): Launch(32, 8, 2)},
    # Choice of the heaviest; tile: units in the sample, of a program, of a step.
    "bracket": {(64, c): Launch(4096, 8, 1) for c in _CARDS},
    "divide": {(64, c): Launch(2048, 4, 1) for c in _CARDS},
    "heaviest": {(64, c): Launch(1024, 8, 1) for c in _CARDS},
    "pddp_moments": {(d, c): Launch(64, 4 if d == 64 else 8, 3) for d in (64, 128) for c in _CARDS},
    "pddp_direction": {(d, c): Launch(1, 4 if d == 64 else 8, 1, 168) for d in (64, 128) for c in _CARDS},
    "pddp_project": {(d, c): Launch(128, 4, 1) for d in (64, 128) for c in _CARDS},
    "pddp_partition": {(d, c): Launch(4096, 16, 1) for d in (64, 128) for c in _CARDS},
    # 128 registers: two programs of 8 warps to an SM. On sm_120 ptxas would spill for that, so not on the narrow ones.
    "pddp_split": {(64, c): Launch(64, 4, 3, r) for c, r in zip(_CARDS, (128, 128, None), strict=True)}
    | {(128, c): Launch(64, 8, 3, r) for c, r in zip(_CARDS, (128, 128, None), strict=True)}
    | {(256, c): Launch(32, 8, 2) for c in _CARDS},
}


def card(capability: tuple[int, int] | None) -> str:
    """None (the interpreter) counts as "narrow"."""
    if capability is None:
        return "narrow"
    return {(9, 0): "hopper", (8, 0): "wide", (10, 0): "wide", (10, 3): "wide"}.get(tuple(capability), "narrow")


def launch(kernel: str, head_dim: int, capability: tuple[int, int] | None) -> Launch:
    """Parameters of `kernel` for a head dim padded to a power of two (16 to 256)."""
    table = _TABLE[kernel]
    return table[max(64, head_dim), card(capability)]
