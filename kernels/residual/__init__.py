"""The residual R = O - O_sparse of an anchor, kept small until the next one."""
from __future__ import annotations

from torch import Tensor

from ..checks import check_bhsd
from ..dtypes import exact
from ..shapes import GROUP_SIZE
from .reference import FORMATS, Residual, compress, energy, error_energy, rank_of, size_of

__all__ = ["FORMATS", "Residual", "auto_residual", "compress_residual", "retained_energy"]

AUTO_FORMATS = ("rank-8", "rank-16", "int4", "bf16")


def compress_residual(r: Tensor, fmt: str) -> Residual:
    """r (B, H, G*C, D) in group order (`sparse_residual`), compressed. fmt: one of FORMATS or any "rank-<r>" with r >= 1."""
    _check("compress_residual", r, fmt)
    with exact(r):
        return compress(r, fmt)


def auto_residual(r: Tensor, o: Tensor, bound: float) -> Residual:
    """The smallest of rank-8, rank-16, int4 and bf16 with ||R - R'|| <= bound * ||O||; bf16 when none is within it (reads the device).

    r (B, H, G*C, D): residual in group order; o (B, H, S, D): dense output of the anchor. bound 0.01 changes the output by at most 1 %
    at the anchor.
    """
    _check("auto_residual", r, "bf16")
    if o.dim() != 4 or (*o.shape[:2], o.shape[3]) != (*r.shape[:2], r.shape[3]):
        raise ValueError(f"auto_residual: o is {tuple(o.shape)}, r {tuple(r.shape)}; they must agree in B, H and D")
    if not bound >= 0:
        raise ValueError(f"auto_residual: bound is {bound}; needed is a share of the output, 0.01 for 1 %")
    by_size = sorted(AUTO_FORMATS, key=lambda fmt: size_of(fmt, r.shape))
    with exact(r):
        allowed = bound**2 * energy(o)
        for fmt in by_size[: by_size.index("bf16")]:
            kept = compress(r, fmt)
            if error_energy(r, kept) <= allowed:
                return kept
        return compress(r, "bf16")


def retained_energy(r: Tensor, residual: Residual) -> float:
    """1 - ||R - R'||^2 / ||R||^2, 1.0 for R = 0 (reads the device)."""
    _check("retained_energy", r, residual.format)
    if tuple(r.shape) != tuple(residual.shape):
        raise ValueError(f"retained_energy: r is {tuple(r.shape)}, the compressed residual {tuple(residual.shape)}; they must agree")
    with exact(r):
        total = energy(r)
        return 1.0 - error_energy(r, residual) / total if total else 1.0


def _check(op: str, r: Tensor, fmt: str) -> None:
    check_bhsd(op, r=r)
    if r.shape[2] % GROUP_SIZE:
        raise ValueError(f"{op}: r has {r.shape[2]} rows; needed are whole groups of {GROUP_SIZE}, in group order (sparse_residual)")
    if fmt not in FORMATS and rank_of(fmt) is None:
        raise ValueError(f"{op}: format {fmt!r} is unknown; choose one of {', '.join(FORMATS)}, or rank-<r> with r >= 1")
