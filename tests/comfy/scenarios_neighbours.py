"""Other nodes on the same model, other models of the family, and models that are not supported."""
import dataclasses
import importlib.util
import logging

import comfy.ldm.modules.attention as attention
import comfy.sample
import comfy.samplers
import lab
import torch
from lab import WrappersMP, patch, sample

MODEL = lab.tiny_wan()
DENSE = sample(MODEL)
FRESH = sample(patch(MODEL))
SHORT = {"dense_start": "1", "anchors": "first"}  # the first step is dense and the anchor


def _foreign(model, calls: list):
    """A clone with another attention override, as other packs install it: whatever was there is lost."""

    def foreign_override(func, *args, **kwargs):
        calls.append(args[0].shape[1])
        return func(*args, **kwargs)

    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = foreign_override
    return clone


def override_before():
    calls = []
    p = patch(_foreign(MODEL, calls))
    out = sample(p)
    return lab.brief(p) | {"self": calls.count(1024), "all": len(calls), "rel": lab.rel(out, FRESH)}


def override_after():
    calls = []
    p = patch(MODEL)
    out = sample(_foreign(p, calls))
    return lab.brief(p) | {"self": calls.count(1024), "rel": lab.rel(out, FRESH)}


def override_on_both_sides():
    first, second = [], []
    p = patch(_foreign(MODEL, first))
    out = sample(_foreign(p, second))
    return lab.brief(p) | {"first": len(first), "second": len(second), "rel": lab.rel(out, FRESH)}


def attention_backend_node():
    """Core's own node, where this version has it."""
    if not hasattr(MODEL, "set_model_optimized_attention"):
        return {"missing": True}
    p = patch(MODEL)
    after = p.clone()
    after.set_model_optimized_attention(attention.attention_sub_quad)
    out = sample(after)
    return lab.brief(p) | {"rel": lab.rel(out, FRESH)}


def override_in_mid_run():
    """Something takes ours off at step 4."""
    p, n, lines = patch(MODEL), [0], []

    def apply(executor, *args, **kwargs):
        n[0] += 1
        if n[0] > 4:
            args[5]["optimized_attention_override"] = lambda func, *a, **k: func(*a, **k)
        return executor(*args, **kwargs)

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    m = p.clone()
    m.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", apply)
    keep = Keep()
    logging.getLogger().addHandler(keep)
    out = sample(m)
    logging.getLogger().removeHandler(keep)
    return lab.brief(p) | {"finite": bool(out.isfinite().all()), "warned": sum("replaced" in line for line in lines)}


def unknown_keyword():
    """A keyword that a later version may add reaches the dense path."""
    seen = []

    def host(func, *args, **kwargs):
        seen.append(kwargs.pop("future_keyword", None))
        return func(*args, **kwargs)

    def rename(executor, *args, **kwargs):
        override = args[5]["optimized_attention_override"]
        args[5]["optimized_attention_override"] = lambda func, *a, **k: override(func, *a, future_keyword=5, **k)
        return executor(*args, **kwargs)

    m = MODEL.clone()
    m.model_options["transformer_options"]["optimized_attention_override"] = host
    p = patch(m)
    q = p.clone()
    q.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", rename)
    out = sample(q)
    return lab.brief(p) | {"seen": set(seen) == {5}, "rel": lab.rel(out, FRESH)}


def low_precision():
    """int8 throughout, then with a host that rules it out from the fifth forward on, as some models do at some calls."""
    n = [0]

    def forbid(executor, *args, **kwargs):
        n[0] += 1
        override = args[5]["optimized_attention_override"]
        if n[0] > 4:
            args[5]["optimized_attention_override"] = lambda func, *a, **k: override(func, *a, low_precision_attention=False, **k)
        return executor(*args, **kwargs)

    p = patch(MODEL, precision="int8")
    rel = lab.rel(sample(p), FRESH)
    q = p.clone()
    q.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "test", forbid)
    sample(q)
    asked = ("counts", "precision", "precisions", "precision_reasons", "backends")
    return {"rel": rel} | {name: {k: r[k] for k in asked} for name, r in zip(("allowed", "forbidden"), lab.reports(p), strict=True)}


