"""Show what the demo model can do and whether its attention is worth sparsifying.

    python demo/report.py --device cuda

Writes into demo/report: sheets of dense samples, one row per prompt (samples.png; samples_large.png with 12,096 tokens;
samples_guided.png with guidance 3), loss.png from loss.csv, and concentration.json: per noise level and layer the share of attention
mass in the top 15 % and 25 % keys of a query, beside random weights. Needs diffusers and matplotlib.
"""

import argparse
import csv
import importlib.util
import json
import sys
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).parent
try:
    from mc_sparse.demo import clips, codec, model, prompts
except ImportError:  # not installed: this folder as a package of its own
    spec = importlib.util.spec_from_file_location("demo", HERE / "__init__.py", submodule_search_locations=[str(HERE)])
    sys.modules["demo"] = importlib.util.module_from_spec(spec)
    from demo import clips, codec, model, prompts

SHARES = (0.15, 0.25)
NOISE_LEVELS = (0.95, 0.8, 0.5, 0.2)


class Concentration(TorchFunctionMode):
    """While active, collects for each self-attention call the mean mass of each query's top keys, one list entry per share of SHARES."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q = kwargs.get("query", args[0] if args else None)
            k = kwargs.get("key", args[1] if len(args) > 1 else None)
            if q.shape == k.shape:
                self.calls.append(top_mass(q, k))
        return func(*args, **kwargs)


def top_mass(q, k):
    """Mean over batch, heads and queries of the attention mass in the top keys, for each share of SHARES; q, k (B, H, S, D)."""
    totals = torch.zeros(len(SHARES), dtype=torch.float64)
    queries = k.shape[2]
    for chunk in q.float().split(1024, dim=2):
        mass = (chunk @ k.float().transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        for index, share in enumerate(SHARES):
            totals[index] += mass.topk(round(share * queries), sorted=False).values.sum().item()
    return (totals / q.shape[:3].numel()).tolist()


@torch.no_grad()
def concentration(net, grid, device):
    """{noise level: {"top15": [per layer], "top25": [per layer]}} on one noisy clip of each scene."""
    generator = torch.Generator(device).manual_seed(0)
    scenes = torch.arange(len(clips.SCENES), device=device)
    clean = codec.encode(clips.render(scenes, *(2 * n for n in grid), generator))
    noise = torch.randn(clean.shape, device=device, generator=generator)
    text = prompts.table()[:-1].to(device)
    result = {}
    for level in NOISE_LEVELS:
        layers = torch.zeros(net.config.num_layers, len(SHARES), dtype=torch.float64)
        for i in range(len(clean)):
            with Concentration() as found:
                net(torch.lerp(clean[i : i + 1], noise[i : i + 1], level), torch.full((1,), 1000 * level, device=device), text[i : i + 1])
            layers += torch.tensor(found.calls, dtype=torch.float64) / len(clean)
        result[str(level)] = {f"top{100 * s:.0f}": [round(v, 4) for v in layers[:, i].tolist()] for i, s in enumerate(SHARES)}
    return result


def sheet(net, names, grid, file, device, columns=8, **settings):
    """One sampled clip per prompt, `columns` of its frames side by side, as a png."""
    text = torch.cat([prompts.embedding(name) for name in names]).to(device)
    frames = codec.to_uint8(codec.decode(model.sample(net, text, grid, **settings))).cpu()
    picked = frames[:, torch.linspace(0, frames.shape[1] - 1, columns).round().long()]
    b, t, h, w, _ = picked.shape
    figure, axes = plt.subplots(b, 1, figsize=(t * 1.5, b * (1.5 * h / w + 0.25)), layout="constrained", squeeze=False)
    for axis, name, row in zip(axes[:, 0], names, picked, strict=True):
        axis.imshow(row.permute(1, 0, 2, 3).reshape(h, t * w, 3).numpy(), interpolation="nearest")
        axis.set_title(name or '""', fontsize=8, pad=2)
        axis.axis("off")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def loss_plot(table, file):
    """The loss curve, one colour per latent grid, from loss.csv."""
    with open(table, newline="") as source:
        rows = list(csv.DictReader(source))
    figure, axis = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for grid in dict.fromkeys(row["latent_grid"] for row in rows):
        chosen = [row for row in rows if row["latent_grid"] == grid]
        axis.plot([int(r["step"]) for r in chosen], [float(r["loss"]) for r in chosen], ".", markersize=3, label=grid)
    axis.set(xlabel="step", ylabel="flow matching loss", yscale="log")
    axis.legend(title="latent grid", fontsize=7)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path, default=HERE, help="folder of model.safetensors and config.json")
    parser.add_argument("--only", choices=("loss", "concentration", "samples"))
    args = parser.parse_args()
    device = torch.device(args.device)
    out = args.model / "report"
    out.mkdir(exist_ok=True)
    net = model.load(args.model).to(device)
    names = prompts.names()
    if args.only in (None, "loss"):
        loss_plot(out / "loss.csv", out / "loss.png")
    if args.only in (None, "samples"):
        sheet(net, names, model.GRID, out / "samples.png", device)
        sheet(net, [*names[:2], names[6]], (16, 54, 56), out / "samples_large.png", device)
        sheet(net, names[:4], model.GRID, out / "samples_guided.png", device, guidance=3.0, empty=prompts.embedding("").to(device))
    if args.only in (None, "concentration"):
        torch.manual_seed(0)
        found = {"tokens": model.token_grid(), "trained": concentration(net, model.GRID, device)}
        found["random_weights"] = concentration(model.new().to(device).eval(), model.GRID, device)
        (out / "concentration.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
