"""What the sparse attention of one call is computed in: what the plan asks, what the host allows and what the kernels here can."""
from __future__ import annotations

from dataclasses import replace

from ..kernels import BackendUnavailable, Geometry, pick, why_no_precision
from ..kernels.registry import AUTO, SPARSE

PRECISIONS = (AUTO, "bf16", "int8", "fp8")  # what a plan can ask for; bf16 is the model's own 16 bits, "half" in the kernels
HALF = "half"
# Classes of diffusion models that make 3-D shapes: quantised attention is known to destroy meshes, without an error.
SHAPE_MODELS = ("Hunyuan3Dv2", "HunYuanDiTPlain", "LatentSeqMMFlowModel")
MEASURED: dict[tuple[int, int], str] = {}  # compute capability -> the low precision that was measured to pay off there, if any


def wanted_precision(asked: str, capability: tuple[int, int] | None, family: str) -> str:
    """A plan's precision in the kernels' words. capability: of the card, None off CUDA; family: the class of the model.

    "auto" is what was measured to pay off on such a card, but always half for models of 3-D shapes.
    """
    if asked == AUTO:
        return HALF if family in SHAPE_MODELS else MEASURED.get(capability, HALF)
    return HALF if asked == "bf16" else asked


def choose_precision(asked: str, geometry: Geometry, family: str, host_allows: bool, backend: str = AUTO) -> tuple[str, str | None]:
    """The precision of one call in the kernels' words, and why it is half where something else was wanted."""
    wanted = wanted_precision(asked, geometry.capability, family)
    if wanted == HALF:
        return HALF, None
    if not host_allows:
        return HALF, "the model rules low precision out"
    lacking = _why_lacking(wanted, geometry, backend)
    return (wanted, None) if lacking is None else (HALF, f"no {wanted} here ({lacking})")


def in_plan_words(precision: str) -> str:
    return "bf16" if precision == HALF else precision


def _why_lacking(precision: str, geometry: Geometry, backend: str) -> str | None:
    if backend == AUTO:
        return why_no_precision(geometry, precision)
    try:
        pick(SPARSE, replace(geometry, precision=precision), backend)
    except BackendUnavailable as error:
        return str(error)
    return None
