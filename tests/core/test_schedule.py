"""Schedules with numbers one can check by hand."""
from dataclasses import replace

import pytest

from mc_sparse.mcsparse_core.schedule import (
    Action,
    Schedule,
    ScheduleChange,
    Span,
    decide,
    flow_progress,
    lay_out,
    progress_of,
    step_of,
    why_no_schedule,
)
from mc_sparse.mcsparse_core.schedule_text import parse_schedule


def even(steps, start=0.0, end=1.0):
    return tuple(start + (end - start) * i / steps for i in range(steps))


def actions(schedule, steps=10, progress=None, density=0.2):
    """The letters D, A, R a site that runs on every step gets."""
    timeline = lay_out(schedule, density, progress or even(steps))
    anchored, letters = None, ""
    for step in range(timeline.steps):
        action = decide(timeline, False, step, anchored).action
        if action is Action.ANCHOR:
            anchored = step
        letters += action.name[0]
    return letters


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), "DARRRRRRRR"),  # 20 % of 10 steps: steps 0 and 1, the second anchors
        (Schedule(dense_start=Span(steps=0)), "ARRRRRRRRR"),
        (Schedule(dense_start=Span(steps=1)), "ARRRRRRRRR"),
        (Schedule(dense_start=Span(steps=4)), "DDDARRRRRR"),
        (Schedule(dense_start=Span(fraction=0.25)), "DDARRRRRRR"),  # a step that begins inside the start is dense
        (Schedule(refresh=(0.5,)), "DARRRARRRR"),
        (Schedule(refresh=(0.05, 0.5)), "DARRRARRRR"),  # a point inside the dense start is served by the first anchor
        (Schedule(every=3), "DARRARRARR"),
        (Schedule(every=4), "DARRRARRRD"),  # step 9 could only anchor for nobody
        (Schedule(anchor_steps=(3, 6)), "DDDARRARRR"),  # the dense start lasts until the first anchor
        (Schedule(anchor_steps=(1, 2)), "DDARRRRRRR"),  # an anchor right before another one serves nothing
        (Schedule(dense_end=Span(steps=2)), "DARRRRRRDD"),
        (Schedule(dense_end=Span(fraction=0.3)), "DARRRRRDDD"),
        (Schedule(dense_start=Span(steps=10)), "DDDDDDDDDD"),
        (Schedule(dense_start=Span(steps=99)), "DDDDDDDDDD"),
        (Schedule(dense_end=Span(steps=99)), "DDDDDDDDDD"),
        (Schedule(anchor_steps=(40,)), "DDDDDDDDDD"),
    ],
)
def test_actions_of_ten_steps(schedule, expected):
    assert actions(schedule) == expected


def test_a_run_that_starts_late_anchors_at_once():
    assert actions(Schedule(refresh=(0.5,)), progress=even(10, 0.3, 1.0)) == "ARRARRRRRR"
    assert actions(Schedule(refresh=(0.5,)), progress=even(10, 0.6, 1.0)) == "ARRRRRRRRR"
    assert actions(Schedule(dense_start=Span(steps=3)), progress=even(5, 0.5, 1.0)) == "ARRRR"


def test_a_run_that_ends_early_keeps_the_full_ranges_fractions():
    assert actions(Schedule(), progress=even(5, 0.0, 0.25)) == "DDDAR"
    assert actions(Schedule(dense_end=Span(fraction=0.1)), progress=even(5, 0.0, 0.5)) == "DARRR"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs(steps):
    assert actions(Schedule(dense_start=Span(steps=1)), steps) == ("D", "AR", "ARR")[steps - 1]


def test_thirty_steps_of_the_paper():
    assert actions(Schedule(refresh=(0.5,)), 30) == "DDDDDA" + "R" * 9 + "A" + "R" * 14


def test_an_anchor_on_a_skipped_step_stays_due():
    timeline = lay_out(Schedule(refresh=(0.5,)), 0.2, even(10))
    assert decide(timeline, False, 5, 1).action is Action.ANCHOR
    assert decide(timeline, False, 7, 1).action is Action.ANCHOR
    assert decide(timeline, False, 7, 5).action is Action.REUSE


def test_a_second_evaluation_of_the_anchor_step_reuses():
    timeline = lay_out(Schedule(), 0.2, even(10))
    assert decide(timeline, False, 1, 1).action is Action.REUSE


def test_a_branch_that_appears_late_anchors_unless_nothing_follows():
    timeline = lay_out(Schedule(), 0.2, even(10))
    assert decide(timeline, False, 6, None).action is Action.ANCHOR
    assert decide(timeline, False, 9, None).reason == "no step to reuse"


def test_dense_reasons():
    timeline = lay_out(Schedule(dense_end=Span(steps=1)), 0.2, even(10))
    assert [decide(timeline, False, s, None).reason for s in (0, 9)] == ["dense start", "dense end"]
    assert decide(timeline, True, 5, 1).reason == "dense layer"


def test_density_curve_is_read_at_anchors():
    schedule = Schedule(every=4, density_curve=((0.0, 0.4), (0.5, 0.2), (1.0, 0.1)))
    timeline = lay_out(schedule, 0.9, even(10))
    assert timeline.anchors == (1, 5, 9)
    assert timeline.densities == pytest.approx((0.36, 0.2, 0.12))
    assert lay_out(Schedule(every=4), 0.9, even(10)).densities == (0.9, 0.9, 0.9)


def test_step_of_grid_points_midpoints_and_offsets():
    sigmas = (1.0, 0.75, 0.5, 0.25, 0.0)
    assert [step_of(s, sigmas) for s in (1.0, 0.9999, 0.8, 0.75, 0.6, 0.25, 0.1, 0.0, 1.5)] == [0, 0, 0, 1, 1, 3, 3, 3, 0]


