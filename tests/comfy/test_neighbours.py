"""MC-Sparse beside other nodes, on the models of the Wan family, and on models it does not support."""
import pytest

pytestmark = pytest.mark.comfy
GROUP = "neighbours"
COUNTS = {"dense": 2, "anchor": 4, "reuse": 14}


@pytest.mark.parametrize("place", ["before", "after"])
def test_foreign_override_gets_exactly_the_dense_calls(scene, place):
    seen = scene(f"override_{place}")
    assert seen["counts"] == COUNTS and seen["rel"] <= 1e-6
    # 20 cross-attentions, 2 dense calls and the dense part of 4 anchors.
    assert seen["self"] == 26 and "foreign_override" in seen["dense_path"]


def test_foreign_overrides_on_both_sides(scene):
    seen = scene("override_on_both_sides")
    assert seen["counts"] == COUNTS and seen["rel"] <= 1e-6 and (seen["first"], seen["second"]) == (0, 26)


def test_attention_backend_node_after_ours(scene, version):
    seen = scene("attention_backend_node")
    if version <= (0, 19, 3):  # these have no such node
        assert seen["missing"]
        return
    assert seen["counts"] == COUNTS and seen["rel"] <= 1e-3


def test_override_that_replaces_ours_is_said_once(scene):
    seen = scene("override_in_mid_run")
    assert seen["finite"] and seen["warned"] == 1 and seen["counts"] == {"dense": 2, "anchor": 2, "reuse": 4}
    assert any("replaced MC-Sparse" in note for note in seen["notes"])


def test_unknown_keywords_reach_the_dense_path(scene):
    seen = scene("unknown_keyword")
    assert seen["seen"] and seen["counts"] == COUNTS and seen["rel"] <= 1e-6


def test_low_precision_where_the_host_allows_it(scene):
    seen = scene("low_precision")
    allowed, forbidden = seen["allowed"], seen["forbidden"]
    assert 0 < seen["rel"] < 0.05 and allowed["counts"] == COUNTS and allowed["precision"] == "int8"
    assert (allowed["precisions"], allowed["precision_reasons"], allowed["backends"]) == ({"int8": 14}, {}, {"reference": 14})
    # Step 0 is dense, 1 the anchor, 2 and 3 reuse it. At 4 its state is of no use, and 5 anchors by the schedule, so 4 is dense.
    assert forbidden["counts"] == {"dense": 4, "anchor": 4, "reuse": 12} and forbidden["precisions"] == {"int8": 4, "bf16": 8}
    assert forbidden["precision_reasons"] == {"the model rules low precision out": 8}


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("node", ["EasyCacheNode", "LazyCacheNode"])
def test_step_caches(scene, node, order):
    seen = scene("caches")[f"{node} {order}"]
    calls = sum(seen["counts"].values())
    assert seen["finite"] and 4 <= calls < 20 and seen["counts"]["anchor"] >= 2  # steps were skipped, anchors were not
    assert not any("replaced" in note for note in seen["notes"])


@pytest.mark.parametrize("order", ["before", "after"])
def test_compiled_model(scene, order):
    seen = scene("compiled")[order]
    assert seen["counts"] == COUNTS and max(seen["rel"]) <= 1e-3


def test_compiled_by_inductor(scene, version):
    seen = scene("compiled_inductor")
    if version <= (0, 8):  # slow: done in newer versions only
        assert seen["missing"]
        return
    assert seen["counts"] == {"dense": 0, "anchor": 1, "reuse": 5} and seen["rel"] <= 1e-3


def test_unpatched_graph_is_bitwise_the_same_afterwards(scene):
    assert scene("unpatched_afterwards")["same"]


