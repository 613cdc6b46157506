"""The demo model: Wan 2.1 T2V in small, by diffusers, with reading, writing and plain Euler sampling."""

import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parent
GRID = (13, 36, 36)  # latent frames, height, width of the demo: 13 x 18 x 18 tokens, 26 frames of 72 x 72 pixels
SHIFT = 3.0  # of the noise schedule, in training and sampling
CONFIG = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 1024,
    "num_layers": 6,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
# diffusers' names -> Wan's own, which ComfyUI and `from_single_file` read. Applied in this order.
WAN_NAMES = (
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
    ("condition_embedder.time_proj", "time_projection.1"),
    ("attn1", "self_attn"),
    ("attn2", "cross_attn"),
    (".to_out.0.", ".o."),
    (".to_q.", ".q."),
    (".to_k.", ".k."),
    (".to_v.", ".v."),
    ("norm2", "norm3"),
    ("ffn.net.0.proj", "ffn.0"),
    ("ffn.net.2", "ffn.2"),
    ("proj_out", "head.head"),
)


def new():
    """The model with random weights, float32, on the CPU."""
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**CONFIG)


def load(folder=FOLDER):
    """The trained model, float32, on the CPU, from `model.safetensors` and `config.json` of a folder; needs no network."""
    from diffusers import WanTransformer3DModel

    file = str(Path(folder) / "model.safetensors")
    return WanTransformer3DModel.from_single_file(file, config=str(folder)).eval()  # float32 unless told otherwise


def save(weights, folder=FOLDER):
    """Write `model.safetensors` (float16, Wan's names) and `config.json` from a state dict of `new()`."""
    save_file({wan_name(name): value.half().cpu().contiguous() for name, value in weights.items()}, Path(folder) / "model.safetensors")
    config = {"_class_name": "WanTransformer3DModel", **CONFIG}
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def wan_name(name):
    """Wan's name of a parameter."""
    if name == "scale_shift_table":
        return "head.modulation"
    for diffusers_part, wan_part in WAN_NAMES:
        name = name.replace(diffusers_part, wan_part)
    return name.replace("scale_shift_table", "modulation")


def token_grid(grid=GRID):
    """Tokens of a latent grid (frames, height, width) along each axis."""
    return tuple(n // p for n, p in zip(grid, CONFIG["patch_size"], strict=True))


def shifted(u, shift=SHIFT):
    """Noise level of uniform time u in 0..1, both 1 at pure noise."""
    return shift * u / (1 + (shift - 1) * u)


@torch.no_grad()
def sample(model, text, grid=GRID, steps=24, guidance=1.0, empty=None, shift=SHIFT, seed=0):
    """Latents (B, 16, *grid) float32 by Euler steps from seeded noise, for embeddings `text` (B, L, 4096).

    A guidance other than 1 needs `empty` (1, L, 4096), the embedding of the empty prompt.
    """
    latents = torch.randn(len(text), 16, *grid, generator=torch.Generator().manual_seed(seed)).to(text.device)
    levels = shifted(torch.linspace(1, 0, steps + 1), shift).tolist()
    for level, following in itertools.pairwise(levels):
        time = torch.full((len(text),), 1000 * level, device=text.device)
        velocity = model(latents, time, text).sample.float()
        if guidance != 1:
            without = model(latents, time, empty.expand_as(text)).sample.float()
            velocity = without + guidance * (velocity - without)
        latents = latents + (following - level) * velocity
    return latents
