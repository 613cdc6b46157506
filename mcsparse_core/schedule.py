"""When to be dense, anchor or reuse: pure functions of the user's schedule and the run's noise levels.

*Progress* is the share of the full noise range that lies behind a step, 0 at pure noise and 1 at the clean sample; a host turns its
sigmas into it. A run that is a part of a longer schedule starts at the progress where that part starts.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum

PROGRESS_TOLERANCE = 2e-3  # schedulers round noise levels to 1/1000 of the range


class Action(Enum):
    DENSE = "dense"
    ANCHOR = "anchor"
    REUSE = "reuse"


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str = ""  # in words, when DENSE


def check_number(name: str, value, kind: type):
    """Raises ValueError unless value is a plain int, or for kind float an int or float; True and False are neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        wanted = "a number" if kind is float else "a whole number"
        raise ValueError(f"{name} is {value!r}, of type {type(value).__name__}; it must be {wanted}")


@dataclass(frozen=True)
class Span:
    """A stretch at one end of a run: so many `steps`, or a `fraction` (0 to below 1) of the full noise range."""

    steps: int | None = None
    fraction: float | None = None

    def __post_init__(self):
        if (self.steps is None) == (self.fraction is None):
            raise ValueError("a span is either steps or a fraction")
        check_number("a span", self.steps if self.fraction is None else self.fraction, int if self.fraction is None else float)
        if self.steps is not None and self.steps < 0:
            raise ValueError(f"{self.steps} steps: a span cannot be negative")
        if self.fraction is not None and not 0 <= self.fraction < 1:
            raise ValueError(f"{self.fraction:g} is not a fraction between 0 and 1; write whole steps as 6, shares as 20% or 0.2")

    def __str__(self):
        return f"{self.steps} steps" if self.fraction is None else f"{self.fraction:.0%}"


@dataclass(frozen=True)
class Schedule:
    """Where a run is dense and where it anchors.

    The first anchor is the last step of the dense start (the dense pass is paid for anyway), or the first step without one. Then
    either `anchor_steps` (0-based steps of the run, the first one included), `every` so many steps, or at the `refresh` points
    (progress, 0 to 1). `dense_layers` are block indices, negative ones from the end. `density_curve` holds (progress, density) points,
    read at anchors, linear in between and flat outside; empty = the plan's density throughout.
    """

    dense_start: Span = Span(fraction=0.2)
    refresh: tuple[float, ...] = ()
    every: int | None = None
    anchor_steps: tuple[int, ...] = ()
    dense_end: Span = Span(steps=0)
    dense_layers: tuple[int, ...] = ()
    density_curve: tuple[tuple[float, float], ...] = ()

    def __post_init__(self):
        if not (isinstance(self.dense_start, Span) and isinstance(self.dense_end, Span)):
            raise ValueError("the dense start and end are spans: Span(steps=6) or Span(fraction=0.2)")
        every = () if self.every is None else (self.every,)
        numbers = {"anchor_steps": self.anchor_steps, "dense_layers": self.dense_layers, "refresh": self.refresh, "every": every}
        for name, values in numbers.items():
            if not isinstance(values, tuple):
                raise ValueError(f"{name} is {values!r}; give a tuple of numbers")
            for value in values:
                check_number(name, value, float if name == "refresh" else int)
        if sum(map(bool, (self.refresh, self.every, self.anchor_steps))) > 1:
            raise ValueError("anchors are given by steps, by an interval or by refresh points, not by several of them")
        if self.every is not None and self.every < 2:
            raise ValueError(f"anchors every {self.every} steps leave no step to reuse; use 2 or more")
        if any(s < 0 for s in self.anchor_steps) or list(self.anchor_steps) != sorted(set(self.anchor_steps)):
            raise ValueError(f"anchor steps {list(self.anchor_steps)} must be ascending step numbers from 0 on")
        if any(not 0 <= p <= 1 for p in self.refresh) or list(self.refresh) != sorted(set(self.refresh)):
            raise ValueError(f"refresh points {list(self.refresh)} must be ascending and between 0 and 1")
        if self.anchor_steps and self.dense_start.steps is not None:
            self._check_first_anchor(self.dense_start.steps)
        points = [p for p, _ in self.density_curve]
        if points != sorted(set(points)) or any(not 0 <= p <= 1 for p in points):
            raise ValueError(f"density curve points {points} must be ascending and between 0 and 1")
        for _, density in self.density_curve:
            check_density(density)

    def _check_first_anchor(self, warm_up: int):
        if self.anchor_steps[0] < warm_up - 1:
            raise ValueError(
                f"MC-Sparse schedule: anchor at step {self.anchor_steps[0]} lies inside the dense start of {warm_up} steps (steps 0 to "
                f"{warm_up - 1}). The first anchor can be step {warm_up - 1} at the earliest: move it there or shorten the dense start."
            )


ANCHOR_FIELDS = {"refresh": (), "every": None, "anchor_steps": ()}  # they exclude each other: setting one unsets the others


@dataclass(frozen=True)
class ScheduleChange:
    """What a user changed about a preset's schedule, field by field; None = the preset's own."""

    dense_start: Span | None = None
    refresh: tuple[float, ...] | None = None
    every: int | None = None
    anchor_steps: tuple[int, ...] | None = None
    dense_end: Span | None = None
    dense_layers: tuple[int, ...] | None = None
    density_curve: tuple[tuple[float, float], ...] | None = None

    def __post_init__(self):
        self.over(Schedule(dense_start=Span(steps=0)))  # what cannot be right over any preset is refused here

    def over(self, base: Schedule) -> Schedule:
        """`base` with these changes. Raises ValueError where they contradict each other."""
        changes = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        if changes.keys() & ANCHOR_FIELDS.keys():
            changes = ANCHOR_FIELDS | changes
        return replace(base, **changes)