def caches():
    seen = {}
    for name in ("EasyCacheNode", "LazyCacheNode"):
        node = lab.core_node("nodes_easycache", name)
        for order in ("before", "after"):
            inputs = {"reuse_threshold": 5.0, "start_percent": 0.15, "end_percent": 0.95, "verbose": False}
            p = patch(node(model=MODEL, **inputs)) if order == "before" else patch(MODEL)
            m = p if order == "before" else node(model=p, **inputs)
            out = sample(m)
            seen[f"{name} {order}"] = lab.brief(p) | {"finite": bool(out.isfinite().all())}
    return seen


def compiled():
    """Two runs each, so that a graph which kept the first run's choices would show."""
    node, seen = lab.core_node("nodes_torch_compile", "TorchCompileModel"), {}
    for order in ("before", "after"):
        torch._dynamo.reset()
        p = patch(node(model=MODEL, backend="eager")) if order == "before" else patch(MODEL)
        m = p if order == "before" else node(model=p, backend="eager")
        first, second = sample(m), sample(m)
        seen[order] = lab.brief(p) | {"rel": [lab.rel(first, FRESH), lab.rel(second, FRESH)]}
    return seen


def compiled_inductor():
    """The real compiler, where this version is the newer one: it takes a minute."""
    if not hasattr(MODEL, "set_model_optimized_attention"):
        return {"missing": True}
    small = lab.tiny_wan("wan1", layers=1)
    p = patch(small, SHORT)
    eager = sample(p, steps=6)
    out = sample(lab.core_node("nodes_torch_compile", "TorchCompileModel")(model=p, backend="inductor"), steps=6)
    return lab.brief(p) | {"rel": lab.rel(out, eager)}


def unpatched_afterwards():
    sample(patch(MODEL))
    return {"same": torch.equal(sample(MODEL), DENSE)}


# the Wan family


def _variant(model, steps=5, **how):
    """Five steps: an anchor and four reuses."""
    from mc_sparse.nodes import session

    p, layouts, original = patch(model, SHORT, density=0.2), [], session.token_layout

    def spy(*args):
        layouts.append(original(*args))
        return layouts[-1]

    session.token_layout = spy
    try:
        out = sample(p, steps=steps, **how)
    finally:
        session.token_layout = original
    seen = {str(x if isinstance(x, str) else (x.grid, x.before, x.after, x.exact)) for x in layouts}
    more = {k: lab.reports(p)[-1][k] for k in ("sites", "model")}
    return lab.brief(p) | more | {"rel": lab.rel(out, sample(model, steps=steps, **how)), "layouts": sorted(seen)}


def vace():
    model = lab.tiny_wan("vace", "VaceWanModel", vace_layers=2, vace_in_dim=96)
    extra = {"vace_frames": [lab.noise_of((1, 32, 4, 32, 32), 7)], "vace_mask": [torch.ones(1, 64, 4, 32, 32)], "vace_strength": [1.0]}
    return _variant(model, positive=lab.prompt(2, **extra), negative=lab.prompt(3, **extra))


def image_to_video():
    return _variant(lab.tiny_wan("i2v", model_type="i2v", in_dim=36))


def reference_image():
    """Fun control: tokens of one reference image before the raster, kept exact."""
    model = lab.tiny_wan("fun", in_dim_ref_conv=16)
    return _variant(model, shape=(1, 16, 8, 32, 32), positive=lab.prompt(2, reference_latents=[lab.noise_of((1, 16, 1, 32, 32), 7)]))


def large_reference():
    """The same with a shorter clip: too many tokens to keep exact."""
    model = lab.tiny_wan("fun", in_dim_ref_conv=16)
    return _variant(model, positive=lab.prompt(2, reference_latents=[lab.noise_of((1, 16, 1, 32, 32), 7)]))


def camera():
    return _variant(lab.tiny_wan("camera", "CameraWanModel", in_dim=32))


