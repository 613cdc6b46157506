"""One model, one branch: schedule, repeatability, ends of every kind, inputs left alone."""
import gc
import logging
import weakref

import comfy.model_management
import lab
import torch
from lab import WrappersMP, patch, sample

MODEL = lab.tiny_wan()
DENSE = sample(MODEL)
AUTO = patch(MODEL)
FRESH = sample(AUTO)


def auto_run():
    return lab.brief(AUTO) | {"rel": lab.rel(FRESH, DENSE), "digest": lab.digest(FRESH)}


def full_density():
    p = patch(MODEL, density=1.0, tail="none", residual="off")
    return {"rel": lab.rel(sample(p), DENSE), "counts": lab.counts(p)}


def presets():
    seen = {}
    own = {"density": 0.0, "tail": "auto", "grouping": "auto", "granularity": "auto", "residual": "auto"}
    for preset, steps in (("auto", 10), ("paper", 10), ("paper-h3", 10), ("quality", 10), ("speed", 10), ("few-step", 6)):
        p = patch(MODEL, "preset", preset=preset, **own)
        out = sample(p, steps=steps)
        seen[preset] = {"rel": lab.rel(out, sample(MODEL, steps=steps)), **lab.brief(p)}
    return seen


def options():
    """Every choice of the combos runs and reaches the recipe."""
    seen, dense = {}, sample(MODEL, steps=5)
    choices = {"tail": ("none", "128", "64", "32"), "grouping": ("pddp", "cells"), "granularity": ("token", "cell32"),
               "residual": ("bf16", "int4", "rank-8", "off"), "backend": ("reference",)}  # fmt: skip
    for name, values in choices.items():
        for value in values:
            p = patch(MODEL, {"dense_start": "1", "anchors": "first"}, **{"density": 0.3, name: value})
            rel = lab.rel(sample(p, steps=5), dense)
            r = lab.reports(p)[-1]
            seen[f"{name} {value}"] = {"rel": rel, "recipe": r["recipe"].get(name, r["backend"]), "reuse": r["counts"]["reuse"]}
    return seen


def schedule_node():
    p = patch(MODEL, {"dense_start": "3", "anchors": "2, 6", "dense_end": "1", "dense_layers": "-1", "density_curve": "0:0.4 1:0.2"})
    sample(p)
    return lab.brief(p)


def second_prompt():
    return {"digest": lab.digest(sample(AUTO)), "counts": lab.counts(AUTO)}


def other_size_between():
    sample(AUTO, shape=(1, 16, 5, 32, 32), steps=8)
    return {"digest": lab.digest(sample(AUTO))}


def input_untouched():
    before = lab.snapshot(MODEL)
    sample(patch(MODEL))
    return {"same": lab.snapshot(MODEL) == before, "mentions": "mc_sparse" in str(lab.snapshot(MODEL)), "dense": lab.digest(sample(MODEL)),
            "dense_before": lab.digest(DENSE)}  # fmt: skip


def patched_twice():
    first = patch(MODEL, density=0.5)
    second = patch(first, density=0.2)
    sample(second)
    wrappers = {kind: {k: len(v) for k, v in keys.items()} for kind, keys in second.wrappers.items()}
    return {"wrappers": wrappers, "old": len(lab.reports(first)), "new": len(lab.reports(second)), **lab.brief(second),
            "density": lab.reports(second)[-1]["recipe"]["density"]}  # fmt: skip


def cloned():
    """Later nodes clone the MODEL, on older versions with copy.deepcopy."""
    p = patch(MODEL)
    c = p.clone().clone()
    return {"digest": lab.digest(sample(c)), "seen_by_original": len(lab.reports(p)), "same_holder": lab.reports(p) == lab.reports(c)}


def two_samplers():
    p = patch(MODEL, lab.FIRST)
    first, alone = sample(p), sample(patch(MODEL, lab.FIRST))
    second = sample(p, noise=lab.noise_of(seed=9), latent=first, denoise=0.5)
    return {"same": torch.equal(first, alone), "finite": bool(second.isfinite().all()), "runs": [r["counts"] for r in lab.reports(p)],
            "anchors": [r["anchors"] for r in lab.reports(p)]}  # fmt: skip


def _ended(p, **how):
    """Samples until it raises; what stayed behind."""
    seen, options = [], []

    def outer(executor, *args, **kwargs):
        guider = executor.class_obj
        options.append(guider.model_options)
        try:
            return executor(*args, **kwargs)
        finally:
            options.append(guider.model_options)

    def apply(executor, *args, **kwargs):
        session = args[5]["mc_sparse"]
        seen[:] = [weakref.ref(session), weakref.ref(session.run), session.run.cache, weakref.ref(session.run.cache)]
        return executor(*args, **kwargs)

    watched = lab.comfy.sd.comfy.model_patcher.ModelPatcher.clone(p)
    watched.wrappers = {WrappersMP.OUTER_SAMPLE: {"watch": [outer], **watched.wrappers[WrappersMP.OUTER_SAMPLE]},
                        WrappersMP.APPLY_MODEL: {"watch": [apply]}}  # fmt: skip
    error = None
    try:
        sample(watched, **how)
    except BaseException as e:
        error = type(e).__name__
        e.__traceback__ = None
    held = {"bytes": seen[2].bytes, "states": len(seen[2])} if seen else {}
    del seen[2]
    restored = options[0] is options[1]
    options.clear()
    gc.collect()
    return {"error": error, "restored": restored, "alive": [r() is not None for r in seen], **held, "status": lab.brief(p)["status"],
            "next": lab.digest(sample(p)), "next_counts": lab.counts(p)}  # fmt: skip


