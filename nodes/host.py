"""How a plan gets into ComfyUI's sampling. THE compatibility file: what differs between ComfyUI versions is here.

The patched MODEL carries one wrapper, around a whole sampling run (OUTER_SAMPLE). It makes everything else for that run, on a clone
of the guider's options, and takes it off again when the run ends in any way: the session, the attention override with the one
found there as its dense path, the clock (PREDICT_NOISE), the announcement of forward passes (APPLY_MODEL) and the memory
reservation (PREPARE_SAMPLING).
"""
from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from math import ceil

import comfy.model_management as model_management
from comfy.model_patcher import create_model_options_clone
from comfy.patcher_extension import WrappersMP, add_wrapper_with_key

from ..mcsparse_core.forecast import cache_budget, state_bytes
from ..mcsparse_core.plan import SparsePlan
from ..mcsparse_core.run import SparseRun
from ..mcsparse_core.schedule import progress_of
from ..mcsparse_core.stats import one_line, report_text
from .layouts import facts, latent_tokens, why_unsupported
from .session import BLOCK_KEY, KEY, OVERRIDE, Session, attention_override

REPORTS_KEPT = 16


class Reports:
    """The reports of a patched MODEL's latest runs, oldest first; one object for all clones of that MODEL."""

    def __init__(self):
        self._reports: deque[dict] = deque(maxlen=REPORTS_KEPT)

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def add(self, report: dict):
        self._reports.append(report)

    def latest(self) -> list[dict]:
        return list(self._reports)


def attach(model, plan: SparsePlan):
    """A clone of a MODEL whose sampling runs follow `plan`; a plan it had before is replaced. The given MODEL stays as it is."""
    clone = model.clone()
    reports = Reports()
    clone.set_attachments(KEY, reports)
    clone.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, KEY)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, AroundRun(plan, reports))
    return clone


def reports_of(model) -> Reports | None:
    """Reports of a MODEL, None if MC-Sparse never patched it."""
    return model.get_attachment(KEY) if hasattr(model, "get_attachment") else None


def block_count(model) -> int | None:
    """Transformer blocks of a MODEL, None where that is unknown."""
    blocks = getattr(_diffusion_model(model), "blocks", None)
    return len(blocks) if hasattr(blocks, "__len__") else None


def prompt_id() -> str | None:
    """The prompt that the server is executing, None outside of it."""
    try:
        from comfy_execution.utils import get_executing_context
    except ImportError:
        context = None
    else:
        context = get_executing_context()
    if context is not None:
        return context.prompt_id
    server = getattr(sys.modules.get("server"), "PromptServer", None)
    return getattr(getattr(server, "instance", None), "last_prompt_id", None)


# one sampling run


@dataclass(frozen=True)
class AroundRun:
    """The wrapper around a whole sampling run; holds settings and reports only, so that it can be pickled."""

    plan: SparsePlan
    reports: Reports

    def __call__(self, executor, *args, **kwargs):
        guider, original = executor.class_obj, executor.class_obj.model_options
        run = _new_run(self.plan, guider.model_patcher, args[3] if len(args) > 3 else kwargs["sigmas"])
        session, status = None, "failed"
        try:
            guider.model_options, session = _installed(original, guider, run)
            result = executor(*args, **kwargs)
            status = "finished"
            return result
        except model_management.InterruptProcessingException:
            status = "interrupted"
            raise
        finally:
            guider.model_options = original
            _close(run, session, status, guider.model_patcher, self.reports)


def _new_run(plan: SparsePlan, patcher, sigmas) -> SparseRun:
    levels = [float(s) for s in sigmas.tolist()]
    sampling = patcher.get_model_object("model_sampling")
    family = type(_diffusion_model(patcher)).__name__
    decline = why_unsupported(family)
    if _is_multigpu(patcher):
        decline = "the model runs on several GPUs, which is not supported yet"
    elif not hasattr(sampling, "percent_to_sigma"):
        decline = decline or f"the noise schedule of {type(sampling).__name__} is unknown"
    progress = [] if decline else progress_of(levels, lambda percent: float(sampling.percent_to_sigma(percent)))
    return SparseRun(plan, levels, progress, decline=decline, family=family)


def _installed(original: dict, guider, run: SparseRun) -> tuple[dict, Session]:
    """A clone of the options with the session of this run in it."""
    options = create_model_options_clone(original)
    transformer = options.setdefault("transformer_options", {})
    previous = transformer.get(OVERRIDE)
    if previous is attention_override:  # a run inside a run of the same options
        previous = transformer[KEY].previous
    session = Session(run, previous, _outside_graph())
    if _is_multigpu(guider.model_patcher):
        return options, session
    transformer[KEY] = session
    transformer[OVERRIDE] = attention_override
    model = _diffusion_model(guider.model_patcher)
    if not run.decline and not _sets_block_keys(model):
        _inject_block_keys(transformer, len(model.blocks))
    for kind, wrapper in (
        (WrappersMP.PREPARE_SAMPLING, _prepare_sampling(session, _branch_count(guider))),
        (WrappersMP.PREDICT_NOISE, _predict_noise(session)),
        (WrappersMP.APPLY_MODEL, _apply_model(session, model)),
    ):
        transformer.get("wrappers", {}).get(kind, {}).pop(KEY, None)
        add_wrapper_with_key(kind, KEY, wrapper, transformer)
    return options, session


