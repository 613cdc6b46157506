"""Counts, times and reasons of one run, and the report it leaves: numbers and words only, no tensors."""
from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from .context import SiteKey
from .schedule import Action


class RunStats:
    """Filled by the engine while a run lasts. Times come from CUDA events on a GPU (read once, at the end), else from the clock."""

    def __init__(self):
        self.counts: Counter[str] = Counter()  # attention calls by action; a batched call counts once per branch
        self.reasons: Counter[str] = Counter()  # why calls were dense
        self.passed: Counter[str] = Counter()  # calls that are no candidates (cross-attention, short text), by reason
        self.timeline: dict[tuple[int, SiteKey], tuple[str, str]] = {}  # (step, site) -> action, reason of its last call
        self.residuals: Counter[str] = Counter()  # formats that anchors kept
        # Of reuse calls, which are the sparse ones: who computed them, in what precision, and why not in the one that was wanted.
        self.backends: Counter[str] = Counter()
        self.precisions: Counter[str] = Counter()
        self.precision_reasons: Counter[str] = Counter()
        self._seconds: dict[str, list[float]] = defaultdict(list)  # of timed calls, by action
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._anchors: list[tuple[Tensor, Tensor]] = []  # retained mass and realised density, still on the device

    def count(self, step: int, site: SiteKey, action: Action, reason: str = ""):
        self.counts[action.value] += 1
        if action is Action.DENSE:
            self.reasons[reason] += 1
        self.timeline[step, site] = (action.value, reason)

    def reused(self, backend: str, precision: str, why_not_wanted: str | None):
        """A sparse call was computed by a backend, in a precision."""
        self.backends[backend] += 1
        self.precisions[precision] += 1
        if why_not_wanted:
            self.precision_reasons[why_not_wanted] += 1

    def anchored(self, retained: Tensor, density: Tensor):
        """Scalars of one anchor; they are read when the run ends, so that no call waits for the device."""
        self._anchors.append((retained, density))

    @contextmanager
    def timed(self, kind: str, device: torch.device):
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._seconds[kind].append(time.perf_counter() - begin)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._spans.append((kind, begin, end))

    def numbers(self, read_device: bool = True) -> dict:
        """Everything counted so far as plain values; waits for the device once. read_device False: only what the host knows."""
        if not read_device:
            self._spans.clear()
            self._anchors.clear()
        if self._spans:
            self._spans[-1][2].synchronize()
        for kind, begin, end in self._spans:
            self._seconds[kind].append(begin.elapsed_time(end) / 1000)
        self._spans.clear()
        retained = density = None
        if self._anchors:
            means = (torch.stack(column).mean().item() for column in zip(*self._anchors, strict=True))
            retained, density = (m if math.isfinite(m) else None for m in means)
        sites = sorted({site for _, site in self.timeline})
        return {
            "counts": {a.value: self.counts[a.value] for a in Action},
            "reasons": dict(self.reasons),
            "passed_through": dict(self.passed),
            "retained_mass": retained,
            "realised_density": density,
            "residuals": dict(self.residuals),
            "backends": dict(self.backends),
            "precisions": dict(self.precisions),
            "precision_reasons": dict(self.precision_reasons),
            "attention_seconds": {k: round(sum(times), 6) for k, times in self._seconds.items()},
            # Of one counted call, by the median: the first ones also load and compile.
            "typical_seconds": {k: round(median(t) * len(t) / self.counts[k], 9) for k, t in self._seconds.items() if self.counts[k]},
            "sites": [f"{s.block_type} {s.block_index}" + (f".{s.ordinal}" if s.ordinal else "") for s in sites],
            "timeline": [[step, sites.index(site), *what] for (step, site), what in sorted(self.timeline.items())],
        }


def one_line(report: dict) -> str:
    """A run's report in one line, for a log."""
    counts = report["counts"]
    return (
        f"{report['status']}, {report['steps']} steps in {report['seconds']:.1f} s; attention calls: {counts['reuse']} reuse, "
        f"{counts['anchor']} anchor, {counts['dense']} dense; cache {report['cache_bytes'] / 2**20:.1f} MiB"
        + "".join(f"; demoted: {d['backend']} for {d['op']}" for d in report["demotions"])
    )


def report_text(report: dict) -> str:
    """A run's report as one block to read and to paste."""
    counts, recipe = report["counts"], report["recipe"]
    total = sum(counts.values())
    asked = report["plan"]["preset"]
    preset = asked if asked == recipe["name"] else f"{asked} ({recipe['name']}, for so few steps)"
    densities = sorted({round(d, 3) for d in report["densities"]} or {recipe["density"]}, reverse=True)
    lines = [
        f"MC-Sparse {report['version']}: {report['status']}, {report['steps']} steps, {report['evaluations']} model evaluations, "
        f"{report['seconds']:.1f} s",
        f"  preset {preset}: density {' to '.join(f'{d:g}' for d in densities[:1] + densities[1:][-1:])}, tail {recipe['tail'] or 'none'}, "
        f"grouping {recipe['grouping']}, granularity {recipe['granularity']}, residual {_asked(recipe['residual'], report['residuals'])}, "
        f"backend {_asked(report['backend'], report['backends'])}, precision {_asked(report['precision'], report['precisions'])}",
        f"  attention calls: {counts['reuse']} reuse, {counts['anchor']} anchor, {counts['dense']} dense of {total}"
        + (f" (anchors at steps {', '.join(map(str, report['anchors'])) or 'none'})" if total else ""),
    ]
    if report["reasons"]:
        lines.append("  dense because: " + _counted(report["reasons"]))
    if report["precision_reasons"]:
        lines.append("  sparse in bf16 because: " + _counted(report["precision_reasons"]))
    lines += [f"  demoted: backend {d['backend']} for {d['op']} of {d['geometry']}: {d['why']}" for d in report["demotions"]]
    if report["retained_mass"] is not None:
        lines.append(
            f"  retained attention mass {report['retained_mass']:.3f}; realised density {report['realised_density']:.3f} "
            "(budgets are rounded up to 128 keys)"
        )
    if report["attention_seconds"]:
        spent = report["attention_seconds"]
        lines.append("  attention time: " + ", ".join(f"{k} {s:.2f} s" for k, s in spent.items()) + _saved(report))
    lines.append(f"  cache at its largest: {report['cache_bytes'] / 2**20:.1f} MiB")
    lines += [f"  note: {note}" for note in report["notes"]]
    return "\n".join(lines)


def _asked(request: str, used: dict[str, int]) -> str:
    """What was asked for, and in brackets what was taken where that is something else."""
    return request if list(used) in ([], [request]) else f"{request} ({', '.join(used)})"


def _counted(reasons: dict[str, int]) -> str:
    """Reasons with their numbers, the most frequent first."""
    return ", ".join(f"{reason} {n}" for reason, n in sorted(reasons.items(), key=lambda r: -r[1]))


def _saved(report: dict) -> str:
    """What all calls would have taken dense, judged by those that were; empty without any."""
    counts, spent, typical = report["counts"], report["attention_seconds"], report["typical_seconds"].get("dense")
    if not typical:
        return ""
    dense, taken = spent["dense"] + (sum(counts.values()) - counts["dense"]) * typical, sum(spent.values())
    return f"; all dense about {dense:.2f} s, so about {abs(dense - taken):.2f} s {'saved' if dense > taken else 'lost'}"
