"""The chart says what the report says: colours are read back from the pixels."""
import numpy as np
import pytest

from mc_sparse.nodes.chart import ANCHOR, DENSE, LEFT, MARGIN, NOTHING, REUSE, WIDTH, blank, chart, stacked


def report(rows=2, steps=4, **changes):
    actions = [(0, "dense", "dense start"), (1, "anchor", ""), (2, "reuse", ""), (3, "dense", "dense end")]
    timeline = [[step, site, action, reason] for step, action, reason in actions if step < steps for site in range(rows)]
    base = {
        "status": "finished", "plan": {"preset": "auto"}, "steps": steps, "seconds": 4.0, "cache_bytes": 3 * 2**20,
        "recipe": {"density": 0.1, "tail": 64, "grouping": "cells", "granularity": "token", "residual": "auto"},
        "counts": {"dense": 4, "anchor": 2, "reuse": 2}, "retained_mass": 0.9, "realised_density": 0.12, "notes": [],
        "attention_seconds": {"dense": 1.0, "anchor": 0.5, "reuse": 0.5}, "sites": [f"double {i}" for i in range(rows)],
        "timeline": timeline, "model": "WanModel",
    }  # fmt: skip
    return base | changes


def middle(picture, step, steps, row=0, rows=2):
    """Colour in the middle of one field of the timeline."""
    height = max(7, min(26, 360 // rows))
    x = LEFT + (step + 0.5) * (WIDTH - LEFT - MARGIN) / steps
    return tuple(picture[int(78 + (row + 0.4) * height), int(x)])


def test_each_action_and_reason_has_its_colour():
    picture = chart(report())
    assert picture.shape[1:] == (WIDTH, 3) and picture.dtype == np.uint8
    for row in range(2):
        assert [middle(picture, step, 4, row) for step in range(4)] == [DENSE[0], ANCHOR, REUSE, DENSE[1]]


def test_what_was_not_called_stays_empty():
    r = report()
    r["timeline"] = [t for t in r["timeline"] if t[:2] != [2, 1]]  # a step cache skipped it
    assert middle(chart(r), 2, 4, 1) == NOTHING and middle(chart(r), 2, 4, 0) == REUSE


def test_bars_have_the_length_of_the_numbers():
    picture = chart(report())
    green = (picture == REUSE).all(2)
    assert sorted(int(n) for n in set(green[:, 260:560].sum(1))) != [0] and abs(green[:, 260:561].sum(1).max() - 271) <= 2  # 90 % of 300


def test_many_rows_and_steps_fit():
    picture = chart(report(rows=120, steps=50))
    assert picture.shape[1] == WIDTH and 840 < picture.shape[0] < 1400


@pytest.mark.parametrize(
    "changes",
    [
        {"timeline": [], "sites": [], "retained_mass": None, "realised_density": None, "attention_seconds": {}, "steps": 0, "seconds": 0.0},
        {"notes": ["a very long sentence that must be wrapped somewhere " * 6, "another"]},
        {"timeline": [[0, 0, "dense", f"a rather long reason, number {i} " * 8] for i in range(9)]},
        {"model": None},
    ],
)
def test_unusual_reports(changes):
    picture = chart(report(**changes))
    assert picture.shape[1] == WIDTH and (picture < 128).any()


def test_blank_says_something_and_pictures_stack():
    words = blank("There was no run. " * 12)
    assert (words < 160).any() and stacked([words, chart(report())]).shape[0] == len(words) + len(chart(report()))