def _close(run: SparseRun, session: Session | None, status: str, patcher, reports: Reports):
    path = None
    if session is not None:
        path = session.dense_path
        session.close()
    said = set(run.notes)  # these were logged when they came up
    report = run.close(status)
    report["model"] = type(_diffusion_model(patcher)).__name__
    report["dense_path"] = path
    report["prompt_id"] = prompt_id()
    reports.add(report)
    logging.info(report_text(report) if run.plan.verbose else f"MC-Sparse: {one_line(report)}")
    for note in report["notes"]:
        if note not in said and not run.plan.verbose:
            logging.warning("MC-Sparse: %s", note)


def _predict_noise(session: Session) -> Callable:
    def predict_noise(executor, *args, **kwargs):
        timestep = args[1] if len(args) > 1 else kwargs["timestep"]
        session.run.begin_evaluation(float(timestep.max()))
        return executor(*args, **kwargs)

    return predict_noise


def _apply_model(session: Session, model) -> Callable:
    family, patch = type(model).__name__, getattr(model, "patch_size", ())
    has_ref_conv = getattr(model, "ref_conv", None) is not None

    def apply_model(executor, *args, **kwargs):
        x, options = args[0], args[5] if len(args) > 5 else kwargs.get("transformer_options", {})
        session.begin_forward(options, x.shape[0], facts(family, patch, x.shape, kwargs, has_ref_conv))
        calls = session.calls
        output = executor(*args, **kwargs)
        session.end_forward(options, calls)
        return output

    return apply_model


# memory


def _prepare_sampling(session: Session, branches: int) -> Callable:
    def prepare_sampling(executor, model, noise_shape, *args, **kwargs):
        run, device = session.run, model.load_device
        if run.decline:
            return executor(model, noise_shape, *args, **kwargs)
        working = model.model.memory_required([2 * noise_shape[0], *noise_shape[1:]])
        wanted = 0
        if device.type != "cpu" and not _is_dynamic(model):
            wanted = _forecast(run, _diffusion_model(model), noise_shape, branches)
        # The loader sizes weights by the noise shape alone, so the cache is asked for as more batch rows.
        extra = ceil(wanted / (working / (2 * noise_shape[0]))) if wanted else 0
        result = executor(model, [noise_shape[0] + extra, *noise_shape[1:]], *args, **kwargs)
        run.cache.budget_bytes = _budget(model, device, working)
        return result

    return prepare_sampling


def _forecast(run: SparseRun, model, noise_shape, branches: int) -> int:
    """Bytes of the whole cache of a run: every block keeps a state for each branch."""
    tokens = latent_tokens(type(model).__name__, tuple(model.patch_size), tuple(noise_shape))
    states = branches * (len(model.blocks) + len(getattr(model, "vace_blocks", ())))
    return states * state_bytes(run.recipe, noise_shape[0], model.num_heads, tokens, model.dim // model.num_heads)


def _budget(model, device, working: float) -> int | None:
    """Bytes the cache may take: on an accelerator what a forward pass leaves free, on the CPU half of the free RAM (None = unknown)."""
    if device.type == "cpu":
        try:
            import psutil
        except ImportError:
            return None
        return psutil.virtual_memory().available // 2
    ask = getattr(model, "get_free_memory", model_management.get_free_memory)
    return cache_budget(int(ask(device)), int(working))


def _outside_graph() -> Callable:
    """A context for allocations that outlive a forward pass, where this version replays those inside one."""
    try:
        from comfy import model_prefetch
    except ImportError:
        return nullcontext
    return getattr(model_prefetch, "pause_malloc_graph", nullcontext)


# facts about the model and this version


def _diffusion_model(patcher):
    model = getattr(getattr(patcher, "model", None), "diffusion_model", None)
    return getattr(model, "_orig_mod", model)


def _branch_count(guider) -> int:
    """Conditionings that are evaluated per step, for the memory forecast."""
    conds = getattr(guider, "conds", None) or {}
    if getattr(guider, "cfg", None) == 1.0:
        conds = {name: c for name, c in conds.items() if name != "negative"}
    return max(1, sum(len(c or ()) for c in conds.values()))


def _is_dynamic(patcher) -> bool:
    return bool(getattr(patcher, "is_dynamic", lambda: False)())


def _is_multigpu(patcher) -> bool:
    return bool(patcher.get_additional_models_with_key("multigpu"))


def _sets_block_keys(model) -> bool:
    """True if the model's forward names its blocks in the transformer options (0.3.64 has none that does)."""
    forward = getattr(type(model), "forward_orig", None)
    return "block_index" in getattr(getattr(forward, "__code__", None), "co_consts", ())


def _inject_block_keys(transformer: dict, blocks: int):
    """Names each block by a replacement that runs the block itself, or the replacement that was there before."""
    replaced = transformer.setdefault("patches_replace", {})
    replaced["dit"] = dict(replaced.get("dit", {}))
    for index in range(blocks):
        place = ("double_block", index)
        replaced["dit"][place] = _named_block(("double", index, blocks), replaced["dit"].get(place))


def _named_block(name: tuple[str, int, int], previous: Callable | None) -> Callable:
    def block(args, extra):
        args.get("transformer_options", {})[BLOCK_KEY] = name  # some models of old versions hand their blocks no options
        return previous(args, extra) if previous is not None else extra["original_block"](args)

    return block