def interrupted():
    seen = {}
    for kind, step in (("dense", 0), ("anchor", 1), ("reuse", 3), ("last", 9)):

        def stop(i, x0, x, total, step=step):
            if i == step:
                raise comfy.model_management.InterruptProcessingException()

        seen[kind] = _ended(patch(MODEL), callback=stop)
    return seen


def out_of_memory():
    """Raised inside a dense, an anchor and a reuse call."""
    from mc_sparse.mcsparse_core import engine

    seen = {}
    for kind, name, at in (("anchor", "select_keys", 2), ("reuse", "token_sparse_attention", 7)):
        original, n = getattr(engine, name), [0]

        def failing(*args, original=original, n=n, at=at, **kwargs):
            n[0] += 1
            if n[0] == at:
                raise torch.OutOfMemoryError("injected")
            return original(*args, **kwargs)

        setattr(engine, name, failing)
        try:
            seen[kind] = _ended(patch(MODEL))
        finally:
            setattr(engine, name, original)
    return seen


def finished():
    return _ended(patch(MODEL))


def memory_cap():
    from mc_sparse.nodes import host

    original = host._budget
    host._budget = lambda *args: 20_000
    try:
        p = patch(MODEL)
        out = sample(p)
    finally:
        host._budget = original
    return lab.brief(p) | {"rel": lab.rel(out, DENSE), "cache_bytes": lab.reports(p)[-1]["cache_bytes"]}


def short_sequence():
    p = patch(MODEL, min_tokens=4096)
    return lab.brief(p) if (out := sample(p)) is None else lab.brief(p) | {"same": torch.equal(out, DENSE)}


def too_few_steps():
    p = patch(MODEL, lab.FIRST)
    sample(p, steps=1)
    return lab.brief(p)


def odd_sigmas():
    seen = {}
    custom = [1.0, 0.97, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.1, 0.05, 0.0]
    for name, sigmas in (("rising", [0.2, 0.8, 0.0]), ("custom", custom)):
        p = patch(MODEL, lab.FIRST)
        sample(p, sigmas=torch.tensor(sigmas))
        seen[name] = lab.brief(p)
    return seen


def messages():
    """What a user reads who does something that cannot work."""
    cases = {
        "no model": lambda: lab.call("MCSparsePatchModel", model=None, **lab.WIDGETS),
        "not a model": lambda: lab.call("MCSparsePatchModel", model=object(), **lab.WIDGETS),
        "density": lambda: patch(MODEL, density=0.03),
        "custom": lambda: patch(MODEL, "preset", preset="custom", density=0.0),
        "layers": lambda: patch(MODEL, {"dense_layers": "0, 7"}),
        "from the end": lambda: patch(MODEL, {"dense_layers": "-3"}),
        "layer text": lambda: patch(MODEL, {"dense_layers": "5-3"}),
        "start text": lambda: patch(MODEL, {"dense_start": "some"}),
        "anchor in the start": lambda: patch(MODEL, {"dense_start": "6", "anchors": "2"}),
        "anchor in the start, at run time": lambda: sample(patch(MODEL, {"dense_start": "50%", "anchors": "2"})),
        "decode": lambda: lab.call("MCSparseDemoDecode", samples={"samples": torch.zeros(1, 4, 8, 8)}),
    }
    said, before = {}, lab.snapshot(MODEL)
    for name, case in cases.items():
        try:
            case()
        except Exception as e:
            said[name] = f"{type(e).__name__}: {e}"
    said["validate"] = [lab.NODES["MCSparsePatchModel"].validate_inputs(density=d) for d in (0.0, 0.5, None, 0.03)]
    return said | {"untouched": lab.snapshot(MODEL) == before}


def stats_node():
    p = patch(MODEL)
    image = {}

    def show(model):
        value, text, as_json, chart = lab.call("MCSparseStats", model=model, value=7)
        return {"value": value, "text": text, "json": as_json, "shape": list(chart.shape), "dark": float((chart < 0.5).float().mean())}

    image["never"], image["no run"] = show(MODEL), show(p)
    sample(p)
    return image | {"run": show(p)}


def log_lines():
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append((record.levelname, record.getMessage()))

    keep, root = Keep(), logging.getLogger()
    level = root.level
    root.addHandler(keep)
    root.setLevel(logging.INFO)
    try:
        sample(patch(MODEL))
        quiet, lines[:] = list(lines), []
        sample(patch(MODEL, verbose=True))
    finally:
        root.removeHandler(keep)
        root.setLevel(level)
    ours = [[line for line in part if "MC-Sparse" in line[1]] for part in (quiet, lines)]
    return {"quiet": ours[0], "verbose": ours[1]}
