"""Presets and README say what the committed study says."""
from pathlib import Path

import pytest

from mc_sparse.mcsparse_core.plan import PRESETS
from mc_sparse.mcsparse_core.schedule import lay_out

ROOT = Path(__file__).resolve().parents[1]
STEPS = 30


@pytest.fixture(scope="module")
def report(script):
    return script("benchmarks/study_report.py")


@pytest.fixture(scope="module")
def study(report):
    return report.Study(report.newest())


def anchors(preset):
    recipe = PRESETS[preset]
    return lay_out(recipe.schedule, recipe.density, [i / STEPS for i in range(STEPS)]).anchors


def test_presets_equal_the_studys_choice(report, study):
    chosen = report.choices(study)
    for name in ("auto", "quality", "speed", "few-step"):
        recipe = PRESETS[name]
        assert (recipe.tail, recipe.granularity, recipe.grouping) == (chosen["tail"], chosen["granularity"], chosen["grouping"])
        assert recipe.residual == chosen["residual"] and recipe.schedule.dense_layers == chosen["dense_layers"]
    assert PRESETS["auto"].density == 0.10 and len(anchors("auto")) == chosen["auto_anchors"]
    assert PRESETS["quality"].density == 0.15 and len(anchors("quality")) == chosen["quality_anchors"]
    speed = PRESETS["speed"]
    assert chosen["speed"] == f"{speed.density:.2f} tail {speed.tail} {speed.granularity}, anchors {', '.join(map(str, anchors('speed')))}"


def test_ours_beats_the_papers_configuration_at_no_more_work(study):
    paper = study.rows["preset", "paper"]
    for factor, value in (("preset", "auto"), ("more anchors", "0.10 anchors 5, 9, 14, 20"), ("preset", "quality")):
        ours = study.rows[factor, value]
        assert ours["attention_work"] < paper["attention_work"]
        assert all(a > b for a, b in zip(ours["psnr_by_seed"], paper["psnr_by_seed"], strict=True)), value
    equal = study.rows["block", "0.25 tail 64 token"], study.rows["paper", "0.25"]
    differences = [a - b for a, b in zip(*(r["psnr_by_seed"] for r in equal), strict=True)]
    assert abs(equal[0]["attention_work"] - equal[1]["attention_work"]) < 0.02 and min(differences) > 3


def test_readme_holds_the_studys_table(report, study):
    assert report.table(study) in (ROOT / "README.md").read_text(encoding="utf-8")