def humo():
    model = lab.tiny_wan("humo", "HumoWanModel", in_dim=36)
    extra = {"reference_latents": [lab.noise_of((1, 16, 1, 32, 32), 7)], "audio_embed": lab.noise_of((1, 7, 8, 5, 1280), 8)}
    return _variant(model, shape=(1, 16, 7, 32, 32), positive=lab.prompt(2, **extra), negative=lab.prompt(3, **extra))


def scail():
    try:
        from comfy.ldm.wan.model import SCAILWanModel  # noqa: F401
    except ImportError:
        return {"missing": True}
    model = lab.tiny_wan("scail", "SCAILWanModel", in_dim=20)
    extra = {"reference_latents": [lab.noise_of((1, 16, 1, 32, 32), 7)], "pose_video_latent": lab.noise_of((1, 16, 8, 16, 16), 8)}
    return _variant(model, shape=(1, 16, 8, 32, 32), positive=lab.prompt(2, **extra), negative=lab.prompt(3, **extra))


def sound_to_video():
    """Eighteen small frames, so that the reference frame and the packed motion frames are few enough to keep exact."""
    model = lab.tiny_wan("s2v", "WanModel_S2V")
    extra = {"reference_latents": [lab.noise_of((1, 16, 1, 16, 16), 7)], "reference_motion": lab.noise_of((1, 16, 19, 16, 16), 8),
             "control_video": lab.noise_of((1, 16, 18, 16, 16), 9), "audio_embed": lab.noise_of((1, 25, 1024, 72), 10)}  # fmt: skip
    return _variant(model, shape=(1, 16, 18, 16, 16), positive=lab.prompt(2, **extra), negative=lab.prompt(3, **extra))


def animate():
    """Five layers: the face adapter is in every fifth."""
    model = lab.tiny_wan("animate", "AnimateWanModel", layers=5, module="model_animate", in_dim=36)
    extra = {"pose_video_latent": lab.noise_of((1, 16, 3, 32, 32), 7), "face_video_pixels": lab.noise_of((1, 3, 1, 512, 512), 8).tanh()}
    return _variant(model, positive=lab.prompt(2, **extra), negative=lab.prompt(3, **extra))


WAN_5B = {"in_dim": 48, "out_dim": 48}


def text_to_video_5b():
    return _variant(lab.tiny_wan("5b", **WAN_5B), shape=(1, 48, 4, 32, 32))


def image_to_video_5b():
    """The first frame is given: by a mask, which the model turns into a noise level for each frame."""
    shape, mask = (1, 48, 4, 32, 32), torch.ones(1, 1, 4, 32, 32)
    mask[:, :, 0] = 0
    return _variant(lab.tiny_wan("5b", **WAN_5B), shape=shape, latent=lab.noise_of(shape, 7), noise_mask=mask)


def odd_sizes():
    """Latents that are no multiple of anything."""
    seen = {}
    for shape in ((1, 16, 1, 66, 66), (1, 16, 3, 45, 62), (1, 16, 5, 37, 31)):
        seen[str(shape)] = _variant(MODEL, shape=shape)
    return seen


# not supported


def hunyuan_video():
    import comfy.ldm.hunyuan_video.model as hv
    import comfy.ops

    sizes = {"in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 256, "mlp_ratio": 4.0,
             "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "axes_dim": [16, 56, 56], "theta": 256, "patch_size": [1, 2, 2],
             "qkv_bias": True, "guidance_embed": True, "byt5": False, "meanflow": False, "use_cond_type_embedding": False,
             "vision_in_dim": None, "meanflow_sum": False}  # fmt: skip
    known = {f.name for f in dataclasses.fields(hv.HunyuanVideoParams)}
    kwargs = {k: v for k, v in sizes.items() if k in known}
    model = lab.load(hv.HunyuanVideo(operations=comfy.ops.disable_weight_init, **kwargs), "hv", prefix="")
    text = lab.prompt(2, tokens=40, pooled_output=torch.zeros(1, 768), guidance=6.0)
    p = patch(model, SHORT)
    out, dense = (sample(m, steps=4, positive=text, negative=text) for m in (p, model))
    return lab.brief(p) | {"same": torch.equal(out, dense), "sites": lab.reports(p)[-1]["sites"]}