def test_progress_by_bisection_equals_the_closed_form():
    shift, sigmas = 5.0, (1.0, 0.9, 0.5, 0.1, 0.0)
    found = progress_of(sigmas, lambda p: shift * (1 - p) / (1 + (shift - 1) * (1 - p)))
    assert found == pytest.approx(flow_progress(sigmas, shift), abs=1e-9)


@pytest.mark.parametrize("sigmas", [(), (1.0,), (0.0, 0.0), (0.0,) * 5, (1.0, 0.5, 0.7, 0.0), (0.2, 0.9)])
def test_no_schedule_for_odd_noise_levels(sigmas):
    assert why_no_schedule(sigmas)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (("auto", "", " Auto ", "", "auto"), ScheduleChange()),
        (("20%", "first", "0", "none", "none"),
         ScheduleChange(Span(fraction=0.2), (), dense_end=Span(steps=0), dense_layers=(), density_curve=())),
        ((" 0.2 ", " First only ", "none", " ", ""), ScheduleChange(Span(fraction=0.2), (), dense_end=Span(steps=0))),
        (("6 steps", "every 5", "1 step", "0, 1, -1", "0:0.40 0.5:0.25 1:0.15"),
         ScheduleChange(Span(steps=6), every=5, dense_end=Span(steps=1), dense_layers=(0, 1, -1),
                        density_curve=((0, 0.4), (0.5, 0.25), (1, 0.15)))),
        (("0", "9, 25", "5%", "38-40,\u22121", ""),
         ScheduleChange(Span(steps=0), anchor_steps=(9, 25), dense_end=Span(fraction=0.05), dense_layers=(38, 39, 40, -1))),
        (("", "35%, 60.5%", "", " 7 , 7", "0:0.4, 1:0.2"),
         ScheduleChange(refresh=(0.35, 0.605), dense_layers=(7,), density_curve=((0, 0.4), (1, 0.2)))),
    ],
)  # fmt: skip
def test_schedule_text(fields, expected):
    assert parse_schedule(*fields) == expected


@pytest.mark.parametrize(
    ("field", "text"),
    [(0, t) for t in ("a", "-1", "100%", "1.5", "20 percent", "nan", "20%%")]
    + [(1, t) for t in ("every", "every 1", "every x", "9, 9", "25, 9", "-3", "1,,2", "1.5", "second", "60%, 35%", "120%", "35%, 0.6", "%")]
    + [(2, "x"), (2, "-2"), (2, "inf")]
    + [(3, t) for t in ("5-3", "1,,2", "a", "1;2", "1.0", "--1", ",", "0-99999999")]
    + [(4, t) for t in ("0.4", "0:0.4 0:0.2", "0:2", "0:0.01", "2:0.2", "a:b", "1:0.2 0:0.4", "0:nan")],
)
def test_malformed_schedule_text_names_the_field(field, text):
    fields = ["20%", "first", "0", "", ""]
    fields[field] = text
    name = ("dense start", "anchors", "dense end", "dense layers", "density curve")[field]
    with pytest.raises(ValueError, match=f"MC-Sparse schedule: {name} is .*Write"):
        parse_schedule(*fields)


def test_a_change_leaves_the_rest_of_the_preset_alone():
    base = Schedule(refresh=(0.35, 0.6), dense_end=Span(steps=1), dense_layers=(0,))
    assert ScheduleChange().over(base) == base
    assert parse_schedule("auto", "auto", "auto", "-1", "auto").over(base) == replace(base, dense_layers=(-1,))
    assert parse_schedule("3", "every 4", "", "", "").over(base) == replace(base, dense_start=Span(steps=3), refresh=(), every=4)
    assert parse_schedule("", "first", "none", "none", "").over(base) == Schedule()


def test_an_anchor_inside_the_dense_start_is_an_error_when_it_can_be_known():
    with pytest.raises(ValueError, match="anchor at step 3 lies inside the dense start of 6 steps"):
        parse_schedule("6", "3, 9", "0", "", "")
    assert parse_schedule("6", "5, 9", "0", "", "").anchor_steps == (5, 9)
    with pytest.raises(ValueError, match="anchor at step 3 lies inside the dense start of 10 steps"):
        lay_out(parse_schedule("20%", "3, 9", "0", "", "").over(Schedule()), 0.2, even(50))


@pytest.mark.parametrize(
    "fields",
    [
        {"dense_start": "20%"}, {"every": 2.5}, {"every": "5"}, {"anchor_steps": (2.5,)}, {"anchor_steps": [3]}, {"dense_layers": "0"},
        {"dense_layers": (True,)}, {"refresh": ("0.5",)}, {"every": 1}, {"every": 3, "refresh": (0.5,)}, {"density_curve": ((0, "0.2"),)},
    ],
)  # fmt: skip
def test_schedules_of_wrong_types_are_value_errors(fields):
    with pytest.raises(ValueError, match="."):
        Schedule(**fields)


@pytest.mark.parametrize(
    "fields", [{"steps": 2.5}, {"steps": -1}, {"fraction": 1.0}, {"fraction": float("nan")}, {}, {"steps": 1, "fraction": 0.1}]
)
def test_spans_of_wrong_types_are_value_errors(fields):
    with pytest.raises(ValueError, match="."):
        Span(**fields)


def test_absurd_numbers_are_refused_at_once():
    many = "9" * 5000
    for field, text in (("dense_layers", "0-20000000"), ("dense_layers", many), ("anchors", f"every {many}"), ("dense_start", many)):
        fields = {"dense_start": "", "anchors": "", "dense_end": "", "dense_layers": "", "density_curve": "", field: text}
        with pytest.raises(ValueError, match="MC-Sparse schedule: "):
            parse_schedule(**fields)
