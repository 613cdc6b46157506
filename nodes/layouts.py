"""How each supported model orders the tokens of its self-attention: [before][frames x height x width raster][after]."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ..mcsparse_core.context import TokenLayout

EXACT_SHARE = 1 / 8  # conditioning tokens up to this share of the sequence stay exact; more would cost what sparsity saves


@dataclass(frozen=True)
class Order:
    """Token order of one model class, by the names of the tensors its forward gets.

    ref_image: (B, C, H, W) that becomes tokens before the raster. ref_frames: (B, C, T, H, W), frames before the raster, on its grid.
    after: tensors whose tokens follow the raster; a list counts each entry. open_end: other tokens may follow too, in unknown number.
    """

    ref_image: str | None = None
    ref_frames: str | None = None
    after: tuple[str, ...] = ()
    open_end: bool = False


ORDERS: dict[str, Order] = {  # class of the diffusion model -> its order
    "WanModel": Order(ref_image="reference_latent", after=("context_latents",)),
    "VaceWanModel": Order(),
    "CameraWanModel": Order(),
    "AnimateWanModel": Order(ref_image="reference_latent"),
    "WanModel_S2V": Order(open_end=True),  # reference frame, then packed motion frames
    "HumoWanModel": Order(open_end=True),  # reference images
    "SCAILWanModel": Order(ref_frames="reference_latent", after=("pose_latents",)),
    "SCAIL2WanModel": Order(ref_frames="reference_latent", after=("pose_latents",)),
}
UNFIT = {  # class of the diffusion model -> why its self-attention is not one attention of all tokens to all tokens
    "WanAnimate2Model": "WanAnimate2Model attends frame by frame, each with its own pose frame",
    "CausalWanModel": "CausalWanModel generates block by block from a key/value cache",
}
INPUTS = ("reference_latent", "time_dim_concat", "context_latents", "pose_latents")


@dataclass(frozen=True)
class ForwardFacts:
    """What one forward pass tells about its tokens. latent: (B, C, F, H, W). shapes: of the conditioning tensors among INPUTS."""

    family: str
    patch: tuple[int, int, int]
    latent: tuple[int, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], ...]]
    has_ref_conv: bool = False


def facts(family: str, patch, latent, conditioning: Mapping, has_ref_conv: bool) -> ForwardFacts:
    """Facts of a forward of a model class with these keyword arguments."""
    shapes = {}
    for name in INPUTS:
        value = conditioning.get(name)
        tensors = value if isinstance(value, list | tuple) else (value,)
        found = tuple(tuple(t.shape) for t in tensors if hasattr(t, "shape"))
        if found:
            shapes[name] = found
    return ForwardFacts(family, tuple(patch), tuple(latent), shapes, has_ref_conv)


def why_unsupported(family: str) -> str | None:
    """A reason if this model class does not fit or its token order is not known, else None."""
    return None if family in ORDERS else UNFIT.get(family, f"model family {family} is not supported yet")


def token_layout(forward: ForwardFacts, tokens: int, grid_sizes: tuple[int, int, int] | None = None) -> TokenLayout | str:
    """Layout of a self-attention call over so many tokens, or a sentence saying why the order is unknown.

    grid_sizes: the patch grid where the host publishes it (then it holds also frames that were put before or after), else None.
    """
    order = ORDERS[forward.family]
    frames, height, width = grid_sizes or _grid(forward)
    before = 0
    if order.ref_image in forward.shapes and forward.has_ref_conv:
        before = prod(n // p for n, p in zip(forward.shapes[order.ref_image][0][-2:], forward.patch[1:], strict=True))
    if order.ref_frames in forward.shapes:
        ref_frames = forward.shapes[order.ref_frames][0][-3] // forward.patch[0]
        before = ref_frames * height * width
        if grid_sizes:
            frames -= ref_frames
    after = tokens - before - frames * height * width
    known = sum(_tokens(shape, forward.patch) for name in order.after for shape in forward.shapes.get(name, ()))
    if after < 0 or min(frames, height, width) < 1 or (not order.open_end and after != known):
        grid = f"{frames}x{height}x{width}"
        return f"unknown token order: {tokens} tokens, {forward.family} should have {before} + {grid} + {known}"
    exact = tuple(r for r in ((0, before), (tokens - after, tokens)) if r[0] < r[1])
    if before + after > tokens * EXACT_SHARE:
        exact = ()
    return TokenLayout((frames, height, width), before, after, exact)


def latent_tokens(family: str, patch: tuple[int, int, int], latent: tuple[int, ...]) -> int:
    """Raster tokens of a latent (B, C, F, H, W), without conditioning tokens."""
    return prod(_grid(ForwardFacts(family, patch, latent, {})))


def _grid(forward: ForwardFacts) -> tuple[int, int, int]:
    frames, height, width = (-(-n // p) for n, p in zip(forward.latent[-3:], forward.patch, strict=True))
    if "time_dim_concat" in forward.shapes:
        frames += -(-forward.shapes["time_dim_concat"][0][-3] // forward.patch[0])
    return frames, height, width


def _tokens(shape: tuple[int, ...], patch: tuple[int, int, int]) -> int:
    return prod(-(-n // p) for n, p in zip(shape[-3:], patch, strict=True))
