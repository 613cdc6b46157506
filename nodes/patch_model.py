"""Node "MC-Sparse Patch Model": widgets to a plan, and the plan onto a clone of the MODEL."""
from __future__ import annotations

from comfy_api.latest import io

from ..kernels.registry import backend_names
from ..mcsparse_core.plan import GROUPINGS, MIN_TOKENS_FLOOR, PRESETS, TAILS, SparsePlan
from ..mcsparse_core.precision import PRECISIONS
from ..mcsparse_core.schedule import check_density
from . import host
from .schema import Schedule, declare, schema

AUTO = "auto"
TAIL_NAMES = {"none" if tail == 0 else str(tail): tail for tail in TAILS}
RESIDUAL_NAMES = (AUTO, "bf16", "int4", "rank-8", "off")


def plan_of(
    preset: str, density: float, tail: str, grouping: str, granularity: str, residual: str, min_tokens: int, backend: str,
    verbose: bool, schedule=None, precision: str = AUTO,
) -> SparsePlan:  # fmt: skip
    """The plan that the widgets describe. Raises ValueError with what came, what is allowed and what to do."""
    if tail not in (AUTO, *TAIL_NAMES):  # 0.3.64 lets unknown choices through
        raise ValueError(f"tail is {tail!r}; allowed: {', '.join((AUTO, *TAIL_NAMES))}")
    return SparsePlan(
        preset=preset,
        density=density or None,
        tail=None if tail == AUTO else TAIL_NAMES[tail],
        grouping=None if grouping == AUTO else grouping,
        granularity=None if granularity == AUTO else granularity,
        residual=None if residual == AUTO else residual,
        schedule=schedule,
        min_tokens=min_tokens,
        backend=backend,
        precision=precision,
        verbose=verbose,
    )


def check_model(model):
    """Raises ValueError unless this is a MODEL."""
    if model is None:
        raise ValueError("MC-Sparse Patch Model: no model came in. Connect a MODEL output, for example of Load Diffusion Model.")
    if not (hasattr(model, "clone") and hasattr(model, "model_options") and hasattr(model, "add_wrapper_with_key")):
        raise ValueError(
            f"MC-Sparse Patch Model: the input 'model' is of type {type(model).__name__}, not a MODEL. "
            "Connect a MODEL output, for example of Load Diffusion Model."
        )


def check_layers(layers: tuple[int, ...], blocks: int | None):
    """Raises ValueError if a layer lies outside a model of so many blocks (None = unknown)."""
    outside = [i for i in layers if blocks is not None and not -blocks <= i < blocks]
    if outside:
        some = ", ".join(map(str, outside[:8])) + (", ..." if len(outside) > 8 else "")
        allowed = f"Use 0 to {blocks - 1}, or -1 to -{blocks} from the end." if blocks else "Leave dense layers empty."
        raise ValueError(f"MC-Sparse schedule: dense layer {some} does not exist: this model has {blocks} blocks. {allowed}")


