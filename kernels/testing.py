"""Inputs and the accuracy rule that tests and benchmarks share."""
from __future__ import annotations

import torch
from torch import Tensor

KINDS = ("random", "clustered", "ties", "outliers")


def make_qkv(
    batch: int = 1, heads: int = 2, length: int = 300, head_dim: int = 64, *,
    kind: str = "random", dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0, layout: str = "bhsd", nan_slack: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Seeded q, k, v (B, H, S, D).

    kind: random (normal); clustered (32 centres with noise, shared by q and k: peaked attention, groups worth finding); ties
    (half of the keys repeat other keys, entries are small integers); outliers (a few
    channels of q and k 3 times, a few keys 2 times and their values 20 times larger).
    layout "bshd": views transposed from (B, S, H, D). nan_slack: rows of NaN in memory before and after the tokens of each head
    ("bhsd") or row ("bshd"); the views leave them out.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, head_dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    q, k, v = normal(*shape), normal(*shape), normal(*shape)
    if kind == "clustered":
        centres = 2 * normal(batch, heads, 32, head_dim)
        for x in (q, k):
            of = torch.randint(32, (batch, heads, length, 1), generator=generator).expand(shape)
            x.mul_(0.5).add_(centres.gather(2, of))
    elif kind == "ties":
        q, k = (x.mul_(2).round_() for x in (q, k))
        k[:, :, length // 2 :] = k[:, :, : length - length // 2].clone()
    elif kind == "outliers":
        for x in (q, k):
            x[..., :: max(1, head_dim // 3)] *= 3
        k[:, :, :: max(1, length // 5)] *= 2
        v[:, :, :: max(1, length // 5)] *= 20
    elif kind != "random":
        raise ValueError(f"make_qkv: kind is {kind!r}; choose one of {', '.join(KINDS)}")
    return tuple(_laid_out(x.to(device, dtype), layout, nan_slack) for x in (q, k, v))


def _laid_out(x: Tensor, layout: str, slack: int) -> Tensor:
    """x as a view of the asked memory layout inside a NaN-filled buffer."""
    if layout == "bshd":
        return _laid_out(x.transpose(1, 2), "bhsd_dims_1", slack).transpose(1, 2)
    axis = 1 if layout == "bhsd_dims_1" else 2
    size = list(x.shape)
    size[axis] += 2 * slack
    buffer = x.new_full(size, float("nan"))
    view = buffer.narrow(axis, slack, x.shape[axis])
    view.copy_(x)
    return view


def assert_no_worse_than(out: Tensor, ref: Tensor, same_dtype_ref: Tensor, rounding_steps: float = 2.0) -> None:
    """The largest error of `out` is at most twice that of `same_dtype_ref`, plus `rounding_steps` steps of out's dtype.

    ref: float32 or float64 truth; same_dtype_ref: the same maths in plain PyTorch at out's dtype. A step is half an ulp of the
    largest |ref|. Infinities of ref must be met exactly; NaN in out fails.
    """
    assert out.shape == ref.shape, f"shape {tuple(out.shape)}, expected {tuple(ref.shape)}"
    assert not bool(out.isnan().any()), f"{int(out.isnan().sum())} of {out.numel()} values are NaN"
    truth, finite = ref.double(), ref.isfinite()
    assert torch.equal(out[~finite].double(), truth[~finite]), "infinities differ"
    truth = truth[finite]
    error = (out[finite].double() - truth).abs()
    baseline = (same_dtype_ref[finite].double() - truth).abs()
    if error.numel() == 0:
        return
    step = torch.finfo(out.dtype).eps / 2 * truth.abs().max().item()
    allowed = 2 * baseline.max().item() + rounding_steps * step
    assert error.max().item() <= allowed, (
        f"largest error {error.max().item():.3e} > {allowed:.3e} (same maths at {out.dtype}: {baseline.max().item():.3e})"
    )
