"""A run in ComfyUI: its counts, its result, its ends, and what it leaves behind. The schedules are counted by hand.

The model has 2 blocks, a run 10 steps at even progress. Unless a test says otherwise the schedule is two dense steps, the second of
which is the first anchor, and another anchor at step 5.
"""
import json

import pytest

pytestmark = pytest.mark.comfy
GROUP = "basics"
AUTO_COUNTS = {"dense": 2, "anchor": 4, "reuse": 14}


def test_counts_equal_the_schedule(scene):
    run = scene("auto_run")
    assert run["counts"] == AUTO_COUNTS and run["anchors"] == [1, 5] and run["reasons"] == {"dense start": 2}
    assert [t[2] for t in run["timeline"] if t[1] == 0] == ["dense", "anchor", *["reuse"] * 3, "anchor", *["reuse"] * 4]
    assert run["passed_through"] == {"cross-attention": 20} and 0.01 < run["rel"] < 0.3


def test_full_density_is_dense(scene):
    assert scene("full_density")["rel"] <= 1e-4


def test_presets(scene):
    for preset, run in scene("presets").items():
        assert run["counts"]["reuse"] > 0 and run["counts"]["anchor"] >= len(run["anchors"]) and run["rel"] < 0.3, preset
        assert sum(run["counts"].values()) == 2 * run["steps"], preset


def test_every_choice_reaches_the_recipe(scene):
    for name, run in scene("options").items():
        wanted = {"tail none": 0}.get(name, name.split()[1])
        assert str(run["recipe"]) == str(wanted) and run["reuse"] == 8 and run["rel"] < 0.3, name


def test_schedule_node(scene):
    run = scene("schedule_node")
    assert run["anchors"] == [2, 6] and run["reasons"] == {"dense start": 4, "dense end": 2, "dense layer": 7}
    assert run["counts"] == {"dense": 13, "anchor": 2, "reuse": 5}


def test_later_prompts_equal_a_fresh_process(scene):
    fresh = scene("auto_run")["digest"]
    assert scene("second_prompt") == {"digest": fresh, "counts": AUTO_COUNTS}
    assert scene("other_size_between") == {"digest": fresh}


def test_input_model_stays_as_it_was(scene):
    seen = scene("input_untouched")
    assert seen["same"] and not seen["mentions"] and seen["dense"] == seen["dense_before"]


def test_patching_twice_replaces(scene):
    seen = scene("patched_twice")
    assert seen["wrappers"] == {"outer_sample": {"mc_sparse": 1}} and seen["counts"] == AUTO_COUNTS
    assert (seen["old"], seen["new"], seen["density"]) == (0, 1, 0.2)


def test_later_clones_work_and_share_the_reports(scene):
    seen = scene("cloned")
    assert seen["digest"] == scene("auto_run")["digest"] and seen["seen_by_original"] == 1 and seen["same_holder"]


def test_two_samplers_on_one_model(scene):
    seen = scene("two_samplers")
    # A dense start of 20 % of the full range: the second one begins at progress 0.5, so its first step is the anchor.
    assert seen["same"] and seen["finite"] and seen["anchors"] == [[1], [0]]
    assert seen["runs"] == [{"dense": 2, "anchor": 2, "reuse": 16}, {"dense": 0, "anchor": 2, "reuse": 18}]


@pytest.mark.parametrize("kind", ["dense", "anchor", "reuse", "last"])
def test_interrupt_leaves_nothing_behind(scene, kind):
    seen = scene("interrupted")[kind]
    assert (seen["error"], seen["status"]) == ("InterruptProcessingException", "interrupted")
    assert_clean(seen, scene("auto_run")["digest"])


@pytest.mark.parametrize("kind", ["anchor", "reuse"])
def test_out_of_memory_leaves_nothing_behind(scene, kind):
    seen = scene("out_of_memory")[kind]
    assert (seen["error"], seen["status"]) == ("OutOfMemoryError", "failed")
    assert_clean(seen, scene("auto_run")["digest"])


def test_end_leaves_nothing_behind(scene):
    seen = scene("finished")
    assert (seen["error"], seen["status"]) == (None, "finished")
    assert_clean(seen, scene("auto_run")["digest"])


def assert_clean(seen: dict, fresh: str):
    assert seen["restored"] and not any(seen["alive"]) and seen["bytes"] == seen["states"] == 0
    assert seen["next"] == fresh and seen["next_counts"] == AUTO_COUNTS


def test_memory_cap_keeps_the_run_dense(scene):
    run = scene("memory_cap")
    assert run["rel"] == 0 and run["cache_bytes"] == 0 and run["counts"]["reuse"] == 0
    assert any("memory cap" in note for note in run["notes"])


def test_short_sequences_say_why(scene):
    run = scene("short_sequence")
    assert run["same"] and run["passed_through"] == {"short, below 4096 tokens": 20, "cross-attention": 20}
    assert any("short, below 4096 tokens" in note for note in run["notes"])


def test_too_few_steps_say_why(scene):
    run = scene("too_few_steps")
    assert run["counts"]["reuse"] == 0 and any("too few" in note for note in run["notes"])


def test_odd_sigmas(scene):
    runs = scene("odd_sigmas")
    assert runs["rising"]["reasons"] == {"the noise levels do not descend": 4}
    assert runs["custom"]["steps"] == 13 and sum(runs["custom"]["counts"].values()) == 26


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no model", ["no model", "Connect a MODEL"]),
        ("not a model", ["of type object", "Connect a MODEL"]),
        ("density", ["0.03", "0.05 to 1.00", "usual"]),
        ("custom", ["'custom'", "set density"]),
        ("layers", ["dense layer 7", "2 blocks", "0 to 1"]),
        ("from the end", ["dense layer -3", "2 blocks"]),
        ("layer text", ["'5-3'", "38-40"]),
        ("start text", ["'some'", "20%"]),
        ("anchor in the start", ["step 2", "step 5"]),
        ("anchor in the start, at run time", ["step 2", "step 4"]),
        ("decode", ["(1, 4, 8, 8)", "16"]),
    ],
)
def test_messages(scene, case, words):
    said = scene("messages")[case]
    assert said.startswith("ValueError") and all(word in said for word in words), said


def test_bad_input_changes_nothing_and_is_seen_at_validation(scene):
    seen = scene("messages")
    assert seen["untouched"] and seen["validate"][:3] == [True] * 3 and "0.05 to 1.00" in seen["validate"][3]


def test_stats_node(scene):
    seen = scene("stats_node")
    assert "never patched" in seen["never"]["text"] and "No run of this model has ended" in seen["no run"]["text"]
    run = seen["run"]
    assert run["value"] == 7 and "14 reuse, 4 anchor, 2 dense of 20" in run["text"] and "WanModel" in run["text"]
    assert json.loads(run["json"])[0]["counts"] == AUTO_COUNTS
    assert run["shape"][0] == 1 and run["shape"][2:] == [1200, 3] and run["dark"] > 0.02


def test_log(scene):
    seen = scene("log_lines")
    lines = [text for level, text in seen["quiet"] if level == "INFO"]
    assert len(lines) == 1 and "14 reuse, 4 anchor, 2 dense" in lines[0]
    assert any("retained attention mass" in text for _, text in seen["verbose"])