class MCSparsePatchModel(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return schema(
            "MCSparsePatchModel",
            "MC-Sparse Patch Model",
            description="Makes long video models denoise faster: after a few dense steps, each query attends to a cached selection of keys "
            "only. Place it last before the sampler. It changes the picture slightly; MC-Sparse Stats shows what it did.",
            search_aliases=["sparse attention", "faster wan", "speed up video", "mc sparse", "token sparse", "attention cache"],
            inputs=[
                declare(io.Model.Input, "model", tooltip="The model to speed up. It is not changed; the output is a patched copy."),
                declare(
                    io.Combo.Input, "preset", options=list(PRESETS), default=AUTO,
                    tooltip="A whole recipe. auto: balanced, chosen by step count. paper, paper-h3: the published method, slower. quality: "
                    "closer to the original, slower. speed: fastest, least exact. few-step: for distilled models with 4 to 8 steps. "
                    "custom: auto with the density you set.",
                ),
                declare(
                    io.Float.Input, "density", default=0.0, min=0.0, max=1.0, step=0.01, round=0.001, display_mode=io.NumberDisplay.slider,
                    tooltip="Share of all keys that each query attends to, 0.05 to 1.00; 0.00 is the preset's own. 0.10 to 0.25 is usual; "
                    "lower is faster and changes the picture more; 1.00 is dense.",
                ),
                declare(
                    io.Combo.Input, "tail", options=[AUTO, *TAIL_NAMES], default=AUTO,
                    tooltip="Keys that are not selected still count as one mean per cell of so many keys. Smaller cells: closer to the "
                    "original, a little slower. none: they are left out, as in the paper.",
                ),
                declare(
                    io.Combo.Input, "grouping", options=[AUTO, *GROUPINGS], default=AUTO,
                    tooltip="How queries are grouped to share a selection. cells: by position, needs no "
                    "computing, measured equally close. pddp: by content, much slower at anchors on CPUs, a few percent on GPUs.",
                ),
                declare(
                    io.Combo.Input, "granularity", options=[AUTO, "token", "cell32"], default=AUTO,
                    tooltip="What is selected: single keys (token, more exact) or cells of 32 neighbours (cell32, less memory, "
                    "less exact, faster on Hopper cards).",
                ),
                declare(
                    Schedule.Input, "schedule", optional=True,
                    tooltip="Changes of the preset's schedule (dense steps, anchors, layers, density curve), from MC-Sparse Schedule.",
                ),
                declare(
                    io.Combo.Input, "residual", options=list(RESIDUAL_NAMES), default=AUTO,
                    tooltip="How the rest that sparse attention misses is kept between anchors. auto: the preset's own (paper: bf16, else "
                    "the smallest form that stays close enough). bf16: exact, most memory (as much as one activation per block and "
                    "conditioning). int4: about a third. rank-8: a twelfth. off: no memory, visible change.",
                ),
                declare(
                    io.Int.Input, "min_tokens", default=4096, min=MIN_TOKENS_FLOOR, max=1 << 24, step=256,
                    tooltip="Shorter sequences stay dense: below a few thousand tokens sparse attention is not faster (on fast GPUs below "
                    "some ten thousand). Tokens of Wan: "
                    "((frames - 1) / 4 + 1) x height / 16 x width / 16.",
                ),
                declare(
                    io.Combo.Input, "backend", options=list(backend_names()), default="auto",
                    tooltip="Kernels to use. auto: usually the fastest this machine can run, dense where none can. triton: NVIDIA cards "
                    "from RTX 30 on. hopper: H100 and H200. reference: anywhere, slow. A named one is strict: it stops with the reason "
                    "where it cannot run.",
                ),
                declare(
                    io.Boolean.Input, "verbose", default=False,
                    tooltip="Log the whole report after each run instead of one line. No effect on the picture.",
                ),
                declare(  # optional, hence the last widget: workflows that were saved before it load with its default
                    io.Combo.Input, "precision", options=list(PRECISIONS), default=AUTO, optional=True,
                    tooltip="Numbers that sparse attention compares tokens in. auto: at present bf16 on every card. "
                    "bf16: the model's own 16 bits. int8: coarser, hardly less exact, up to a sixth faster on an H200 from density 0.15 on "
                    "(elsewhere not timed). fp8: coarser still, visibly less exact. Where the card or the model does not allow it, bf16 is "
                    "used and MC-Sparse Stats says so.",
                ),
            ],
            outputs=[declare(io.Model.Output, tooltip="The patched model, for the sampler.")],
        )  # fmt: skip

    @classmethod
    def validate_inputs(cls, density=0.0):
        try:
            if density:
                check_density(density)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls, model, preset, density, tail, grouping, granularity, residual, min_tokens, backend, verbose, schedule=None, precision=AUTO
    ):
        check_model(model)
        plan = plan_of(preset, density, tail, grouping, granularity, residual, min_tokens, backend, verbose, schedule, precision)
        if schedule is not None:
            check_layers(schedule.dense_layers or (), host.block_count(model))
        return io.NodeOutput(host.attach(model, plan))
