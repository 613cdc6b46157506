"""The shipped workflows and help pages: against the real server's node declarations, through the real frontend, and the demo run."""
import importlib.util
import json
import re
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.comfy
ROOT = Path(__file__).resolve().parent.parent.parent
WORKFLOWS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "workflows").glob("*.json"))}
OUR_NODES = ["MCSparseDemoDecode", "MCSparseDemoModel", "MCSparseDemoPrompt", "MCSparsePatchModel", "MCSparseSchedule", "MCSparseStats"]
MODEL_FILES = (
    "diffusion_models/wan2.1_t2v_1.3B_fp16.safetensors", "text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors",
    "vae/wan_2.1_vae.safetensors",
)  # fmt: skip
OF_THE_FRONTEND = {"MarkdownNote", "Note"}  # node types the server does not know
WIDGET_TYPES = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool, "COMBO": str}
TITLE_HEIGHT = 30  # pixels above a node's position
PICTURE_BYTES = 150_000


def _load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server(comfyui, python, tmp_path_factory):
    server = _load(Path(__file__).with_name("test_server.py")).Server(comfyui, python, tmp_path_factory.mktemp("workflows") / "base")
    for name in MODEL_FILES:  # empty: their names are enough to be offered
        file = server.base / "models" / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
    yield server
    server.process.terminate()
    server.process.wait(30)


@pytest.fixture(scope="module")
def nodes(server) -> dict:
    return json.loads(fetch(server, "/object_info")[1])