@pytest.mark.parametrize(
    ("name", "model", "sites", "layout"),
    [
        ("vace", "VaceWanModel", ["double 0", "double 0.1", "double 1", "double 1.1"], "((4, 16, 16), 0, 0, ())"),
        ("image_to_video", "WanModel", ["double 0", "double 1"], "((4, 16, 16), 0, 0, ())"),
        ("reference_image", "WanModel", ["double 0", "double 1"], "((8, 16, 16), 256, 0, ((0, 256),))"),
        ("large_reference", "WanModel", ["double 0", "double 1"], "((4, 16, 16), 256, 0, ())"),
        ("camera", "CameraWanModel", ["double 0", "double 1"], "((4, 16, 16), 0, 0, ())"),
        ("humo", "HumoWanModel", ["double 0", "double 1"], "((7, 16, 16), 0, 256, ((1792, 2048),))"),
        ("scail", "SCAILWanModel", ["double 0", "double 1"], "((8, 16, 16), 256, 512, ())"),
        ("sound_to_video", "WanModel_S2V", ["double 0", "double 1"], "((18, 8, 8), 0, 160, ((1152, 1312),))"),
        ("animate", "AnimateWanModel", [f"double {i}" for i in range(5)], "((4, 16, 16), 0, 0, ())"),
        ("text_to_video_5b", "WanModel", ["double 0", "double 1"], "((4, 16, 16), 0, 0, ())"),
        ("image_to_video_5b", "WanModel", ["double 0", "double 1"], "((4, 16, 16), 0, 0, ())"),
    ],
)
def test_wan_family(scene, version, name, model, sites, layout):
    seen = scene(name)
    if name == "scail" and version <= (0, 8):  # not in it yet
        assert seen["missing"]
        return
    if name == "sound_to_video" and version < (0, 8):  # its attention is not given the transformer options there
        assert seen["rel"] == 0 and not seen["sites"] and any("no attention call reached" in note for note in seen["notes"])
        return
    assert (seen["model"], seen["sites"], seen["layouts"]) == (model, sites, [layout])
    assert seen["counts"] == {"dense": 0, "anchor": len(sites), "reuse": 4 * len(sites)} and 0 < seen["rel"] < 0.3
    assert any("too many to keep exact" in note for note in seen["notes"]) == (name in ("large_reference", "scail"))


def test_odd_sizes(scene):
    for shape, seen in scene("odd_sizes").items():
        assert seen["counts"] == {"dense": 0, "anchor": 2, "reuse": 8} and seen["rel"] < 0.3, shape


def test_unsupported_model_stays_dense_with_a_reason(scene):
    seen = scene("hunyuan_video")
    assert seen["same"] and seen["reasons"] == {"model family HunyuanVideo is not supported yet": 8}
    assert seen["notes"] == ["this run was dense: model family HunyuanVideo is not supported yet"]


@pytest.mark.parametrize(
    ("name", "model", "how", "calls", "reason"),
    [
        # The pose video's own branch is the only self-attention of equal lengths; without a pose video the main one is.
        ("animate_2", "WanAnimate2Model", "pose", 8, "attends frame by frame, each with its own pose frame"),
        ("animate_2", "WanAnimate2Model", "no pose", 8, "attends frame by frame, each with its own pose frame"),
        ("causal", "CausalWanModel", "by blocks", 0, "generates block by block from a key/value cache"),
        ("causal", "CausalWanModel", "at once", 8, "generates block by block from a key/value cache"),
    ],
)
def test_wan_models_of_another_attention_stay_dense_with_a_reason(scene, version, name, model, how, calls, reason):
    seen = scene(name)
    if "missing" in seen:
        assert version < (0, 33)
        return
    seen = seen[how]
    assert seen["same"] and seen["model"] == model and seen["notes"] == [f"this run was dense: {model} {reason}"]
    assert seen["counts"] == {"dense": calls, "anchor": 0, "reuse": 0}
    assert seen["reasons"] == ({f"{model} {reason}": calls} if calls else {})


def test_several_gpus_stay_dense_with_a_reason(scene):
    seen = scene("several_gpus")
    assert seen["same"] and any("several GPUs" in note for note in seen["notes"])


def test_loader_is_asked_for_room(scene):
    seen = scene("memory_is_asked_for")
    assert seen["forecast"] <= seen["asked"] < seen["forecast"] + seen["per_row"] and seen["rest"] == [16, 81, 90, 160]
    assert 0 < seen["budget"] <= 0.75 * 10**12


def test_forecast_is_what_a_run_holds(scene):
    for recipe, (forecast, held) in scene("forecast_holds").items():
        assert forecast == held, recipe
