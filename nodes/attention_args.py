"""ComfyUI's attention arguments as views of shape (B, H, S, D), and results back. Knows torch only, so that it is tested without ComfyUI.

ComfyUI calls attention as f(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **more),
and every model chooses by itself which of these are positional.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

POSITIONS = ("q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape")


@dataclass(frozen=True, eq=False)
class AttentionArgs:
    """One attention call of the host. q, k, v (B, H, S, D) are views of the host's tensors; scale is 1/sqrt(D) unless given.

    args, kwargs: as they came, for handing the call on.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    has_mask: bool
    low_precision: bool  # False where the host rules quantised attention out
    keeps_heads: bool  # the host wants (B, H, S, D) back, not (B, S, H*D)
    args: tuple
    kwargs: dict

    def result(self, output: Tensor) -> Tensor:
        """An output (B, H, S, D) in the layout the host asked for."""
        return output if self.keeps_heads else output.transpose(1, 2).flatten(2)

    def dense(self, host: Callable, rows: slice) -> Tensor:
        """The host's own attention for a range of batch rows, (rows, H, S, D)."""
        batch = self.q.shape[0]
        if rows == slice(0, batch):
            args, kwargs = self.args, self.kwargs
        else:
            bound = {name: value[rows] for name, value in self._bound().items() if name in ("q", "k", "v")}
            args = tuple(bound.get(name, value) for name, value in zip(POSITIONS, self.args, strict=False))
            kwargs = {name: bound.get(name, value) for name, value in self.kwargs.items()}
        output = host(*args, **kwargs)
        return output if self.keeps_heads else _split_heads(output, self.q.shape[1])

    def _bound(self) -> dict:
        return dict(zip(POSITIONS, self.args, strict=False)) | self.kwargs


def read(args: tuple, kwargs: dict) -> AttentionArgs | None:
    """The call, or None if it is not one of the known form (then it can only be handed on as it came)."""
    bound = dict(zip(POSITIONS, args, strict=False)) | kwargs
    if len(args) > len(POSITIONS) or any(not isinstance(bound.get(n), Tensor) for n in ("q", "k", "v")) or "heads" not in bound:
        return None
    tensors, heads = [bound[n] for n in ("q", "k", "v")], bound["heads"]
    if any(t.dim() != (4 if bound.get("skip_reshape") else 3) for t in tensors):
        return None
    if not bound.get("skip_reshape"):
        width = tensors[0].shape[-1] // heads
        if any(t.shape[-1] % width for t in tensors):
            return None
        tensors = [_split_heads(t, t.shape[-1] // width) for t in tensors]
    q, k, v = tensors
    scale = kwargs.get("scale")
    return AttentionArgs(
        q, k, v,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        has_mask=bound.get("mask") is not None,
        low_precision=kwargs.get("low_precision_attention") is not False,
        keeps_heads=bool(bound.get("skip_output_reshape")),
        args=args,
        kwargs=kwargs,
    )  # fmt: skip


def _split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, S, H*D) as a view (B, H, S, D)."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)
