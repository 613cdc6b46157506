#!/usr/bin/env python3
"""The study behind the presets: the demo model, dense against the base case and one change at a time.

    python benchmarks/study_presets.py --out benchmarks/results/<machine>-<date>-study.json
    python benchmarks/study_presets.py --only residual,tail --seeds 1 --workers 2     # a part of it

Every case is compared with the dense clip of the same seed, sampler, guidance and grid. The base case is tail 64, cells, token, density
0.10, two anchors, 20 % dense start, residual bf16, no dense layers, 30 Euler steps, shift 3, CFG 1. Runs on a GPU when there is one.
"""
from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F

from mc_sparse.demo import codec, model, prompts
from mc_sparse.demo.metrics import psnr, ssim
from mc_sparse.demo.vanilla import VanillaBlockSparse
from mc_sparse.kernels import compress_residual
from mc_sparse.kernels.shapes import ceil_div
from mc_sparse.mcsparse_core import engine
from mc_sparse.mcsparse_core.context import AttentionCall, TokenLayout
from mc_sparse.mcsparse_core.diffusers_host import self_attention
from mc_sparse.mcsparse_core.plan import PRESETS, SparsePlan
from mc_sparse.mcsparse_core.run import SparseRun
from mc_sparse.mcsparse_core.schedule import Schedule, Span, flow_progress

STEPS = 30
LONG = (16, 54, 56)  # latent of the longer sequence: 16 x 27 x 28 = 12096 tokens


@dataclass(frozen=True)
class Setting:
    """What dense and sparse share: a dense clip is made once per setting and seed."""

    grid: tuple[int, int, int] = model.GRID
    sampler: str = "euler"
    cfg: float = 1.0
    steps: int = STEPS


@dataclass(frozen=True)
class Case:
    """One row of the study. raster: groups and cells are runs of the raster order. scale: factor on the residual."""

    factor: str
    value: str
    plan: SparsePlan | None  # None: vanilla block-sparse attention, or dense in another arithmetic
    setting: Setting = Setting()
    seeds: int = 3
    raster: bool = False
    scale: float = 1.0


def base(**changes) -> SparsePlan:
    schedule = changes.pop("schedule", Schedule(refresh=(0.45,)))
    fields = {"density": 0.10, "tail": 64, "grouping": "cells", "granularity": "token", "residual": "bf16", "min_tokens": 1024}
    return SparsePlan(preset="custom", schedule=schedule, backend=BACKEND, **{**fields, **changes})


def at(*steps: int, start: float = 0.2, **changes) -> Schedule:
    return Schedule(dense_start=Span(fraction=start), anchor_steps=steps, **changes)


def paper(density: float) -> SparsePlan:
    return base(density=density, tail=0, grouping="pddp", schedule=replace(PRESETS["paper"].schedule, dense_layers=()))


