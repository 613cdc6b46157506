"""Several conditionings: batched, split, areas, windows, extra passes, late ones; and samplers that call the model in odd ways."""
import comfy.samplers
import lab
import torch
from lab import WrappersMP, patch, sample

MODEL = lab.tiny_wan()
AUTO = patch(MODEL)


def _split(model, mode: str):
    """A clone whose conditionings run batched, split, or alternately so from one evaluation to the next."""
    clone, n = model.clone(), [0]
    real = clone.model
    fits, tight = (lambda *a, **k: 0), (lambda *a, **k: 1e30)

    def predict(executor, *args, **kwargs):
        real.memory_required = tight if mode == "split" or (mode == "alternating" and n[0] % 2) else fits
        n[0] += 1
        try:
            return executor(*args, **kwargs)
        finally:
            del real.memory_required

    clone.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "test", predict)
    return clone


def guidance():
    """Batching must not matter. At density 0.3, where no key is near the threshold: rounding flips none."""
    p = patch(MODEL, density=0.3)
    out = {mode: sample(_split(p, mode), cfg=4.0) for mode in ("batched", "split", "alternating")}
    counts = [r["counts"] for r in lab.reports(p)]
    return {"split": lab.rel(out["split"], out["batched"]), "alternating": lab.rel(out["alternating"], out["batched"]), "counts": counts,
            "against_dense": lab.rel(out["batched"], sample(MODEL, cfg=4.0))}  # fmt: skip


def text_lengths():
    """Prompts of different length cannot be batched."""
    sample(AUTO, cfg=4.0, negative=lab.prompt(3, tokens=600))
    return lab.brief(AUTO)


def batch_of_two():
    noise = lab.noise_of((2, *lab.LATENT[1:]))
    text = lab.prompt(2, rows=2)
    both = sample(AUTO, noise=noise, positive=text, shape=noise.shape, cfg=3.0)
    counts, alone = lab.counts(AUTO), []
    for i in range(2):
        alone.append(sample(AUTO, noise=noise[i : i + 1], positive=[[text[0][0][i : i + 1], {}]], cfg=3.0))
    return {"rel": [lab.rel(both[i : i + 1], alone[i]) for i in range(2)], "counts": counts, "apart": lab.rel(alone[0], alone[1])}


def areas():
    p = patch(MODEL)
    shape = (1, 16, 4, 64, 32)
    positive = lab.prompt(2) + [[lab.prompt(5)[0][0], {"area": (4, 32, 32, 0, 32, 0), "strength": 1.0}]]
    out, dense = (sample(m, cfg=3.0, shape=shape, positive=positive) for m in (p, MODEL))
    return lab.brief(p) | {"finite": bool(out.isfinite().all()), "rel": lab.rel(out, dense)}


def timestep_range():
    """The second prompt joins at half way."""
    positive = [[lab.prompt(2)[0][0], {"start_percent": 0.0, "end_percent": 0.5}], [lab.prompt(5)[0][0], {"start_percent": 0.5}]]
    sample(AUTO, positive=positive)
    return lab.brief(AUTO)


def late_guidance():
    """cfg goes from 1 to 4 at half way, so the negative side appears late."""
    m, n = AUTO.clone(), [0]

    def predict(executor, *args, **kwargs):
        executor.class_obj.cfg = 4.0 if n[0] >= 5 else 1.0
        n[0] += 1
        return executor(*args, **kwargs)

    m.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "test", predict)
    sample(m, cfg=4.0)
    return lab.brief(AUTO)


def windows():
    seen = {}
    for schedule in ("standard_static", "standard_uniform"):
        node = lab.core_node("nodes_context_windows", "ContextWindowsManualNode")
        m = node(model=MODEL, context_length=4, context_overlap=1, context_schedule=schedule, context_stride=1, closed_loop=False,
                 fuse_method="pyramid", dim=2, freenoise=False)  # fmt: skip
        shape = (1, 16, 7, 32, 32)
        p = patch(m)
        out = sample(p, shape=shape, cfg=3.0)
        seen[schedule] = lab.brief(p) | {"rel": lab.rel(out, sample(m, shape=shape, cfg=3.0)), "cache": lab.reports(p)[-1]["cache_bytes"]}
    return seen