@pytest.fixture(scope="module")
def page(server):
    """The real frontend in Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="NOT TESTED in the real frontend: playwright is not installed")
    make = _load(ROOT / "scripts" / "make_workflows.py")
    if make.chromium() is None:
        pytest.skip("NOT TESTED in the real frontend: Chromium is not installed")
    with playwright.sync_playwright() as driver:
        page = make.open_page(driver, server.url)
        yield page
        page.context.browser.close()


def fetch(server, path: str) -> tuple[str, bytes]:
    """Content type and body; raises unless the status is 200."""
    with urllib.request.urlopen(server.url + path, timeout=60) as answer:
        return answer.headers.get_content_type(), answer.read()


def declared(node: dict) -> dict[str, tuple[str, dict]]:
    """Inputs of a server's node in order: name -> type, options; a combo's choices are options["options"]."""
    order = [(kind, name) for kind in ("required", "optional") for name in node["input_order"].get(kind, ())]
    inputs = {}
    for kind, name in order:
        of_type, options = (*node["input"][kind][name], {})[:2]
        inputs[name] = ("COMBO", options | {"options": of_type}) if isinstance(of_type, list) else (of_type, options)
    return inputs


def widgets(node: dict) -> dict[str, tuple[str, dict]]:
    return {n: (t, o) for n, (t, o) in declared(node).items() if t in WIDGET_TYPES and not o.get("forceInput")}


def values_of(saved: dict, node: dict) -> dict:
    """Widget values of a saved node by name; a seed is followed by what happens to it after a run."""
    left, named = list(saved.get("widgets_values", ())), {}
    for name, (_, options) in widgets(node).items():
        named[name] = left.pop(0)
        if options.get("control_after_generate"):
            assert left.pop(0) in ("fixed", "increment", "decrement", "randomize")
    assert not left, f"{saved['type']} has more values than widgets: {left}"
    return named


def as_prompt(workflow: dict, nodes: dict) -> dict:
    """The API form of a saved workflow that has no muted, bypassed or virtual nodes other than notes."""
    links = {link[0]: link for link in workflow["links"]}
    prompt = {}
    for saved in workflow["nodes"]:
        if saved["type"] in OF_THE_FRONTEND:
            continue
        linked = {i["name"]: [str(links[i["link"]][1]), links[i["link"]][2]] for i in saved["inputs"] if i["link"] is not None}
        prompt[str(saved["id"])] = {"class_type": saved["type"], "inputs": values_of(saved, nodes[saved["type"]]) | linked}
    return prompt


@pytest.mark.parametrize("name", WORKFLOWS)
def test_nodes_and_widgets_exist_and_values_are_allowed(name, nodes):
    for saved in WORKFLOWS[name]["nodes"]:
        if saved["type"] in OF_THE_FRONTEND:
            continue
        assert saved["type"] in nodes
        node = nodes[saved["type"]]
        for widget, value in values_of(saved, node).items():
            of_type, options = widgets(node)[widget]
            place = f"{saved['type']}.{widget} = {value!r}"
            assert isinstance(value, WIDGET_TYPES[of_type]) and (of_type == "BOOLEAN" or not isinstance(value, bool)), place
            assert options.get("min", value) <= value <= options.get("max", value), place
            assert of_type != "COMBO" or value in options["options"], place
        named = {n: v for n, v in saved.get("widgets_values_named", {}).items() if n in widgets(node)}
        assert named == values_of(saved, node), "newer frontends read the named values first"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_links_join_what_fits(name, nodes):
    workflow = WORKFLOWS[name]
    saved = {node["id"]: node for node in workflow["nodes"]}
    for link, source, output, target, slot, of_type in workflow["links"]:
        place = f"{saved[source]['type']} -> {saved[target]['type']}"
        given = nodes[saved[source]["type"]]["output"][output]
        socket = saved[target]["inputs"][slot]
        wanted = declared(nodes[saved[target]["type"]])[socket["name"]][0]
        assert given == of_type and wanted in (given, "*"), f"{place}: {given} to {wanted}"
        assert socket["link"] == link and link in saved[source]["outputs"][output]["links"], place
    for node in (n for n in workflow["nodes"] if n["type"] not in OF_THE_FRONTEND):
        linked = {i["name"] for i in node["inputs"] if i["link"] is not None}
        needed = set(nodes[node["type"]]["input_order"].get("required", ())) - set(widgets(nodes[node["type"]]))
        assert needed <= linked, f"{node['type']} lacks {needed - linked}"


@pytest.mark.parametrize("name", WORKFLOWS)
def test_nodes_do_not_overlap_and_links_go_right_or_down(name):
    workflow = WORKFLOWS[name]
    boxes = {}
    for node in workflow["nodes"]:
        (x, y), (width, height) = node["pos"], node["size"]
        boxes[node["id"]] = (x, y - TITLE_HEIGHT, x + width, y + height)
    for i, a in boxes.items():
        for j, b in boxes.items():
            assert i >= j or a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1], f"nodes {i} and {j} overlap"
    for _, source, _, target, *_ in workflow["links"]:
        assert boxes[source][:2] < boxes[target][:2]


def test_templates_are_offered_with_pictures(server):
    assert sorted(json.loads(fetch(server, "/workflow_templates")[1])["mc-sparse"]) == sorted(WORKFLOWS)
    for name, workflow in WORKFLOWS.items():
        assert json.loads(fetch(server, f"/api/workflow_templates/mc-sparse/{name}.json")[1]) == workflow
        kind, picture = fetch(server, f"/api/workflow_templates/mc-sparse/{name}.jpg")
        assert kind == "image/jpeg" and len(picture) < PICTURE_BYTES


@pytest.mark.parametrize("name", WORKFLOWS)
def test_frontend_loads_it_unchanged_and_converts_it(name, page, nodes):
    loaded = page.evaluate(
        """async workflow => {
          await window.app.loadGraphData(workflow)
          const missing = window.app.graph.nodes.filter(n => !LiteGraph.registered_node_types[n.type] || n.has_errors).map(n => n.type)
          const {output} = await window.app.graphToPrompt()
          return {missing, output, saved: window.app.graph.serialize()}
        }""",
        WORKFLOWS[name],
    )
    assert loaded["missing"] == []
    for before, after in zip(WORKFLOWS[name]["nodes"], loaded["saved"]["nodes"], strict=True):
        for key in ("id", "type", "title", "pos", "widgets_values"):
            assert after.get(key) == before.get(key)
        assert after["size"] == pytest.approx(before["size"], abs=1)
    assert [list(link) for link in loaded["saved"]["links"]] == WORKFLOWS[name]["links"]
    converted = {
        i: {"class_type": n["class_type"], "inputs": {k: v for k, v in n["inputs"].items() if k in declared(nodes[n["class_type"]])}}
        for i, n in loaded["output"].items()
    }
    assert converted == as_prompt(WORKFLOWS[name], nodes)


def test_frontend_loads_a_workflow_from_before_precision(page, nodes):
    workflow = json.loads(json.dumps(WORKFLOWS["mc-sparse-demo"]))
    (ours,) = (n for n in workflow["nodes"] if n["type"] == "MCSparsePatchModel")
    ours["inputs"] = [i for i in ours["inputs"] if i["name"] != "precision"]
    assert ours["widgets_values"].pop() == ours["widgets_values_named"].pop("precision") == "auto"
    changed = {"min_tokens": 2048, "backend": "reference", "verbose": True}
    ours["widgets_values"][-3:] = changed.values()
    ours["widgets_values_named"] |= changed
    converted = page.evaluate(
        "async workflow => { await window.app.loadGraphData(workflow); return (await window.app.graphToPrompt()).output }", workflow
    )
    inputs = converted[str(ours["id"])]["inputs"]
    expected = changed | {"precision": "auto", "preset": "auto", "residual": "auto"}
    assert {name: inputs[name] for name in expected} == expected


def test_demo_runs(server, nodes):
    prompt = as_prompt(WORKFLOWS["mc-sparse-demo"], nodes)
    by_type = {n["class_type"]: i for i, n in prompt.items()}

    def inputs(of_type: str) -> dict:
        return prompt[by_type[of_type]]["inputs"]

    inputs("EmptyHunyuanLatentVideo").update(width=256, height=256, length=13)  # 1024 tokens
    inputs("MCSparsePatchModel").update(min_tokens=1024, schedule=[by_type["MCSparseSchedule"], 0])
    inputs("MCSparseSchedule").update(dense_start="2", anchors="1, 5", dense_end="0")
    inputs("KSampler").update(steps=10)
    outputs = server.run(prompt)["outputs"]
    for shown in ("SaveAnimatedWEBP", "MCSparseStats"):
        (image,) = outputs[by_type[shown]]["images"]
        folder = server.base / image["type"] / image["subfolder"]
        assert (folder / image["filename"]).stat().st_size > 1000
    assert "42 reuse, 12 anchor, 6 dense of 60" in outputs[by_type["PreviewAny"]]["text"][0]


@pytest.mark.parametrize("node", OUR_NODES)
def test_help_page_names_every_input_and_its_pictures_are_served(node, server, nodes):
    kind, body = fetch(server, f"/extensions/mc-sparse/docs/{node}.md")
    text = body.decode()
    assert text.startswith(f"# {nodes[node]['display_name']}\n")
    for name, (_, options) in declared(nodes[node]).items():
        assert f"**{options.get('display_name', name)}**" in text or f"**{name}**" in text, f"{name} is not explained"
    for picture in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text):
        kind, image = fetch(server, f"/extensions/mc-sparse/docs/{picture}")
        assert kind in ("image/png", "image/jpeg") and len(image) < PICTURE_BYTES


def test_every_node_of_ours_has_a_help_page_and_no_script_is_loaded(nodes):
    assert sorted(name for name in nodes if name.startswith("MCSparse")) == OUR_NODES
    assert sorted(p.stem for p in (ROOT / "web" / "docs").glob("*.md")) == OUR_NODES
    assert not list((ROOT / "web").rglob("*.js"))