def cases() -> list[Case]:
    """The whole study, main pairs first."""
    out = [Case("base", "base", base(), seeds=5)]
    for density in (0.05, 0.10, 0.15, 0.20, 0.25):
        out.append(Case("paper", f"{density:.2f}", paper(density), seeds=5))
        for tail in (0, 128, 64, 32):
            main = tail in (0, 64, 32)
            for granularity in ("token", "cell32"):
                plan = base(density=density, tail=tail, granularity=granularity)
                out.append(Case("block", f"{density:.2f} tail {tail or 'none'} {granularity}", plan, seeds=5 if main else 3))
    out += [Case("grouping", g, base(grouping=g), seeds=5) for g in ("pddp", "cells")]
    out.append(Case("grouping", "raster", base(), raster=True))
    out += [Case("grouping", f"pddp tail none {d:.2f}", base(density=d, tail=0, grouping="pddp")) for d in (0.10, 0.25)]
    for steps in ((5,), (5, 10), (5, 14), (5, 18), (5, 10, 17), (5, 11, 18), (5, 14, 22)):
        seeds = 5 if steps in ((5,), (5, 14), (5, 11, 18)) else 3
        out.append(Case("anchors", ", ".join(map(str, steps)), base(schedule=at(*steps)), seeds=seeds))
    for start, anchors in ((0.05, (1, 8)), (0.10, (2, 9)), (0.20, (5, 14)), (0.10, (2, 7, 14)), (0.05, (1, 5, 11))):
        for name, plan in (("ours", base(schedule=at(*anchors, start=start))),
                           ("paper 0.25", replace(paper(0.25), schedule=at(*anchors, start=start)))):  # fmt: skip
            out.append(Case("warm-up", f"{start:.0%} anchors {', '.join(map(str, anchors))} {name}", plan))
    for layers in ((0,), (-1,), (0, -1)):
        schedule = Schedule(refresh=(0.45,), dense_layers=layers)
        out.append(Case("dense layers", ", ".join(map(str, layers)), base(schedule=schedule)))
    out.append(Case("dense end", "1 step", base(schedule=Schedule(refresh=(0.45,), dense_end=Span(steps=1)))))
    for fmt in ("bf16", "fp8", "int4", "int2", "rank-4", "rank-8", "rank-16", "rank-32", "off", "auto"):
        out.append(Case("residual", fmt, base(residual=fmt), seeds=5 if fmt in ("bf16", "int4", "rank-8", "off", "auto") else 3))
    out += [Case("residual", f"bf16 x {s:g}", base(), scale=s) for s in (0.95, 0.9, 0.8)]
    for fmt in ("int4", "rank-8"):
        out.append(Case("residual", f"{fmt}, paper 0.25", replace(paper(0.25), residual=fmt)))
        out.append(Case("residual", f"{fmt}, cell32 tail 32", base(granularity="cell32", tail=32, residual=fmt)))
    for setting in (Setting(cfg=4.0), Setting(sampler="res_multistep")):
        name = f"{setting.sampler} cfg {setting.cfg:g}"
        out += [Case("sampler", f"{name} {n}", p, setting) for n, p in (("ours 0.10", base()), ("paper 0.25", paper(0.25)))]
    for steps in (4, 8):
        for schedule, name in ((Schedule(Span(steps=1)), "one anchor"), (Schedule(Span(steps=1), refresh=(0.45,)), "two anchors")):
            out.append(Case("few steps", f"{steps} steps {name}", base(density=0.20, schedule=schedule), Setting(steps=steps)))
    cell32 = base(granularity="cell32", tail=32)
    out += [
        Case("12k tokens", "ours 0.05", base(density=0.05), Setting(LONG)),
        Case("12k tokens", "ours 0.10", base(), Setting(LONG)),
        Case("12k tokens", "ours 0.10 cell32 tail 32", cell32, Setting(LONG)),
        Case("12k tokens", "paper 0.15", paper(0.15), Setting(LONG)),
        Case("12k tokens", "paper 0.25", paper(0.25), Setting(LONG)),
        Case("12k tokens", "tail none 0.10", base(tail=0), Setting(LONG)),
    ]
    for density, tail, granularity, anchors in (
        (0.06, 32, "cell32", (2, 9)), (0.06, 32, "cell32", (2, 7, 14)), (0.06, 64, "token", (2, 9)), (0.06, 64, "token", (2, 7, 14)),
        (0.10, 64, "token", (2, 7, 14)), (0.10, 32, "cell32", (2, 7, 14)), (0.06, 32, "token", (2, 6, 11, 17)),
    ):  # fmt: skip
        plan = base(density=density, tail=tail, granularity=granularity, schedule=at(*anchors, start=0.1), residual="auto")
        out.append(Case("speed", f"{density:.2f} tail {tail} {granularity}, anchors {', '.join(map(str, anchors))}", plan, seeds=5))
    for anchors in ((5, 10, 16), (5, 9, 14, 20)):
        for density in (0.10, 0.15):
            value = f"{density:.2f} anchors {', '.join(map(str, anchors))}"
            out.append(Case("more anchors", value, base(density=density, schedule=at(*anchors)), seeds=5))
    for name in ("quality", "speed", "paper", "auto"):
        out.append(Case("preset", name, SparsePlan(preset=name, min_tokens=1024, backend=BACKEND), seeds=5))
    out.append(Case("vanilla block-sparse", "0.25", None))
    out.append(Case("floor", "dense, other dtype", None))
    out.append(Case("floor", "dense, unfused attention", None))
    return out