def skip_layer():
    seen = {}
    for name in ("SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple"):
        node = lab.core_node("nodes_slg", name)
        inputs = {"double_layers": "1", "single_layers": "", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0, "rescaling_scale": 0.0}
        m = node(model=MODEL, **inputs)
        p, after = patch(m), node(model=patch(MODEL), **inputs)
        out = sample(p, cfg=3.0)
        seen[name] = lab.brief(p) | {"rel": lab.rel(out, sample(m, cfg=3.0)), "order": lab.rel(sample(after, cfg=3.0), out),
                                     "skipping": lab.rel(sample(m, cfg=3.0), sample(MODEL, cfg=3.0))}  # fmt: skip
    return seen


def samplers():
    seen = {}
    for sampler in ("euler", "heun", "uni_pc", "heunpp2", "dpmpp_2s_ancestral", "dpm_2", "sa_solver", "dpmpp_2m_sde", "dpm_fast", "lcm"):
        p = patch(MODEL)
        out = sample(p, sampler=sampler)
        seen[sampler] = lab.brief(p) | {"finite": bool(out.isfinite().all())}
    return seen


def advanced_split():
    """Two samplers share one schedule: part one ends at the step where part two begins."""
    seen = {}
    for at in (1, 2, 3, 5, 8):
        p = patch(MODEL, lab.FIRST)
        half = sample(p, start_step=0, last_step=at, force_full_denoise=False)
        nothing = torch.zeros(lab.LATENT)
        out = sample(p, noise=nothing, latent=half, disable_noise=True, start_step=at, last_step=10, force_full_denoise=True)
        first, second = lab.reports(p)
        actions = [t[2] for t in second["timeline"] if t[0] == 0]
        seen[str(at)] = {"first": first["counts"], "second": second["counts"], "anchors": [first["anchors"], second["anchors"]],
                         "second_actions": actions, "finite": bool(out.isfinite().all())}  # fmt: skip
    return seen


def hires():
    """A second sampler on the upscaled result, from the middle of the noise range."""
    p = patch(MODEL, lab.FIRST)
    small = sample(p)
    large = torch.nn.functional.interpolate(small, scale_factor=(1, 2, 2))
    sample(p, shape=large.shape, latent=large, denoise=0.4)
    return {"anchors": [r["anchors"] for r in lab.reports(p)], "counts": [r["counts"] for r in lab.reports(p)]}


def guider():
    """Another guider, custom sigmas, over the same model."""
    from comfy_extras.nodes_custom_sampler import Guider_DualCFG

    g = Guider_DualCFG(AUTO)
    try:
        g.set_conds(lab.prompt(2), lab.prompt(5), lab.prompt(3))
        g.set_cfg(3.0, 2.0)
    except TypeError:
        g.set_cfg(3.0, 2.0, nested=False)
    sampling = AUTO.get_model_object("model_sampling")
    with torch.inference_mode():
        g.sample(lab.noise_of(), torch.zeros(lab.LATENT), comfy.samplers.sampler_object("euler"),
                 comfy.samplers.calculate_sigmas(sampling, "simple", 10), seed=1, disable_pbar=True)  # fmt: skip
    return lab.brief(AUTO)


def two_experts():
    """Wan 2.2: one MODEL each for the high and the low noise half."""
    other = lab.tiny_wan("wan_low", layers=3)
    high, low = patch(MODEL, lab.FIRST), patch(other, lab.FIRST)
    half = sample(high, start_step=0, last_step=5)
    sample(low, noise=torch.zeros(lab.LATENT), latent=half, disable_noise=True, start_step=5, last_step=10, force_full_denoise=True)
    return {"high": lab.brief(high), "low": lab.brief(low)}
