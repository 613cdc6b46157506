"""What the user asks for: a frozen, validated plan, and the recipes its presets stand for."""
from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from ..kernels.registry import backend_names
from ..kernels.residual.reference import rank_of
from ..kernels.shapes import GRANULARITIES
from .precision import PRECISIONS
from .schedule import Schedule, ScheduleChange, Span, check_density, check_number

TAILS = (0, 128, 64, 32)  # keys per pooled cell; 0 = none
GROUPINGS = ("pddp", "cells")
RESIDUALS = ("auto", "bf16", "fp8", "int4", "int2", "off")  # and rank-<r>
FEW_STEPS = 8  # schedules this short get the `few-step` recipe under `auto`
MIN_TOKENS_FLOOR = 1024  # below, cross-attention to 512 text tokens could be taken for self-attention


@dataclass(frozen=True)
class Recipe:
    """Concrete settings of one run.

    density: keys each query group selects / all keys, 0.05 to 1; lower is faster and less exact. tail: keys per pooled cell, 0 none;
    smaller cells are more exact and cost S/tail keys per query. grouping, granularity: see the kernels. residual: how the
    dense-minus-sparse difference is kept between anchors.
    """

    density: float
    tail: int = 64
    grouping: str = "cells"
    granularity: str = "token"
    residual: str = "auto"
    schedule: Schedule = Schedule()


_PAPER_H3 = Recipe(0.25, tail=0, grouping="pddp", residual="bf16", schedule=Schedule(dense_layers=(0,)))
_AUTO = Recipe(0.10, schedule=Schedule(refresh=(0.35, 0.6)))
PRESETS: dict[str, Recipe] = {
    "auto": _AUTO,
    "paper": replace(_PAPER_H3, schedule=replace(_PAPER_H3.schedule, refresh=(0.5,))),
    "paper-h3": _PAPER_H3,
    "quality": Recipe(0.15, schedule=Schedule(refresh=(0.3, 0.45, 0.65), dense_end=Span(steps=1))),
    "speed": Recipe(0.10, schedule=Schedule(dense_start=Span(fraction=0.1), refresh=(0.22, 0.45))),
    "few-step": Recipe(0.20, schedule=Schedule(dense_start=Span(steps=1))),
    "custom": _AUTO,
}


@dataclass(frozen=True)
class SparsePlan:
    """A preset and what the user changed about it; None = the preset's own. Raises ValueError on anything a run could not honour.

    schedule: changes of the preset's schedule, or a whole one. min_tokens: shorter sequences run dense (at least 1024). backend: "auto" or
    a kernel backend's name, then strict. precision: of the sparse attention: "auto", "bf16" (the model's own), "int8" or "fp8"; a wish,
    for where the host forbids it or no kernel has it, bf16 is taken and the report says so.
    """

    preset: str = "auto"
    density: float | None = None
    tail: int | None = None
    grouping: str | None = None
    granularity: str | None = None
    residual: str | None = None
    schedule: Schedule | ScheduleChange | None = None
    min_tokens: int = 4096
    backend: str = "auto"
    precision: str = "auto"
    verbose: bool = False

    def __post_init__(self):
        _one_of("preset", self.preset, PRESETS)
        if self.density is not None:
            check_density(self.density)
        for name, value, allowed in (
            ("tail", self.tail, TAILS),
            ("grouping", self.grouping, GROUPINGS),
            ("granularity", self.granularity, GRANULARITIES),
        ):
            if value is not None:
                _one_of(name, value, allowed)
        if self.residual is not None and (not isinstance(self.residual, str) or rank_of(self.residual) is None):
            _one_of("residual", self.residual, (*RESIDUALS, "rank-<r>"))
        if self.schedule is not None and not isinstance(self.schedule, Schedule | ScheduleChange):
            raise ValueError(f"schedule is a {type(self.schedule).__name__}; connect the output of MC-Sparse Schedule, or nothing")
        check_number("min_tokens", self.min_tokens, int)
        if self.min_tokens < MIN_TOKENS_FLOOR:
            raise ValueError(f"min_tokens is {self.min_tokens}; the least is {MIN_TOKENS_FLOOR} (shorter calls include cross-attention)")
        _one_of("backend", self.backend, backend_names())
        _one_of("precision", self.precision, PRECISIONS)
        if self.preset == "custom" and self.density is None and not (self.schedule and self.schedule.density_curve):
            raise ValueError("preset 'custom' has no density of its own: set density (0.05 to 1.00) or give a density curve")

    def recipe(self, full_steps: int) -> Recipe:
        """The settings for a schedule of so many steps over the whole noise range."""
        base = PRESETS[self.recipe_name(full_steps)]
        changes = {n: getattr(self, n) for n in ("density", "tail", "grouping", "granularity", "residual", "schedule")}
        if isinstance(self.schedule, ScheduleChange):
            changes["schedule"] = self.schedule.over(base.schedule)
        return replace(base, **{n: v for n, v in changes.items() if v is not None})

    def recipe_name(self, full_steps: int) -> str:
        """The preset that such a schedule gets: `auto` turns to `few-step` for short ones."""
        return "few-step" if self.preset == "auto" and full_steps <= FEW_STEPS else self.preset

    def summary(self) -> dict:
        """The plan as plain values, for reports."""
        return asdict(self)


def _one_of(name: str, value, allowed):
    if not any(value == a and type(value) is type(a) for a in allowed):
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(map(str, allowed))}")


def full_step_count(progress: tuple[float, ...], end_progress: float) -> int:
    """Steps a schedule as fine as this run's would have over the whole noise range."""
    covered = max(end_progress - progress[0], 1e-3)
    return max(1, round(len(progress) / covered))
