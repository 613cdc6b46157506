"""Formats of a residual, each with what it stores and how far its values are from R.

x is a value of R, x' what comes back.

    bf16    values                                         |x - x'| <= 2^-8 |x| (half of that by rounding to nearest)
    fp8     e4m3 values, one fp16 scale s per row          |x - x'| <= max(2^-4 |x|, 2^-10 s) (1 + 2^-9), s = row's largest |x| / 448
    int4    -7..7, one fp16 scale s per 32 values          |x - x'| <= s / 2 (1 + 2^-7), s = their largest |x| / 7
    int2    +-0.45 m, +-1.7 m, fp16 m per 32 values        |x - x'| <= max(0.65 m, |x| - 1.7 m) (1 + 2^-9), m = their mean |x|
    rank-r  V (r, D) orthonormal rows, U = R V^T, bf16     ||R - R'|| <= sqrt(energy outside the top r directions) + 2^-6 ||R||, per head

The levels of int2 are the best four for normally distributed values, near 1.05 m as the boundary (Max 1960). fp16 scales hold
up to 65504 and down to 6e-8: values far outside that range are clipped or become 0.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..chunks import chunks
from ..shapes import ceil_div

FORMATS = ("bf16", "fp8", "int4", "int2", "rank-8", "rank-16", "rank-32")
SCALE_RUN = 32  # values along D that share a scale
FP8_MAX, FP16_MAX = 448.0, 65504.0
INT2_INNER, INT2_OUTER, INT2_BOUNDARY = 0.45, 1.7, 1.05
# Subspace iterations, each a product with the Gram matrix, on r + OVERSAMPLING columns.
SUBSPACE_ITERATIONS, OVERSAMPLING = 6, 8
GRAM_PARTS = 16  # of the rows of a head (it divides a group): one long sum would leave a GPU idle


@dataclass(frozen=True, eq=False)
class Residual:
    """A compressed residual in group order, shape (B, H, G*C, D); rows past the last query are 0.

    payload by format, every tensor beginning (B, H, ...), D' = D rounded up to 32:
    bf16: (values (G*C, D)); fp8: (values (G*C, D) float8_e4m3fn, scales (G*C, 1)); int4: (two values a byte (G*C, D'/2) uint8,
    low half first, offset by 8; scales (G*C, D'/32)); int2: (four values a byte (G*C, D'/4) uint8, lowest bits first: bit 1 the sign,
    bit 0 the outer level; scales (G*C, D'/32)); rank-r: (U (G*C, r) bfloat16, V (r, D) bfloat16). Scales are float16.
    """

    format: str
    payload: tuple[Tensor, ...]
    shape: tuple[int, int, int, int]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.payload)

    def expand(self, b: int, h: int | slice) -> Tensor:
        """Row b, head h in group order, (G*C, D) float32; (heads, G*C, D) for a slice of heads."""
        parts = [t[b, h] for t in self.payload]
        if rank_of(self.format) is not None:
            return parts[0].float() @ parts[1].float()
        return _DECODE[self.format](*parts)[..., : self.shape[3]]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Residual:
        return replace(self, payload=tuple(t.to(device, non_blocking=non_blocking) for t in self.payload))


def rank_of(fmt: str) -> int | None:
    """r of "rank-<r>", None for other formats."""
    name, _, rank = fmt.partition("-")
    return int(rank) if name == "rank" and rank.isdecimal() and int(rank) > 0 else None


def size_of(fmt: str, shape: torch.Size) -> int:
    """Bytes that `compress` will need for R of `shape` (B, H, G*C, D)."""
    batch, heads, rows, dim = shape
    runs = ceil_div(dim, SCALE_RUN)
    rank = min(rank_of(fmt) or 0, dim)
    per_row = {"bf16": 2 * dim, "fp8": dim + 2, "int4": 18 * runs, "int2": 10 * runs}.get(fmt, 2 * rank)
    return batch * heads * (rows * per_row + 2 * rank * dim)


def compress(r: Tensor, fmt: str) -> Residual:
    """Some heads at a time; a rank above D is stored as D."""
    rank = rank_of(fmt)
    if rank is not None:
        return _compress_rank(r, fmt, min(rank, r.shape[3]))
    rows = []
    for row in r:
        encoded = [_ENCODE[fmt](row[some].float()) for some in _heads_at_once(r)]
        rows.append([torch.cat(part) for part in zip(*encoded, strict=True)])
    return Residual(fmt, tuple(torch.stack(part) for part in zip(*rows, strict=True)), tuple(r.shape))


def _compress_rank(r: Tensor, fmt: str, rank: int) -> Residual:
    """All heads' directions are found together: many small matrices cost a GPU little more than one."""
    gram = torch.cat([_gram(row[some]) for row in r for some in _heads_at_once(r)])
    directions = top_directions(gram, rank).bfloat16().contiguous().unflatten(0, r.shape[:2])
    u = torch.empty((*r.shape[:3], rank), dtype=torch.bfloat16, device=r.device)
    for b, row in enumerate(r):
        for some in _heads_at_once(r):
            u[b, some] = row[some] @ directions[b, some].to(r.dtype).mT
    return Residual(fmt, (u, directions), tuple(r.shape))


def energy(x: Tensor) -> float:
    """Sum of squares of x (B, H, n, D)."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64).square())


def error_energy(r: Tensor, residual: Residual) -> float:
    """||R - R'||^2."""
    error = r.new_zeros((), dtype=torch.float64)
    for b, row in enumerate(r):
        for some in _heads_at_once(r):
            if rank_of(residual.format) is None:
                difference = row[some].float() - residual.expand(b, some)
            else:
                difference = torch.baddbmm(row[some], *(t[b, some].to(r.dtype) for t in residual.payload), alpha=-1)
            error += torch.linalg.vector_norm(difference, dtype=torch.float64).square()
    return float(error)


def _heads_at_once(x: Tensor) -> Iterator[slice]:
    return chunks(x.shape[1], 4 * x.shape[2] * x.shape[3], x.device)


def top_directions(gram: Tensor, rank: int) -> Tensor:
    """Orthonormal rows (n, rank, D) near the top eigenvectors of symmetric gram (n, D, D), by subspace iteration.

    The start is one fixed random basis, so the result is the same on every call. Between products the columns are made orthonormal
    by a Cholesky factor, which GPUs compute 40 times faster than QR (once, at the end) or an eigendecomposition of gram.
    """
    dim = gram.shape[2]
    width = min(dim, rank + OVERSAMPLING)
    start = torch.randn(dim, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    basis = start.to(gram.device).expand(len(gram), -1, -1)
    gram = gram.double().nan_to_num()  # a residual that is no number has no directions, but must not stop the run
    gram = gram / gram.abs().amax((1, 2), keepdim=True).clamp_min(torch.finfo(gram.dtype).tiny)
    for _ in range(SUBSPACE_ITERATIONS):
        basis = gram @ basis
        inner = basis.mT @ basis
        diagonal = inner.diagonal(dim1=1, dim2=2)
        diagonal += 1e-13 * diagonal.sum(1, keepdim=True) + torch.finfo(gram.dtype).tiny  # columns may depend on each other, or be 0
        factor = torch.linalg.cholesky_ex(inner).L
        basis = torch.linalg.solve_triangular(factor, basis.mT, upper=False).mT
    basis = torch.linalg.qr(basis).Q
    within = torch.linalg.eigh(basis.mT @ gram @ basis).eigenvectors  # ascending
    return (basis @ within.flip(2)[..., :rank]).mT.float()


def _gram(x: Tensor) -> Tensor:
    """x^T x of each head of x (heads, n, D), float32, up to a factor."""
    if x.dtype != torch.float32 and x.device.type == "cuda" and hasattr(torch.ops.aten.bmm, "dtype"):  # since PyTorch 2.8
        parts = x.unflatten(1, (GRAM_PARTS, -1)).flatten(0, 1)
        return torch.bmm(parts.mT, parts, out_dtype=torch.float32).unflatten(0, (-1, GRAM_PARTS)).sum(1)
    x = x.float()
    x = x / x.abs().amax((1, 2), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)  # squares of any float32 values stay in range
    parts = x.unflatten(1, (GRAM_PARTS, -1))
    return (parts.mT @ parts).sum(1)


def _in_runs(x: Tensor) -> Tensor:
    """(..., D) -> (..., D'/32, 32), zero padded."""
    runs = ceil_div(x.shape[-1], SCALE_RUN)
    return pad(x, (0, runs * SCALE_RUN - x.shape[-1])).unflatten(-1, (runs, SCALE_RUN))


def _scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as fp16 scale, and a divisor that is never 0."""
    stored = x.clamp_max(FP16_MAX).half()
    divisor = stored.float()
    return stored, torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def _encode_bf16(x: Tensor) -> tuple[Tensor]:
    return (x.bfloat16(),)


def _decode_bf16(values: Tensor) -> Tensor:
    return values.float()


def _encode_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    stored, divisor = _scale(x.abs().amax(-1, keepdim=True) / FP8_MAX)
    return (x / divisor).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), stored


def _decode_fp8(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * scales.float()


def _encode_int4(x: Tensor) -> tuple[Tensor, Tensor]:
    runs = _in_runs(x)
    stored, divisor = _scale(runs.abs().amax(-1, keepdim=True) / 7)
    levels = ((runs / divisor).round_().clamp_(-7, 7) + 8).to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2))
    return levels[..., 0] | levels[..., 1] << 4, stored.squeeze(-1)


def _decode_int4(packed: Tensor, scales: Tensor) -> Tensor:
    levels = torch.stack([packed & 15, packed >> 4], -1).float().sub_(8)
    return (levels.view(*scales.shape, SCALE_RUN) * scales.float()[..., None]).flatten(-2)


def _encode_int2(x: Tensor) -> tuple[Tensor, Tensor]:
    runs = _in_runs(x)
    real = _in_runs(torch.ones_like(x[..., :1, :])).sum(-1)  # values in each run that are not padding
    stored = (runs.abs().sum(-1) / real).clamp_max_(FP16_MAX).half()
    outer = runs.abs() > INT2_BOUNDARY * stored.float()[..., None]
    codes = (outer.to(torch.uint8) | (runs < 0).to(torch.uint8) << 1).flatten(-2).unflatten(-1, (-1, 4))
    return codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6, stored


def _decode_int2(packed: Tensor, scales: Tensor) -> Tensor:
    codes = torch.stack([packed & 3, packed >> 2 & 3, packed >> 4 & 3, packed >> 6], -1)
    levels = torch.tensor([INT2_INNER, INT2_OUTER, -INT2_INNER, -INT2_OUTER], dtype=torch.float32, device=packed.device)
    return (levels[codes.int()].view(*scales.shape, SCALE_RUN) * scales.float()[..., None]).flatten(-2)


_ENCODE = {"bf16": _encode_bf16, "fp8": _encode_fp8, "int4": _encode_int4, "int2": _encode_int2}
_DECODE = {"bf16": _decode_bf16, "fp8": _decode_fp8, "int4": _decode_int4, "int2": _decode_int2}