BACKEND = "reference" if torch.cuda.is_available() else "auto"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


class Studied:
    """The attention function of one case, which also measures each reuse call against dense on the same inputs when asked to."""

    def __init__(self, case: Case, sigmas: list[float], blocks: int, probe: bool):
        progress = flow_progress(sigmas, model.SHIFT)
        self.run = SparseRun(case.plan, sigmas, progress)
        grid = model.token_grid(case.setting.grid)
        self.layout = TokenLayout(None, after=math.prod(grid)) if case.raster else TokenLayout(grid)
        self.blocks, self.probe, self.scale = blocks, probe, case.scale
        self.errors: list[float] = []

    def __call__(self, block, q, k, v, mask):
        def dense(rows):
            return F.scaled_dot_product_attention(q[rows], k[rows], v[rows])

        site = self.run.site("block", block, self.blocks)
        branches = self.run.branches(q.shape[0], q.shape[2])
        call = AttentionCall(q, k, v, q.shape[-1] ** -0.5, site, branches, self.layout, dense, exact_dense=True)
        scaled = mock.patch.object(engine, "compress_residual", lambda r, *rest: compress_residual(r * self.scale, *rest))
        before = self.run.stats.counts["reuse"]
        with scaled if self.scale != 1 else ExitStack():
            out = engine.attend(self.run, call)
        if out is None:
            return dense(slice(None))
        if self.probe and self.run.stats.counts["reuse"] > before:
            exact = dense(slice(None)).float()
            self.errors.append(((out.float() - exact).abs().sum() / exact.abs().sum()).item())
        return out


