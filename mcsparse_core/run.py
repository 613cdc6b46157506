"""SparseRun: everything one sampling run owns, from its first evaluation to `close`, then thrown away."""
from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict

import torch

from .. import __version__
from ..kernels import registry
from ..kernels.cells import cell_order
from ..kernels.shapes import CellOrder
from .cache import MetaCache
from .context import BranchKey, SiteKey, TokenLayout
from .plan import SparsePlan, full_step_count
from .schedule import lay_out, step_of, why_no_schedule
from .stats import RunStats


class SparseRun:
    """One sampling run of one sampler.

    sigmas: the run's noise levels, the last one ends it; progress: of each of them (`schedule.progress_of`), same length.
    budget_bytes: the most the cache may hold (None = no limit). decline: a reason to stay dense throughout. family: the model's class.

    The host calls `begin_evaluation` once per model evaluation and `begin_forward` once per forward pass inside it, asks `site` and
    `branches` for the keys of each eligible attention call, and calls `close` in a `finally`.
    """

    def __init__(
        self,
        plan: SparsePlan,
        sigmas: Sequence[float],
        progress: Sequence[float],
        *,
        budget_bytes: int | None = None,
        decline: str | None = None,
        family: str = "",
    ):
        self.plan = plan
        self.sigmas = tuple(float(s) for s in sigmas)
        self.decline = decline or why_no_schedule(self.sigmas)
        self.family = family
        levels = tuple(float(p) for p in progress)
        if not self.decline and len(levels) != len(self.sigmas):
            raise ValueError(f"progress has {len(levels)} values and sigmas {len(self.sigmas)}; give the progress of each sigma")
        steps = () if self.decline else levels[:-1]
        full_steps = full_step_count(steps, levels[-1]) if steps else 1
        self.recipe, self.recipe_name = plan.recipe(full_steps), plan.recipe_name(full_steps)
        self.timeline = lay_out(self.recipe.schedule, self.recipe.density, steps)
        self.cache = MetaCache(budget_bytes)
        self.stats = RunStats()
        self.notes: list[str] = []
        self.step = 0
        self.evaluation = -1
        self.unfit: set[tuple[SiteKey, BranchKey, int]] = set()  # anchors that did not fit into the budget
        self._began = time.perf_counter()
        self._cells: dict[tuple, CellOrder] = {}
        self._ordinals: Counter = Counter()  # eligible calls of each block in this forward
        self._passes: Counter = Counter()  # forwards of each branch in this evaluation
        self._rows: tuple[tuple[tuple, slice], ...] = ()

    # the clock

    def begin_evaluation(self, sigma: float):
        """A model evaluation at noise level sigma begins. The step never goes back."""
        self.evaluation += 1
        if not self.decline:
            self.step = max(self.step, step_of(sigma, self.sigmas))
        self.cache.evict_idle_windows(self.evaluation)
        self._passes.clear()
        self._rows = ()

    def begin_forward(self, conds: Sequence[tuple[Hashable, int]], rows: int, window: tuple[int, ...] | None = None, shape: tuple = ()):
        """A forward pass of `rows` batch rows begins: conds lists (uuid, cond index) of each branch in it, in row order, equal shares.

        shape: the latent's, so that areas and tiles of different shapes are told apart.
        """
        self._ordinals.clear()
        if not conds or rows % len(conds):
            self._rows = ()
            return
        share, keys = rows // len(conds), []
        for uuid, cond in conds:
            key = (uuid, cond, window, shape)
            keys.append((uuid, cond, window, self._passes[key], shape))
            self._passes[key] += 1
        self._rows = tuple((key, slice(i * share, (i + 1) * share)) for i, key in enumerate(keys))

    # keys of one call

    def branches(self, rows: int, tokens: int) -> tuple[tuple[BranchKey, slice], ...]:
        """Branches of a call with so many rows and tokens; empty if the host named none or the rows do not match."""
        if not self._rows or self._rows[-1][1].stop != rows:
            return ()
        return tuple((BranchKey(*key, tokens), part) for key, part in self._rows)

    def site(self, block_type: str, block_index: int, blocks: int = 0) -> SiteKey:
        """The next eligible call of this block in this forward."""
        ordinal = self._ordinals[block_type, block_index]
        self._ordinals[block_type, block_index] += 1
        return SiteKey(block_type, block_index, ordinal, blocks)

    def cells(self, layout: TokenLayout, device: torch.device) -> CellOrder:
        """The layout's cell order on a device."""
        key = (layout.grid, layout.before, layout.after, device)
        if key not in self._cells:
            self._cells[key] = cell_order(layout.grid, before=layout.before, after=layout.after).to(device)
        return self._cells[key]

    # the end

    def note(self, text: str):
        """A sentence for the report, once."""
        if text not in self.notes:
            self.notes.append(text)

    def close(self, status: str = "finished") -> dict:
        """Lets everything go and returns the report: plain values only. status: finished, interrupted or failed."""
        # After a failure the device may be unusable, so nothing is read from it.
        numbers = self.stats.numbers(read_device=status == "finished")
        peak = self.cache.peak_bytes
        self.cache.clear()
        self._cells.clear()
        self._judge(numbers, status)
        return {
            "version": __version__,
            "status": status,
            "plan": self.plan.summary(),
            "recipe": {"name": self.recipe_name, **asdict(self.recipe)},
            "steps": self.timeline.steps,
            "anchors": list(self.timeline.anchors),
            "densities": list(self.timeline.densities),
            "evaluations": self.evaluation + 1,
            "seconds": round(time.perf_counter() - self._began, 3),
            "backend": self.plan.backend,
            "precision": self.plan.precision,
            "demotions": [d._asdict() for d in registry.demotions()],  # since the process began: they hold in this run too
            "cache_bytes": peak,
            **numbers,
            "notes": list(self.notes),
        }

    def _judge(self, numbers: dict, status: str):
        """Notes what a user should know about a run that gained nothing."""
        counts, seconds = numbers["counts"], numbers["typical_seconds"]
        if status != "finished":
            return
        if self.decline:
            self.note(f"this run was dense: {self.decline}")
        elif not sum(counts.values()) and (short := [r for r in numbers["passed_through"] if r != "cross-attention"]):
            self.note(f"0 calls were sparse: all self-attention is {', '.join(short)}")
        elif not sum(counts.values()):
            self.note("no attention call reached MC-Sparse: this model or another node bypasses it, so nothing was changed")
        elif not counts["reuse"]:
            few = self.timeline.reuse_steps == 0
            reasons = numbers["reasons"]
            steps = "1 step is" if self.timeline.steps == 1 else f"{self.timeline.steps} steps are"
            why = f"{steps} too few" if few else max(reasons, key=reasons.get, default="the run ended early")
            self.note(f"0 calls were sparse: {why}")
        else:
            if self.timeline.reuse_steps <= 1:
                self.note("at most one step could be reused; MC-Sparse pays off from about 6 steps on")
            if 0 < seconds.get("dense", 0) < seconds.get("reuse", 0):
                self.note("sparse attention was slower than dense here (short sequences, or no fast kernel for this device): bypass it")
