from dataclasses import replace

import pytest

from mc_sparse.mcsparse_core.plan import PRESETS, Recipe, SparsePlan, full_step_count
from mc_sparse.mcsparse_core.schedule import Schedule, ScheduleChange


def test_a_plan_without_changes_is_its_preset():
    for name in PRESETS:
        if name != "custom":
            assert SparsePlan(preset=name).recipe(30) == PRESETS[name]


def test_changes_win_over_the_preset():
    schedule = Schedule(every=5)
    plan = SparsePlan("paper", density=0.3, tail=32, grouping="cells", granularity="cell32", residual="off", schedule=schedule)
    assert plan.recipe(30) == Recipe(0.3, 32, "cells", "cell32", "off", schedule)
    assert SparsePlan("paper", tail=64).recipe(30).tail == 64
    assert SparsePlan("auto", tail=0).recipe(30).tail == 0


def test_a_schedule_change_is_laid_over_the_preset():
    plan = SparsePlan("quality", schedule=ScheduleChange(dense_layers=(0,)))
    assert plan.recipe(30).schedule == replace(PRESETS["quality"].schedule, dense_layers=(0,))
    assert SparsePlan("quality", schedule=ScheduleChange()).recipe(30) == PRESETS["quality"]


def test_auto_turns_to_few_step_by_the_whole_schedules_length():
    assert SparsePlan().recipe(8) == PRESETS["few-step"]
    assert SparsePlan().recipe(9) == PRESETS["auto"]
    assert SparsePlan("quality").recipe(4) == PRESETS["quality"]
    assert full_step_count((0.0, 0.1, 0.2), 0.3) == 10  # the first three of ten
    assert full_step_count((0.9,), 1.0) == 10
    assert full_step_count((0.0, 0.25, 0.5, 0.75), 1.0) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "turbo"}, "preset is 'turbo'; allowed: auto, paper"),
        ({"density": 0.04}, "density 0.04 is outside 0.05 to 1.00"),
        ({"density": 1.01}, "outside 0.05 to 1.00"),
        ({"density": float("nan")}, "outside 0.05 to 1.00"),
        ({"tail": 16}, "tail is 16; allowed: 0, 128, 64, 32"),
        ({"grouping": "kmeans"}, "grouping is 'kmeans'; allowed: pddp, cells"),
        ({"granularity": "block"}, "granularity is 'block'; allowed: token, cell32"),
        ({"residual": "fp4"}, "residual is 'fp4'"),
        ({"schedule": "every 5"}, "schedule is a str; connect the output of MC-Sparse Schedule"),
        ({"min_tokens": 512}, "min_tokens is 512; the least is 1024"),
        ({"backend": "magic"}, "backend is 'magic'; allowed: auto, reference"),
        ({"precision": "int4"}, "precision is 'int4'; allowed: auto, bf16, int8, fp8"),
        ({"precision": None}, "precision is None"),
        ({"density": "0.2"}, "density is '0.2', of type str; it must be a number"),
        ({"density": True}, "density is True, of type bool"),
        ({"tail": 64.0}, "tail is 64.0; allowed"),
        ({"residual": 8}, "residual is 8"),
        ({"preset": []}, r"preset is \[\]"),
        ({"min_tokens": None}, "min_tokens is None"),
        ({"min_tokens": float("nan")}, "min_tokens is nan"),
        ({"preset": "custom"}, "preset 'custom' has no density of its own"),
    ],
)
def test_wrong_plans_say_what_came_and_what_is_allowed(change, message):
    with pytest.raises(ValueError, match=message):
        SparsePlan(**change)


def test_custom_takes_its_density_from_the_widget_or_a_curve():
    assert SparsePlan("custom", density=0.3).recipe(4).density == 0.3
    assert SparsePlan("custom", schedule=Schedule(density_curve=((0, 0.4),))).recipe(4).schedule.density_curve


def test_a_plan_is_frozen_and_summarised_in_plain_values():
    import json

    plan = SparsePlan("quality", density=0.2, precision="int8")
    with pytest.raises(AttributeError):
        plan.density = 0.3
    summary = json.loads(json.dumps(plan.summary()))
    assert summary["density"] == 0.2 and summary["precision"] == "int8"
    assert plan.recipe(30) == SparsePlan("quality", density=0.2).recipe(30)  # precision is no part of a recipe
