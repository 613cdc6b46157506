"""Seconds of one model step of Wan 2.1, plain, dense, anchor and reuse; run by path on a CUDA machine with diffusers.

    python benchmarks/bench_wan_step.py [--size 14b] [--layers 10] [--latent 21 90 160] [--preset auto] [--density 0.1] [--out FILE]

The model has Wan's sizes and random weights, so that nothing is downloaded; its layers are alike, and --layers takes the first few of
them. "plain" is diffusers as it is, with PyTorch's attention; dense, anchor and reuse are steps of one `sparsify` run, of which dense
ones keep that attention. `run_seconds` adds the steps of a whole run up: it was not run.
"""
from __future__ import annotations

import argparse
import functools

import harness
import torch
from diffusers import WanTransformer3DModel

from mc_sparse import SparsePlan, flow_progress, sparsify

SIZES = {
    "14b": {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    "1.3b": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
}
SHIFT, TEXT_TOKENS = 5.0, 512


def model(size: str, layers: int):
    """Random weights, bfloat16, made on the GPU."""
    with torch.device("cuda"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return WanTransformer3DModel(**{**SIZES[size], "num_layers": layers}).eval()
        finally:
            torch.set_default_dtype(before)


def seconds(call) -> float:
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def measure(transformer, latent: list[int], steps: int, preset: str, density: float | None) -> dict:
    levels = [1 - i / steps for i in range(steps + 1)]
    sigmas = [SHIFT * u / (1 + (SHIFT - 1) * u) for u in levels]
    x = torch.randn(1, 16, *latent, device="cuda", dtype=torch.bfloat16)
    text = torch.randn(1, TEXT_TOKENS, 4096, device="cuda", dtype=torch.bfloat16)

    def evaluate(sigma: float):
        transformer(x, torch.full((1,), 1000 * sigma, device="cuda"), text)

    row: dict = {}
    evaluate(sigmas[0])
    row["plain"] = seconds(functools.partial(evaluate, sigmas[0]))
    with sparsify(transformer, SparsePlan(preset, density=density), sigmas, flow_progress(sigmas, shift=SHIFT)) as run:
        timeline = run.timeline
        first, last = timeline.anchors[0], timeline.anchors[-1]
        kinds = {"dense": [0, 0], "anchor": [first], "reuse": [first + 1, first + 2, first + 2]}
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        # The first anchor and reuse compile and check their kernels, so the last ones count.
        for kind, at in (*((k, i) for k, some in kinds.items() for i in some), ("anchor", last), ("reuse", last + 1)):
            run.begin_evaluation(sigmas[at])
            taken[kind].append(seconds(functools.partial(evaluate, sigmas[at])))
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        report = run.close()
    row |= {kind: times[-1] for kind, times in taken.items()}
    row["cache_gb"] = report["cache_bytes"] / 1e9
    row["counts"], row["residuals"] = report["counts"], report.get("residuals")
    row["attention_seconds"] = report["attention_seconds"]
    row["demotions"], row["notes"] = report["demotions"], report["notes"]
    anchors, reuse = len(timeline.anchors), timeline.reuse_steps
    row["run_steps"] = {"dense": steps - anchors - reuse, "anchor": anchors, "reuse": reuse}
    row["run_seconds"] = sum(count * row[kind] for kind, count in row["run_steps"].items())
    row["run_seconds_plain"], row["run_seconds_dense"] = steps * row["plain"], steps * row["dense"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="14b")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--latent", type=int, nargs=3, default=[21, 90, 160], metavar=("FRAMES", "HEIGHT", "WIDTH"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--preset", nargs="+", default=["auto", "quality", "paper"])
    parser.add_argument("--density", type=float)
    parser.add_argument("--out", help="JSON file to write")
    arguments = parser.parse_args()
    harness.need_gpu()
    torch.manual_seed(0)
    transformer, rows = model(arguments.size, arguments.layers), []
    tokens = arguments.latent[0] * arguments.latent[1] * arguments.latent[2] // 4
    with torch.inference_mode():
        for preset in arguments.preset:
            about = {"model": f"Wan 2.1 {arguments.size}", "layers": arguments.layers, "of_layers": SIZES[arguments.size]["num_layers"],
                     "tokens": tokens, "preset": preset, "density": arguments.density, "steps": arguments.steps}  # fmt: skip
            rows.append(about | measure(transformer, arguments.latent, arguments.steps, preset, arguments.density))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    if arguments.out:
        harness.write(arguments.out, rows)


if __name__ == "__main__":
    main()
