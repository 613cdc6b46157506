"""The demo: one clip, denoised dense and by several sparse methods side by side, with the same seed, prompt and steps.

Every step is run for all methods in turn, so that their times are taken under the same load. `produce` writes the results.
"""
from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .. import __version__
from ..kernels import registry
from ..kernels.shapes import Geometry
from ..mcsparse_core.diffusers_host import self_attention, sparsify
from ..mcsparse_core.plan import SparsePlan
from ..mcsparse_core.precision import PRECISIONS
from ..mcsparse_core.run import SparseRun
from ..mcsparse_core.schedule import flow_progress
from . import codec, model, prompts
from .metrics import psnr, ssim
from .page import write_page
from .picture import sheet, side_by_side
from .vanilla import VanillaBlockSparse

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Method:
    """One row of the demo: a method's name in metrics.json and the plan it runs, None for dense and for the block-sparse baseline."""

    name: str
    method: str
    density: float
    plan: SparsePlan | None = None


def methods(backend: str, precision: str = "auto") -> list[Method]:
    """dense, the paper's method, ours and vanilla block-sparse, all with the same warm-up. precision: of ours."""

    def plan(preset: str, density: float, precision: str = "bf16") -> SparsePlan:
        return SparsePlan(preset=preset, density=density, min_tokens=1024, backend=backend, precision=precision)

    suffix = "" if precision == "auto" else f" {precision}"

    return [
        Method("dense", "dense", 1.0),
        Method("vanilla block-sparse 25 %", "vanilla-bsa", 0.25),
        Method("paper 25 %", "mc-sparse-paper", 0.25, plan("paper", 0.25)),
        Method("paper 15 %", "mc-sparse-paper", 0.15, plan("paper", 0.15)),
        Method(f"ours 15 %{suffix}", "mc-sparse", 0.15, plan("auto", 0.15, precision)),
        Method(f"ours 10 %{suffix}", "mc-sparse", 0.10, plan("auto", 0.10, precision)),
    ]


@dataclass
class Lane:
    """One method's clip on its way from noise to picture."""

    method: Method
    transformer: torch.nn.Module
    latents: Tensor
    run: SparseRun | None = None
    vanilla: VanillaBlockSparse | None = None
    report: dict | None = None
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of each model evaluation, by kind of step

    def kind(self, step: int) -> str:
        if self.vanilla:
            return "reuse" if self.vanilla.is_sparse(step) else "dense"
        if self.run is None or self.run.timeline.due(step) is None or step >= self.run.timeline.dense_from:
            return "dense"
        return "anchor" if step in self.run.timeline.anchors else "reuse"

    def counts(self) -> dict[str, int]:
        if self.report:
            return self.report["counts"]
        if self.vanilla:
            return {"dense": self.vanilla.dense_calls, "anchor": 0, "reuse": self.vanilla.sparse_calls}
        return {"dense": sum(map(len, self.seconds.values())) * len(self.transformer.blocks), "anchor": 0, "reuse": 0}

    def actions(self) -> list[str]:
        """For each block one letter per step: d dense, a anchor, r reuse (sparse)."""
        steps, blocks = sum(map(len, self.seconds.values())), len(self.transformer.blocks)
        letters = [["d"] * steps for _ in range(blocks)]
        if self.report:
            for step, block, action, _ in self.report["timeline"]:
                letters[block][step] = action[0]
        elif self.vanilla:
            for block in set(range(blocks)) - set(self.vanilla.dense_layers):
                letters[block] = [self.kind(step)[0] for step in range(steps)]
        return ["".join(row) for row in letters]

    def dit_seconds(self) -> float:
        """Time of all model evaluations: for each kind of step, their number times their median."""
        return sum(len(s) * statistics.median(s) for s in self.seconds.values())