def _declined(model, run=sample, **how):
    p = patch(model, SHORT)
    out, dense = (run(m, steps=4, **how) for m in (p, model))
    return lab.brief(p) | {k: lab.reports(p)[-1][k] for k in ("sites", "model")} | {"same": torch.equal(out, dense)}


def animate_2():
    """With the pose video, and without it, as outside the timestep window of core's node."""
    if importlib.util.find_spec("comfy.ldm.wan.model_animate2") is None:
        return {"missing": True}
    model = lab.tiny_wan("animate2", "WanAnimate2Model", module="model_animate2", metadata={"model_type": "animate2"}, in_dim=36)
    pose = lab.prompt(2, pose_video_latent=lab.noise_of((1, 16, 4, 32, 32), 7))
    return {"pose": _declined(model, shape=(1, 16, 5, 32, 32), positive=pose), "no pose": _declined(model)}


def causal():
    """By core's sampler for it, which goes block by block (here of two frames), and by a usual one."""
    if importlib.util.find_spec("comfy.ldm.wan.ar_model") is None:
        return {"missing": True}
    model = lab.tiny_wan("causal", "CausalWanModel", module="ar_model", metadata={"causal_ar": True})
    return {"by blocks": _declined(model, _sample_by_blocks), "at once": _declined(model)}


@torch.inference_mode()
def _sample_by_blocks(model, steps):
    sampler = lab.core_node("nodes_ar_video", "SamplerARVideo")(num_frame_per_block=2)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    start, texts = torch.zeros(lab.LATENT), (lab.prompt(2), lab.prompt(3))
    return comfy.sample.sample_custom(model, lab.noise_of(), 1.0, sampler, sigmas, *texts, start, disable_pbar=True, seed=1).clone()


def several_gpus():
    from mc_sparse.nodes import host

    original, host._is_multigpu = host._is_multigpu, lambda patcher: True
    try:
        p = patch(MODEL)
        out = sample(p)
    finally:
        host._is_multigpu = original
    return lab.brief(p) | {"same": torch.equal(out, DENSE)}


def memory_is_asked_for():
    """The loader is asked to leave room for the cache, on a model that is loaded the old way."""
    from mc_sparse.nodes import host

    class Accelerator:
        type = "cuda"

    class Patcher:
        model, load_device = MODEL.model, Accelerator()

        def get_free_memory(self, device):
            return 10**12

    shapes, shape = [], [1, 16, 81, 90, 160]

    def load(model, noise_shape, *args, **kwargs):
        shapes.append(list(noise_shape))

    run = host._new_run(_plan(), MODEL, torch.linspace(1, 0, 11))
    host._prepare_sampling(host.Session(run), 8)(load, Patcher(), shape, {}, model_options={})
    per_row = MODEL.model.memory_required(shape)
    return {"asked": (shapes[0][0] - 1) * per_row, "per_row": per_row, "rest": shapes[0][1:], "budget": run.cache.budget_bytes,
            "forecast": host._forecast(run, MODEL.model.diffusion_model, shape, 8)}  # fmt: skip


def _plan(**choices):
    from mc_sparse.nodes.patch_model import plan_of

    return plan_of(**(lab.WIDGETS | choices), schedule=None)


def forecast_holds():
    """The forecast of bytes is what the run held, for every recipe whose residual format is fixed."""
    from mc_sparse.nodes import host

    seen = {}
    for residual in ("bf16", "int4", "rank-8", "off"):
        for grouping in ("cells", "pddp"):
            p = patch(MODEL, SHORT, residual=residual, grouping=grouping)
            sample(p, steps=2, cfg=3.0)
            run = host._new_run(_plan(residual=residual, grouping=grouping), MODEL, torch.linspace(1, 0, 3))
            wanted = host._forecast(run, MODEL.model.diffusion_model, lab.LATENT, 2)
            seen[f"{residual} {grouping}"] = [wanted, lab.reports(p)[-1]["cache_bytes"]]
    return seen
