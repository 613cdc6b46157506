"""Checks of the public functions: what came, what is allowed, what to do. Done once per call, before a backend is picked."""
from __future__ import annotations

import math

import torch
from torch import Tensor

from .shapes import GRANULARITIES, GROUP_SIZE, CellOrder, KeySelection, QueryGroups, ceil_div

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_bhsd(op: str, **tensors: Tensor) -> None:
    """All are (B, H, S, D), of one supported dtype, on one device, with equal B, H and D and at least one token; none wants gradients."""
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t.dim() != 4 or t.numel() == 0:
            raise ValueError(f"{op}: {name} has shape {tuple(t.shape)}; needed is (B, H, S, D) with no empty dimension")
        if t.dtype not in DTYPES:
            raise ValueError(f"{op}: {name} is {t.dtype}; allowed are float32, bfloat16, float16. Convert it first")
        if t.dtype != first.dtype or t.device != first.device:
            raise ValueError(
                f"{op}: {name} is {t.dtype} on {t.device} but {first_name} is {first.dtype} on {first.device}; they must agree"
            )
        if t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{op}: {name} requires gradients, which are not computed here; call it under torch.no_grad()")
        if (*t.shape[:2], t.shape[3]) != (*first.shape[:2], first.shape[3]):
            raise ValueError(f"{op}: {name} {tuple(t.shape)} and {first_name} {tuple(first.shape)} must agree in B, H and D")


def check_same_length(op: str, **tensors: Tensor) -> None:
    lengths = {name: t.shape[2] for name, t in tensors.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{op}: {' and '.join(lengths)} have {tuple(lengths.values())} tokens; they must agree")


def check_cells(op: str, cells: CellOrder, length: int, device: torch.device | None = None) -> None:
    """device: where the order must be, None for anywhere."""
    if len(cells) != length:
        raise ValueError(f"{op}: the cell order has {len(cells)} tokens, the keys {length}; make it for these keys (keep_only compacts it)")
    check_memory(op, "the cell order", cells.order, torch.int64, device or cells.order.device)


def check_groups(op: str, groups: QueryGroups, q: Tensor) -> None:
    """groups fit q (B, H, S, D): length, group count, device, and B and H equal to q's or 1."""
    batch, heads, length, _ = q.shape
    width = ceil_div(length, GROUP_SIZE) * GROUP_SIZE
    shape = tuple(groups.order.shape)
    if groups.length != length or shape not in {(b, h, width) for b in (1, batch) for h in (1, heads)}:
        raise ValueError(
            f"{op}: groups of {groups.length} queries with order {shape} do not fit q {tuple(q.shape)}; "
            f"needed is order ({batch} or 1, {heads} or 1, {width}). Group again when the geometry changes"
        )
    check_memory(op, "the groups' order", groups.order[0, 0], torch.int32, q.device)


def check_selection(op: str, selection: KeySelection, q: Tensor, k: Tensor) -> None:
    """selection fits q and k: (B, H, G) of q, keys of k, device."""
    groups = ceil_div(q.shape[2], GROUP_SIZE)
    if tuple(selection.counts.shape) != (*q.shape[:2], groups):
        raise ValueError(
            f"{op}: the selection is for (B, H, G) = {tuple(selection.counts.shape)}, q needs {(*q.shape[:2], groups)}. "
            "Select again when the geometry changes"
        )
    check_cells(op, selection.cells, k.shape[2], q.device)
    words = ceil_div(ceil_div(k.shape[2], GRANULARITIES[selection.granularity]), 32)
    if tuple(selection.bits.shape) != (*selection.counts.shape, words):
        raise ValueError(
            f"{op}: the selection's bits are {tuple(selection.bits.shape)}; {selection.granularity} selections of {k.shape[2]} keys have "
            f"{(*selection.counts.shape, words)}"
        )
    check_memory(op, "the selection's bits", selection.bits, torch.int32, q.device)
    check_memory(op, "the selection's counts", selection.counts, torch.int32, q.device)


def check_scale(op: str, scale: float | None, q: Tensor) -> float:
    """The factor of the logits, 1 / sqrt(D) for None."""
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"{op}: scale is {scale}; needed is a finite number, or None for 1 / sqrt(D)")
    return scale


def is_cell_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


def check_memory(op: str, name: str, t: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """t can be read by address."""
    if t.dtype != dtype or t.device != device or not t.is_contiguous():
        layout = "contiguous" if t.is_contiguous() else "strided"
        raise ValueError(f"{op}: {name}: {layout} {t.dtype} on {t.device}; needed is contiguous {dtype} on {device}")