def check_density(density: float):
    """Raises ValueError unless density is a number from 0.05 to 1."""
    check_number("density", density, float)
    if not 0.05 <= density <= 1:
        raise ValueError(
            f"density {density:g} is outside 0.05 to 1.00. It is the share of keys each query attends to: "
            "0.10 to 0.25 is usual, 1.00 is dense."
        )


@dataclass(frozen=True)
class Timeline:
    """A schedule laid on one run. anchors: ascending steps; before the first, every step is dense. densities: one per anchor.
    dense_from: first step of the dense end (= steps without one)."""

    steps: int
    anchors: tuple[int, ...]
    densities: tuple[float, ...]
    dense_from: int

    def due(self, step: int) -> int | None:
        """Index of the newest anchor at or before `step`, None inside the dense start."""
        past = [i for i, a in enumerate(self.anchors) if a <= step]
        return past[-1] if past else None

    def reuse_follows(self, step: int) -> bool:
        """True if an anchor taken at `step` serves the step after it."""
        return step + 1 < self.dense_from and step + 1 not in self.anchors

    @property
    def reuse_steps(self) -> int:
        """Steps that reuse, for a branch that is there from the start."""
        first = self.anchors[0] if self.anchors else self.steps
        return sum(1 for s in range(first, self.dense_from) if s not in self.anchors)


def lay_out(schedule: Schedule, density: float, progress: Sequence[float]) -> Timeline:
    """The timeline of a run whose step i starts at progress[i]. Raises ValueError where a listed anchor lies in the dense start."""
    steps = len(progress)
    warm_up = _leading(schedule.dense_start, progress)
    if schedule.dense_end.fraction is None:
        dense_from = max(0, steps - schedule.dense_end.steps)
    else:
        dense_from = sum(p < 1 - schedule.dense_end.fraction - PROGRESS_TOLERANCE for p in progress)
    if schedule.anchor_steps:
        schedule._check_first_anchor(warm_up)
        anchors = schedule.anchor_steps
    else:
        first = max(0, warm_up - 1)
        if schedule.every:
            anchors = tuple(range(first, steps, schedule.every))
        else:
            at = (next((i for i, p in enumerate(progress) if p >= r - PROGRESS_TOLERANCE), steps) for r in schedule.refresh)
            begun = progress[0] if steps else 1.0
            later = (s for s, r in zip(at, schedule.refresh, strict=True) if s > first and r > begun)
            anchors = tuple(sorted({first, *later}))
    anchors = tuple(a for a in anchors if a < dense_from)
    return Timeline(steps, anchors, tuple(_curve(schedule.density_curve, progress[a], density) for a in anchors), dense_from)


def _leading(span: Span, progress: Sequence[float]) -> int:
    if span.steps is not None:
        # Steps count from the start of the noise range: a run that starts later has its dense start behind it.
        return min(span.steps, len(progress)) if progress and progress[0] <= PROGRESS_TOLERANCE else 0
    return sum(p < span.fraction - PROGRESS_TOLERANCE for p in progress)


def _curve(points: tuple[tuple[float, float], ...], at: float, default: float) -> float:
    if not points:
        return default
    if at <= points[0][0]:
        return points[0][1]
    for (p0, d0), (p1, d1) in zip(points, points[1:], strict=False):
        if at <= p1:
            return d0 + (d1 - d0) * (at - p0) / (p1 - p0)
    return points[-1][1]


def decide(timeline: Timeline, layer_is_dense: bool, step: int, anchored: int | None) -> Decision:
    """What one call does. anchored: the step of the anchor this (site, branch) holds, None without one.

    An anchor is taken at most once per step, and one that fell on a skipped step stays due until the site runs again.
    """
    if step >= timeline.dense_from:
        return Decision(Action.DENSE, "dense end")
    due = timeline.due(step)
    if due is None:
        return Decision(Action.DENSE, "dense start" if timeline.anchors else "no step to reuse")
    if layer_is_dense:
        return Decision(Action.DENSE, "dense layer")
    if anchored is not None and anchored >= timeline.anchors[due]:
        return Decision(Action.REUSE)
    if not timeline.reuse_follows(step):
        return Decision(Action.DENSE, "no step to reuse")
    return Decision(Action.ANCHOR)


def step_of(sigma: float, sigmas: Sequence[float]) -> int:
    """The step whose interval [sigmas[i], sigmas[i+1]) holds sigma; sigmas descend, the last one ends the run."""
    return max(0, sum(s >= sigma * (1 - 1e-4) for s in sigmas[:-1]) - 1)


def why_no_schedule(sigmas: Sequence[float]) -> str | None:
    """A reason if these noise levels give no steps to schedule, else None."""
    if len(sigmas) < 2:
        return "the sampler gave no noise levels"
    if not all(math.isfinite(s) for s in sigmas):
        return "a noise level is not a number"
    if any(b >= a for a, b in zip(sigmas, sigmas[1:], strict=False)):
        return "the noise levels do not descend"
    return None


def progress_of(sigmas: Sequence[float], percent_to_sigma: Callable[[float], float]) -> tuple[float, ...]:
    """Progress of each sigma by bisection of a host's descending percent_to_sigma."""

    def invert(sigma: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            if percent_to_sigma(middle) > sigma:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    return tuple(invert(s) for s in sigmas)


def flow_progress(sigmas: Sequence[float], shift: float) -> tuple[float, ...]:
    """Progress of rectified-flow sigmas whose schedule was shifted: sigma = shift*u / (1 + (shift-1)*u), progress = 1 - u."""
    return tuple(1 - s / (shift - (shift - 1) * s) for s in sigmas)
