"""Conditionings in every arrangement ComfyUI makes, and samplers of every habit. 2 blocks, 10 steps, anchors at steps 1 and 5."""
import pytest

pytestmark = pytest.mark.comfy
GROUP = "branches"


def times(n: float, dense=2, anchor=4, reuse=14) -> dict:
    return {"dense": int(dense * n), "anchor": int(anchor * n), "reuse": int(reuse * n)}


def test_batched_split_and_alternating_guidance_are_the_same(scene):
    seen = scene("guidance")
    assert seen["counts"] == [times(2)] * 3
    assert seen["split"] <= 1e-3 and seen["alternating"] <= 1e-3 and seen["against_dense"] > 0.01


def test_prompts_of_different_length(scene):
    assert scene("text_lengths")["counts"] == times(2)


def test_each_row_of_a_batch_equals_it_alone(scene):
    seen = scene("batch_of_two")
    assert max(seen["rel"]) <= 1e-3 and seen["apart"] > 0.1 and seen["counts"] == times(2)


def test_area_conditioning(scene):
    seen = scene("areas")
    # Whole picture and area, each with its negative: four branches, and the area's own size.
    assert seen["counts"] == times(4) and seen["finite"] and seen["rel"] < 0.6


def test_conditioning_that_joins_late_anchors_first(scene):
    seen = scene("timestep_range")
    first_of_late = [t[2] for t in seen["timeline"] if t[0] in (5, 6)]
    assert "anchor" in first_of_late and seen["counts"]["dense"] == 2 and sum(seen["counts"].values()) in (20, 22)


def test_guidance_that_sets_in_late_anchors_first(scene):
    # The positive side as always; the negative one appears at step 5, anchors there in both blocks and reuses four times.
    assert scene("late_guidance")["counts"] == {"dense": 2, "anchor": 6, "reuse": 22}


@pytest.mark.parametrize("schedule", ["standard_static", "standard_uniform"])
def test_context_windows(scene, schedule):
    seen = scene("windows")[schedule]
    # On a busy machine so small a run may be called slower than dense.
    notes = [note for note in seen["notes"] if "slower than dense" not in note]
    assert seen["counts"]["reuse"] > 0 and seen["rel"] < 0.6 and not notes
    if schedule == "standard_static":
        assert seen["counts"] == times(4)  # two windows, two sides


def test_skip_layer_guidance(scene):
    seen = scene("skip_layer")
    full, simple = seen["SkipLayerGuidanceDiT"], seen["SkipLayerGuidanceDiTSimple"]
    # Two sides with 2 blocks, and a third pass that skips one of them.
    assert full["counts"] == times(2.5) and full["reasons"] == {"dense start": 5}
    # The negative side alone skips a block.
    assert simple["counts"] == times(1.5)
    for run in (full, simple):
        assert run["order"] == 0 and run["rel"] < run["skipping"]


@pytest.mark.parametrize(
    ("sampler", "evaluations", "anchors", "counts"),
    [
        ("euler", 10, [1, 5], times(1)),
        ("heun", 19, [1, 5], {"dense": 2, "anchor": 4, "reuse": 32}),
        ("heunpp2", 27, [1, 5], {"dense": 2, "anchor": 4, "reuse": 48}),
        ("dpmpp_2s_ancestral", 19, [1, 5], {"dense": 4, "anchor": 4, "reuse": 30}),
        ("uni_pc", 10, [1, 5], times(1)),
        ("dpmpp_2m_sde", 10, [1, 5], times(1)),
        ("lcm", 10, [1, 5], times(1)),
        ("sa_solver", 10, [1, 5], times(1)),
        ("dpm_2", 19, [1, 5], {"dense": 4, "anchor": 4, "reuse": 30}),
        ("dpm_fast", 10, [1, 5], None),
    ],
)
def test_samplers(scene, sampler, evaluations, anchors, counts):
    run = scene("samplers")[sampler]
    assert run["finite"] and sum(run["counts"].values()) == 2 * run["evaluations"]
    assert run["evaluations"] == (evaluations or run["evaluations"]) and run["anchors"] == (anchors or run["anchors"])
    assert run["counts"] == (counts or run["counts"]) and run["counts"]["reuse"] > run["counts"]["anchor"] == 2 * len(run["anchors"])


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_schedule_shared_by_two_samplers(scene, at):
    seen = scene("advanced_split")[str(at)]
    assert seen["finite"] and seen["second_actions"] == ["anchor", "anchor"] and seen["second"]["dense"] == 0
    assert sum(seen["first"].values()) == 2 * at and sum(seen["second"].values()) == 2 * (10 - at)
    # The dense start is 20 % of the full range, two steps: part one anchors at their last, part two at its first.
    assert seen["anchors"] == [[min(1, at - 1)], [0]]


def test_second_pass_on_the_upscaled_result(scene):
    seen = scene("hires")
    assert seen["anchors"] == [[1], [0]]
    assert seen["counts"] == [{"dense": 2, "anchor": 2, "reuse": 16}, {"dense": 0, "anchor": 2, "reuse": 18}]


def test_another_guider(scene):
    assert scene("guider")["counts"] == times(3)


def test_two_experts_share_nothing(scene):
    seen = scene("two_experts")
    assert seen["high"]["counts"] == {"dense": 2, "anchor": 2, "reuse": 6}
    assert seen["low"]["counts"] == {"dense": 0, "anchor": 3, "reuse": 12}  # 3 blocks; its first step is an anchor
