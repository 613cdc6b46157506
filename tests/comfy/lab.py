"""A ComfyUI process to experiment in: loads the pack as ComfyUI does, makes tiny random models, samples. Runs in ComfyUI's interpreter."""
import asyncio
import hashlib
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COMFYUI = Path(os.environ["LAB_COMFYUI"])
WORK = Path(os.environ["LAB_WORK"])

sys.path.insert(0, str(COMFYUI))
sys.argv = ["main.py", "--cpu", "--use-pytorch-cross-attention"]
import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()
import comfy.ops  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.samplers  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from comfy.patcher_extension import WrappersMP  # noqa: E402, F401
from safetensors.torch import save_file  # noqa: E402

LATENT = (1, 16, 4, 32, 32)  # 1024 tokens of Wan
LAYERS = 2
# Everything fixed, so that presets can be tuned without touching these tests.
WIDGETS = {
    "preset": "auto", "density": 0.1, "tail": "64", "grouping": "cells", "granularity": "token", "residual": "bf16", "min_tokens": 1024,
    "backend": "auto", "verbose": False,
}  # fmt: skip
STEPS = {"dense_start": "2", "anchors": "1, 5", "dense_end": "0", "dense_layers": "", "density_curve": ""}
FIRST = {"dense_start": "20%", "anchors": "first"}  # for runs that are a part of a schedule


def load_pack() -> dict:
    """Node classes of this pack by id, loaded from its folder under a name made from the path, as ComfyUI does."""
    name = str(ROOT).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    extension = asyncio.run(module.comfy_entrypoint())
    return {cls.GET_SCHEMA().node_id: cls for cls in asyncio.run(extension.get_node_list())}


NODES = load_pack()


def call(node_id: str, **inputs):
    """Outputs of one of our nodes."""
    return NODES[node_id].execute(**inputs).result


def patch(model, schedule=None, **widgets):
    """A patched MODEL; schedule: what differs from STEPS, or "preset" for the preset's own."""
    if schedule != "preset":
        widgets["schedule"] = call("MCSparseSchedule", **(STEPS | (schedule or {})))[0]
    return call("MCSparsePatchModel", model=model, **(WIDGETS | widgets))[0]


def reports(model) -> list[dict]:
    return model.get_attachment("mc_sparse").latest()


def core_node(module: str, name: str):
    """Call a node of ComfyUI itself, V1 or V3, with only the inputs that this version knows; first output."""

    def run(**inputs):
        cls = getattr(importlib.import_module(f"comfy_extras.{module}"), name)
        function = cls.execute if hasattr(cls, "execute") else getattr(cls(), cls.FUNCTION)
        known = inspect.signature(function).parameters
        out = function(**{k: v for k, v in inputs.items() if k in known})
        return (out.result if hasattr(out, "result") else out)[0]

    return run


def randomised(module: torch.nn.Module, seed=0) -> dict:
    """Weights that give lively, peaked attention: norms near 1, those of q and k at 3."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, like in module.state_dict().items():
        value = torch.randn(like.shape, generator=generator)
        if like.ndim > 1 and "modulation" not in name:
            value *= like[0].numel() ** -0.5
        elif "norm" in name and name.endswith("weight"):
            value = (3.0 if "norm_q" in name or "norm_k" in name else 1.0) * (1 + 0.1 * value)
        else:
            value *= 0.1
        state[name] = value
    return state


def load(module: torch.nn.Module, name: str, prefix="", **transformer):
    """A model as its weights file would load; transformer: what its metadata says, for classes that the weights do not tell."""
    path = WORK / f"{name}.safetensors"
    if not path.exists():
        metadata = {"config": json.dumps({"transformer": transformer})} if transformer else None
        save_file({prefix + k: v.contiguous() for k, v in randomised(module).items()}, path, metadata)
    return comfy.sd.load_diffusion_model(str(path))


def tiny_wan(name="wan", cls="WanModel", layers=LAYERS, module="model", metadata=None, **config):
    wan = importlib.import_module(f"comfy.ldm.wan.{module}")
    sizes = {"dim": 256, "ffn_dim": 256, "num_heads": 2, "in_dim": 16, "out_dim": 16, "freq_dim": 256, "text_dim": 4096}
    model = getattr(wan, cls)(num_layers=layers, operations=comfy.ops.disable_weight_init, **(sizes | config))
    return load(model, name, **(metadata or {}))


def noise_of(shape=LATENT, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def prompt(seed=2, tokens=77, width=4096, rows=1, **extra):
    return [[torch.randn(rows, tokens, width, generator=torch.Generator().manual_seed(seed)), extra]]


def sample(model, steps=10, cfg=1.0, sampler="euler", shape=LATENT, seed=1, positive=None, negative=None, noise=None, latent=None, **more):
    """Samples as KSampler does, in inference mode as the server does."""
    with torch.inference_mode():
        return comfy.sample.sample(
            model, noise_of(shape, seed) if noise is None else noise, steps, cfg, sampler, "simple", positive or prompt(2),
            negative or prompt(3), torch.zeros(shape) if latent is None else latent, disable_pbar=True, seed=seed, **more,
        ).clone()  # fmt: skip


def digest(tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def rel(a, b) -> float:
    return ((a - b).norm() / b.norm()).item()


def counts(model) -> dict:
    return reports(model)[-1]["counts"]


def brief(model) -> dict:
    """What most tests ask of the last run."""
    r = reports(model)[-1]
    asked = ("status", "counts", "reasons", "anchors", "steps", "evaluations", "notes", "passed_through", "timeline", "dense_path")
    return {k: r[k] for k in asked}


def snapshot(model):
    """Everything a patch could have changed on a MODEL, comparable; leaves by identity."""

    def walk(x):
        if isinstance(x, dict):
            return {str(k): walk(v) for k, v in x.items()}
        if isinstance(x, list | tuple):
            return [walk(v) for v in x]
        return x if isinstance(x, str | int | float | bool | None) else id(x)

    parts = ("model_options", "wrappers", "callbacks", "attachments", "object_patches", "patches")
    return {part: walk(getattr(model, part)) for part in parts}
