"""Interleaved timing, machine facts and result files of the benchmarks; run by path, results are JSON."""
from __future__ import annotations

import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "triton", "fa3-fwd", "flash-attn-4", "flash-attn", "comfy-kitchen", "sageattention", "flash-kmeans", "flash-colreduce")


class Time(NamedTuple):
    """Milliseconds: median of the rounds, and the distance between their quartiles."""

    ms: float
    spread: float


def need_gpu() -> None:
    """Stops with a message where there is none."""
    if not torch.cuda.is_available():
        raise SystemExit("needs an NVIDIA GPU that PyTorch can use")


def interleaved(cases: dict[str, Callable[[], object]], rounds: int = 5, warmup: int = 1) -> dict[str, Time]:
    """Times by CUDA events, one timed run of every case per round, so that clocks and heat are shared.

    Right before it the case runs once untimed: the clock that the power limit leaves is then its own, not that of the case before (dense
    attention holds an H200 at 1500 MHz, and what follows it is slower for a while), and its launches do not wait for the host.
    """
    for _ in range(warmup):
        for case in cases.values():
            case()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        spans = []
        for name, case in cases.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            case()
            begin.record()
            case()
            end.record()
            spans.append((name, begin, end))
        torch.cuda.synchronize()
        for name, begin, end in spans:
            times[name].append(begin.elapsed_time(end))
    return {name: Time(statistics.median(t), _quartiles(t)) for name, t in times.items()}


def _quartiles(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def peak_extra(case: Callable[[], object]) -> int:
    """Bytes that a call takes beyond what was allocated before it, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = case()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """||out - truth|| / ||truth||, NaN if any value is."""
    truth = truth.double()
    return float((out.double() - truth).norm() / truth.norm())


def facts() -> dict:
    """GPU, versions, command, commit and date, as every result file begins."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    arguments = [Path(a).name if Path(a).is_absolute() else a for a in sys.argv]  # results name no folder of one machine
    command = " ".join(map(shlex.quote, ["python", *arguments]))
    return {"gpu": gpu, "date": datetime.date.today().isoformat(), "versions": versions, "command": command, "commit": _commit()}


def _commit() -> str | None:
    """MC_SPARSE_COMMIT, for where only a checkout's files travelled; else of this checkout."""
    if said := os.environ.get("MC_SPARSE_COMMIT"):
        return said
    try:
        out = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        return out.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write(path: str | Path, rows: list[dict], **more):
    """Facts, more and rows as one JSON file, a row a line."""
    head = json.dumps({**facts(), **more}, indent=1)[:-2]
    body = ",\n".join("  " + json.dumps(row) for row in rows)
    Path(path).write_text(f'{head},\n "rows": [\n{body}\n ]\n}}\n')