@torch.inference_mode()
def compare(
    prompt: str, steps: int, seed: int, grid=model.GRID, device: torch.device | None = None, tick=lambda text: None,
    precision: str = "auto",
) -> tuple[list[Lane], dict]:  # fmt: skip
    """Denoises one clip with every method, step by step in turn. Returns the lanes and facts about the machine.

    grid: latent frames, height and width. tick(text) is called after each model evaluation. precision: of ours, as in SparsePlan.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    transformer = model.load()
    transformer = transformer.to(device) if dtype == torch.float32 else transformer.to(device, dtype)
    noise = torch.randn(1, 16, *grid, generator=torch.Generator().manual_seed(seed)).to(device)
    probe = torch.empty(1, 1, math.prod(model.token_grid(grid)), transformer.config.attention_head_dim, dtype=dtype, device=device)
    backend = "reference" if registry.why_none(Geometry.of(probe, probe)) else "auto"
    sigmas = [model.shifted(1 - i / steps) for i in range(steps + 1)]
    progress = flow_progress(sigmas, model.SHIFT)
    text = prompts.embedding(prompt).to(device, dtype)
    lanes = []
    with ExitStack() as stack:
        for method in methods(backend, precision):
            lane = Lane(method, copy.deepcopy(transformer), noise.clone())
            if method.plan:
                lane.run = stack.enter_context(sparsify(lane.transformer, method.plan, sigmas, progress))
            elif method.method == "vanilla-bsa":
                # The paper's warm-up and dense layers, as the paper gives its baselines.
                lane.vanilla = VanillaBlockSparse(SparsePlan(preset="paper", density=method.density), progress[:-1], backend)
                stack.enter_context(self_attention(lane.transformer, lane.vanilla))
            lanes.append(lane)
        lanes[0].transformer(noise.to(dtype), torch.ones(1, device=device) * 1000, text)  # first-touch costs stay out of the times
        for step in range(steps):
            for lane in lanes:
                _step(lane, step, sigmas, text, dtype)
                tick(lane.method.name)
        for lane in lanes:
            if lane.run:
                lane.report = lane.run.close()
    machine = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "backend": backend,
    }
    return lanes, machine


def _step(lane: Lane, step: int, sigmas: list[float], text: Tensor, dtype: torch.dtype):
    sigma, device = sigmas[step], lane.latents.device
    timestep = torch.full((1,), sigma * 1000, device=device)
    if lane.run:
        lane.run.begin_evaluation(sigma)
    elif lane.vanilla:
        lane.vanilla.step = step
    began = _clock(device)
    velocity = lane.transformer(lane.latents.to(dtype), timestep, text, return_dict=False)[0]
    lane.seconds[lane.kind(step)].append(_clock(device) - began)
    lane.latents += (sigmas[step + 1] - sigma) * velocity.float()


def _clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def results(lanes: list[Lane]) -> tuple[list[dict], list[Tensor]]:
    """One row per lane for metrics.json, and the clips (1, 3, T, H, W) in [-1, 1]."""
    clips = [codec.decode(lane.latents.float().cpu()) for lane in lanes]
    rows = []
    for lane, clip in zip(lanes, clips, strict=True):
        is_dense = lane.method.method == "dense"
        source = lane.report if lane.report else lane.vanilla.measured() if lane.vanilla else {}
        rows.append({
            "name": lane.method.name,
            "method": lane.method.method,
            "density": lane.method.density,
            "realised_density": 1.0 if is_dense else source["realised_density"],
            "precisions": source.get("precisions", {}),
            "psnr_db": None if is_dense else psnr(clip, clips[0]),
            "ssim": None if is_dense else ssim(clip, clips[0]),
            "retained_mass": 1.0 if is_dense else source["retained_mass"],
            "dit_seconds": lane.dit_seconds(),
            "counts": lane.counts(),
            "step_seconds": {kind: {"median": statistics.median(s), "steps": len(s)} for kind, s in lane.seconds.items()},
        })  # fmt: skip
    return rows, clips


def table(rows: list[dict]) -> str:
    """The rows as text."""
    lines = [f"{'method':<28}{'PSNR dB':>9}{'SSIM':>8}{'keys':>8}{'mass':>8}{'DiT s':>9}{'vs dense':>10}   calls dense/anchor/reuse"]
    dense = rows[0]["dit_seconds"]
    for r in rows:
        quality = f"{'-':>9}{'-':>8}" if r["psnr_db"] is None else f"{r['psnr_db']:>9.1f}{r['ssim']:>8.4f}"
        calls = "/".join(str(r["counts"][k]) for k in ("dense", "anchor", "reuse"))
        lines.append(
            f"{r['name']:<28}{quality}{r['realised_density']:>8.3f}{r['retained_mass']:>8.3f}{r['dit_seconds']:>9.2f}"
            f"{dense / r['dit_seconds']:>9.2f}x   {calls}"
        )
    return "\n".join(lines)


def produce(prompt: str, steps: int, seed: int, out: Path, grid=model.GRID, tick=lambda text: None, precision: str = "auto") -> dict:
    """Runs every method and writes metrics.json, comparison.gif and .png and index.html into `out`. Returns what metrics.json holds."""
    out.mkdir(parents=True, exist_ok=True)
    lanes, machine = compare(prompt, steps, seed, grid, tick=tick, precision=precision)
    rows, clips = results(lanes)
    metrics = {
        "version": __version__,
        "prompt": prompt,
        "steps": steps,
        "seed": seed,
        "shift": model.SHIFT,
        "cfg": 1.0,
        "sampler": "euler",
        "latent": list(grid),
        "tokens": math.prod(model.token_grid(grid)),
        **machine,
        "precision": precision,
        "runs": rows,
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    side_by_side(clips, [r["name"] for r in rows], out / "comparison.gif")
    sheet(clips, [r["name"] + ("" if r["psnr_db"] is None else f"\n{r['psnr_db']:.1f} dB") for r in rows], out / "comparison.png")
    write_page(out / "index.html", metrics, clips, [lane.actions() for lane in lanes])
    return metrics


def main(argv: list[str] | None = None) -> int:
    """The command line of the demo. Returns an exit code."""
    from tqdm import tqdm

    names = prompts.names()
    parser = argparse.ArgumentParser(prog="run.py demo", description="Denoise one clip dense and sparse, and compare.")
    parser.add_argument("--prompt", default=names[2], choices=names, metavar="NAME", help="one of: " + "; ".join(repr(n) for n in names))
    parser.add_argument("--steps", type=int, default=30, help="Euler steps, 10 or more (default 30)")
    parser.add_argument("--seed", type=int, default=2, help="of the noise (default 2)")
    parser.add_argument("--precision", default="auto", choices=PRECISIONS, help="numbers that ours compares tokens in (default auto)")
    parser.add_argument("--out", type=Path, default=HERE / "out", help="folder for the results (default demo/out)")
    args = parser.parse_args(argv)
    if args.steps < 10:
        parser.error(f"--steps is {args.steps}; the methods need 10 or more to show what they do (default 30)")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed is {args.seed}; 0 to 2**63 - 1")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"--out is {args.out}, a file; name a folder")
    with tqdm(total=args.steps * len(methods("auto")), unit="evaluation", smoothing=0.05) as bar:

        def tick(text: str):
            bar.set_description(f"{text:<26}")
            if bar.update() and bar.n == bar.total:
                bar.set_description("writing the results")

        metrics = produce(args.prompt, args.steps, args.seed, args.out, tick=tick, precision=args.precision)
    print(f"\n{metrics['tokens']} tokens, {args.steps} Euler steps, {metrics['device']}, torch {metrics['torch']}, {metrics['dtype']}")
    print(table(metrics["runs"]))
    print("\nPSNR and SSIM of the clip against dense; keys: share selected, rounded up to 128; mass: attention it holds at anchors;\n"
          "what is not selected, ours also sees through its pooled tail. ours is the preset auto.")  # fmt: skip
    print(f"Wrote metrics.json, comparison.gif, comparison.png and index.html into {args.out}; open index.html to compare.")
    return 0