@torch.inference_mode()
def denoise(transformer, setting: Setting, seed: int, begin=lambda step, sigma: None, forward=lambda rows: None) -> torch.Tensor:
    """A clip (1, 3, T, H, W): seeded noise to picture. begin(step, sigma) before each evaluation, forward(rows) before each forward."""
    names = prompts.names()
    text = prompts.embedding(names[seed % len(names)]).to(DEVICE, DTYPE)
    empty = prompts.embedding("").to(DEVICE, DTYPE)
    x = torch.randn(1, 16, *setting.grid, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    sigmas = levels(setting.steps)
    previous = None

    def velocity(x, sigma, t):
        forward(1)
        return transformer(x.to(DTYPE), torch.full((1,), sigma * 1000, device=DEVICE), t, return_dict=False)[0].float()

    for i, (sigma, following) in enumerate(zip(sigmas, sigmas[1:], strict=False)):
        begin(i, sigma)
        v = velocity(x, sigma, text)
        if setting.cfg != 1:
            without = velocity(x, sigma, empty)
            v = without + setting.cfg * (v - without)
        denoised = x - sigma * v
        if setting.sampler == "euler" or previous is None or following == 0:
            x = x + (following - sigma) * v
        else:
            x = _exponential_multistep(x, denoised, previous, sigmas[i - 1], sigma, following)
        previous = denoised
    return codec.decode(x.float().cpu())


def _exponential_multistep(x, denoised, previous, before: float, sigma: float, following: float):
    """Second-order exponential multistep (Zhang et al. 2023, RES) in t = -log sigma; the first step has no history and is Euler."""
    h, back = math.log(sigma / following), math.log(before / sigma)
    decay = following / sigma
    phi1 = (1 - decay) / h
    phi2 = (1 - phi1) / h
    return decay * x + h * ((phi1 + phi2 * h / back) * denoised - phi2 * h / back * previous)


def levels(steps: int) -> list[float]:
    return [model.shifted(1 - i / steps) for i in range(steps + 1)]


def study(case: Case, seed: int, transformer, dense: torch.Tensor, probe: bool) -> dict:
    """One case at one seed against the dense clip."""
    sigmas, row = levels(case.setting.steps), {}
    if case.plan:
        attention = Studied(case, sigmas, len(transformer.blocks), probe)
        run = attention.run
        with self_attention(transformer, attention):
            clip = denoise(
                transformer, case.setting, seed, lambda _, sigma: run.begin_evaluation(sigma),
                lambda rows: run.begin_forward([("study", 0)], rows, shape=case.setting.grid),
            )  # fmt: skip
        report = run.close()
        tokens = attention.layout.length
        tail_cells = ceil_div(tokens, run.recipe.tail) / tokens if run.recipe.tail else 0.0
        row = {key: report[key] for key in ("retained_mass", "realised_density", "counts", "cache_bytes")}
        row["reuse_work"] = report["realised_density"] + tail_cells
        row["attention_work"] = attention_work(report, tail_cells)
        row["call_relative_l1"] = statistics.mean(attention.errors) if attention.errors else None
    elif case.factor == "vanilla block-sparse":
        vanilla = VanillaBlockSparse(paper(0.25), flow_progress(sigmas, model.SHIFT)[:-1], BACKEND)
        with self_attention(transformer, vanilla):
            clip = denoise(transformer, case.setting, seed, lambda step, _: setattr(vanilla, "step", step))
        row = {**vanilla.measured(), "counts": {"dense": vanilla.dense_calls, "anchor": 0, "reuse": vanilla.sparse_calls}}
    else:
        clip = floor(case, transformer, seed)
    return {"psnr_db": psnr(clip, dense), "ssim": ssim(clip, dense), **row}


def attention_work(report: dict, tail_cells: float) -> float:
    """Attention of the whole run relative to dense: products of queries and keys, an anchor counting dense, selection (half) and sparse."""
    counts, reuse = report["counts"], report["realised_density"] + tail_cells
    return (counts["dense"] + counts["anchor"] * (1.5 + reuse) + counts["reuse"] * reuse) / sum(counts.values())


def floor(case: Case, transformer, seed: int) -> torch.Tensor:
    """Dense again, in another arithmetic: how much rounding alone moves the clip."""
    if "dtype" in case.value:
        global DTYPE
        kept, DTYPE = DTYPE, torch.float64 if torch.float32 == DTYPE else torch.float32
        try:
            other = model.load().to(DEVICE, DTYPE)
            return denoise(other, case.setting, seed)
        finally:
            DTYPE = kept

    def unfused(block, q, k, v, mask):
        return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).to(q.dtype)

    with self_attention(transformer, unfused):
        return denoise(transformer, case.setting, seed)


_worker: dict = {}


def _work(job: tuple[int, Case, int]) -> tuple[int, int, dict]:
    """One (case, seed) in a worker process; the model and the dense clips stay with the worker."""
    index, case, seed = job
    if not _worker:
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // _workers()))
        _worker["model"], _worker["dense"] = model.load().to(DEVICE, DTYPE), {}
    key = (case.setting, seed)
    if key not in _worker["dense"]:
        _worker["dense"][key] = denoise(_worker["model"], case.setting, seed)
    return index, seed, study(case, seed, _worker["model"], _worker["dense"][key], probe=seed == 1)


def _workers() -> int:
    return int(os.environ.get("MC_SPARSE_STUDY_WORKERS", "1"))


