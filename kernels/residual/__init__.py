"""The residual R = O - O_sparse of an anchor, kept small until the next one."""
from __future__ import annotations

from torch import Tensor

from ..checks import check_bhsd, check_groups
from ..shapes import QueryGroups
from .reference import FORMATS, Residual, compress, error_energy, rank_of, size_of

__all__ = ["FORMATS", "Residual", "auto_residual", "compress_residual", "retained_energy"]

AUTO_FORMATS = ("rank-8", "rank-16", "int4", "bf16")


def compress_residual(r: Tensor, groups: QueryGroups, fmt: str) -> Residual:
    """r (B, H, S, D), in token order, compressed in group order. fmt: one of FORMATS or any "rank-<r>" with r >= 1."""
    _check("compress_residual", r, groups, fmt)
    return compress(r, groups, fmt)


def auto_residual(r: Tensor, groups: QueryGroups, o: Tensor, bound: float) -> Residual:
    """The smallest of rank-8, rank-16, int4 and bf16 with ||R - R'|| <= bound * ||O||; bf16 when none is within it (reads the device).

    r and o (B, H, S, D): residual and dense output of the anchor. bound 0.01 changes the output by at most 1 % at the anchor.
    """
    _check("auto_residual", r, groups, "bf16")
    if o.shape != r.shape:
        raise ValueError(f"auto_residual: o is {tuple(o.shape)}, r {tuple(r.shape)}; they must agree")
    allowed = bound**2 * _energy(o)
    by_size = sorted(AUTO_FORMATS, key=lambda fmt: size_of(fmt, r.shape, groups.order.shape[-1]))
    for fmt in by_size[: by_size.index("bf16")]:
        kept = compress(r, groups, fmt)
        if error_energy(r, groups, kept) <= allowed:
            return kept
    return compress(r, groups, "bf16")


def retained_energy(r: Tensor, groups: QueryGroups, residual: Residual) -> float:
    """1 - ||R - R'||^2 / ||R||^2, 1.0 for R = 0 (reads the device)."""
    _check("retained_energy", r, groups, residual.format)
    total = _energy(r)
    return 1.0 - error_energy(r, groups, residual) / total if total else 1.0


def _energy(x: Tensor) -> float:
    """Sum of squares, a head at a time so that no float32 copy of x is made."""
    return sum(float(head.float().square().sum()) for row in x for head in row)


def _check(op: str, r: Tensor, groups: QueryGroups, fmt: str) -> None:
    check_bhsd(op, r=r)
    check_groups(op, groups, r)
    if fmt not in FORMATS and rank_of(fmt) is None:
        raise ValueError(f"{op}: format {fmt!r} is unknown; choose one of {', '.join(FORMATS)}, or rank-<r> with r >= 1")