def summary(case: Case, rows: dict[int, dict], reference: dict[int, dict]) -> dict:
    """A case with its seeds: mean and spread (sample standard deviation) of PSNR, alone and paired by seed with the base case."""
    values = [rows[s]["psnr_db"] for s in sorted(rows)]
    paired = [rows[s]["psnr_db"] - reference[s]["psnr_db"] for s in sorted(rows) if s in reference] if case.setting == Setting() else []
    first = rows[min(rows)]
    means = ("ssim", "retained_mass", "realised_density", "reuse_work", "attention_work")
    mean = {k: statistics.mean(r[k] for r in rows.values()) for k in means if first.get(k) is not None}
    hidden = ("verbose", "min_tokens", "backend")
    return {
        "factor": case.factor,
        "value": case.value,
        "setting": asdict(case.setting),
        "plan": case.plan and {k: v for k, v in asdict(case.plan).items() if k not in hidden},
        "raster": case.raster,
        "scale": case.scale,
        "seeds": len(values),
        "psnr_db": statistics.mean(values),
        "psnr_spread_db": statistics.stdev(values) if len(values) > 1 else None,
        "psnr_by_seed": values,
        "against_base_db": statistics.mean(paired) if paired else None,
        "against_base_spread_db": statistics.stdev(paired) if len(paired) > 1 else None,
        **mean,
        "counts": first.get("counts"),
        "cache_bytes": first.get("cache_bytes"),
        "call_relative_l1": first.get("call_relative_l1"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--only", default="", help="factors to run, separated by commas")
    parser.add_argument("--seeds", type=int, default=0, help="so many seeds for every case (default: each case's own, 3 or 5)")
    parser.add_argument("--workers", type=int, default=6 if DEVICE.type == "cuda" else 1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long; cases without a run are left out")
    args = parser.parse_args()
    wanted = [w.strip() for w in args.only.split(",") if w.strip()]
    chosen = [c for c in cases() if not wanted or c.factor in wanted]
    # Seed by seed, so that a study cut short has few seeds of everything.
    jobs = [(i, c, s) for s in range(1, 6) for i, c in enumerate(chosen) if s <= (args.seeds or c.seeds)]
    jobs.sort(key=lambda j: (j[2], j[1].setting.grid, j[1].setting.cfg, j[1].setting.sampler, j[1].setting.steps))
    os.environ["MC_SPARSE_STUDY_WORKERS"] = str(args.workers)
    began, rows = time.time(), {}
    with mp.get_context("spawn").Pool(args.workers) as pool:
        for index, seed, row in pool.imap_unordered(_work, jobs):
            rows.setdefault(index, {})[seed] = row
            case = chosen[index]
            said = f"{time.time() - began:6.0f} s  {case.factor}: {case.value}, seed {seed}: {row['psnr_db']:.2f} dB"
            print(said, file=sys.stderr, flush=True)
            if time.time() - began > args.seconds:
                pool.terminate()
                break
    reference = next((rows[i] for i in rows if chosen[i].factor == "base"), {})
    table = [summary(chosen[i], rows[i], reference) for i in sorted(rows)]
    facts = {
        "command": shlex.join(["python", "benchmarks/study_presets.py", *sys.argv[1:]]),
        "commit": subprocess.run(["git", "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False).stdout.strip(),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else platform.processor() or platform.machine(),
        "torch": torch.__version__, "dtype": str(DTYPE).removeprefix("torch."), "backend": BACKEND,
        "seconds": round(time.time() - began, 1), "rows": table,
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(facts, indent=1) + "\n")
    for r in table:
        spread = "" if r["psnr_spread_db"] is None else f" +- {r['psnr_spread_db']:.2f}"
        work = f"{r['attention_work']:.3f}" if "attention_work" in r else "-"
        paired = "" if r["against_base_db"] is None else f"{r['against_base_db']:+.2f}"
        print(f"{r['factor']:<22}{r['value']:<46}{r['psnr_db']:>7.2f}{spread:<9}{paired:>7}  SSIM {r['ssim']:.4f}  work {work}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
