#!/usr/bin/env python3
"""Writes workflows/*.json and their pictures, with the real frontend of a running ComfyUI that has this pack and the models' names.

    python scripts/make_workflows.py http://127.0.0.1:8188 [--run]

Nodes are listed by column; sizes and positions follow. --run queues the demo first, so that its picture shows results.
Needs playwright and Chromium.
"""
import argparse
import json
import shutil
import sys
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).resolve().parent.parent / "workflows"
PICTURE_BYTES = 150_000
BARS = 180  # pixels kept clear around the graph, for the frontend's own bars

DEMO_NOTE = """\
# MC-Sparse demo

Needs no download: a small video model comes with the pack. Press **Run**. A clip of 4212 tokens takes under a minute on two CPU cores.

## Three settings that matter

| on MC-Sparse Patch Model | |
|---|---|
| **density** | Share of the tokens that each query sees. Lower is faster and less exact. 0.00 takes the preset's own. |
| **preset** | `auto` for most work, `quality` for finals, `speed` for drafts. |
| **schedule** | Which steps stay dense. Connect **MC-Sparse Schedule** to change some of it; `auto` is the preset's own. |

## Then look

**MC-Sparse Stats** runs after the sampler and says what was done: blue cells ran dense, orange ones chose tokens, green ones reused \
the choice.

To compare with dense, select **MC-Sparse Patch Model**, press Ctrl+B (bypass) and run with the same seed.
"""

WAN_NOTE = """\
# Wan 2.1 text to video with MC-Sparse

The usual graph, and **MC-Sparse Patch Model** last before the sampler. 832 x 480 and 81 frames are 32760 tokens.

## Files

- models/diffusion_models: `wan2.1_t2v_1.3B_fp16.safetensors` (or a 14B one)
- models/text_encoders: `umt5_xxl_fp8_e4m3fn_scaled.safetensors`
- models/vae: `wan_2.1_vae.safetensors`

They are those of ComfyUI's own Wan 2.1 templates: the repackaged files by Comfy-Org.

## Three settings that matter

| on MC-Sparse Patch Model | |
|---|---|
| **density** | Share of the tokens that each query sees. Lower is faster, less exact. 0.00: the preset's own. 0.15 to 0.25 is careful. |
| **preset** | `auto` for most work, `quality` for finals, `speed` for drafts, `few-step` for distilled models. |
| **schedule** | Which steps stay dense. Connect **MC-Sparse Schedule** to change some of it. |

If **MC-Sparse Stats** says that all calls were dense, it also says why.
"""

NEGATIVE = (
    "overexposed, static, blurred details, subtitles, painting, still picture, overall grey, worst quality, low quality, JPEG artifacts, "
    "ugly, deformed, extra fingers, badly drawn hands, badly drawn face, cluttered background, walking backwards"
)


@dataclass
class Node:
    """inputs: input name -> (name of the source node, index of its output). height: None = what the frontend computes."""

    type: str
    widgets: dict = field(default_factory=dict)
    inputs: dict = field(default_factory=dict)
    title: str | None = None
    height: int | None = None


@dataclass
class Column:
    """Nodes below each other. title: of the group around them, if any. below: under the column before, not right of it."""

    title: str
    width: int
    nodes: dict[str, Node]
    below: bool = False


def note(text: str, width: int, height: int) -> Column:
    return Column("", width, {"note": Node("MarkdownNote", {"": text}, title="Read me", height=height)}, below=True)


def sparse_part(model: str) -> Column:
    return Column(
        "MC-Sparse",
        310,
        {
            "shift": Node("ModelSamplingSD3", {"shift": 3.0 if model == "demo" else 8.0}, {"model": ("model", 0)}),
            "patch": Node("MCSparsePatchModel", {}, {"model": ("shift", 0)}),
            "schedule": Node("MCSparseSchedule", title="Schedule (optional)"),
        },
    )


def sampler(steps: int, cfg: float, name: str, latent: tuple) -> Node:
    return Node(
        "KSampler",
        {"seed": 1, "control_after_generate": "fixed", "steps": steps, "cfg": cfg, "sampler_name": name, "scheduler": "simple"},
        {"model": ("patch", 0), "positive": ("positive", 0), "negative": ("negative", 0), "latent_image": latent},
    )  # fmt: skip


def report_part() -> Column:
    return Column(
        "What MC-Sparse did",
        430,
        {
            "stats": Node("MCSparseStats", {}, {"model": ("patch", 0), "value": ("sampler", 0)}, height=300),
            "text": Node("PreviewAny", {}, {"source": ("stats", 1)}, "Report", height=270),
        },
        below=True,
    )


WORKFLOWS = {
    "mc-sparse-demo": [
        Column(
            "Model and prompt",
            380,
            {
                "model": Node("MCSparseDemoModel"),
                "positive": Node("MCSparseDemoPrompt", {"prompt": "a red checkered ball bouncing in front of blue waves"}, title="Prompt"),
                "negative": Node("MCSparseDemoPrompt", {"prompt": "nothing"}, title="Empty prompt (unused at cfg 1)"),
                "latent": Node("EmptyHunyuanLatentVideo", {"width": 288, "height": 288, "length": 49, "batch_size": 1}),
            },
        ),
        note(DEMO_NOTE, 380, 420),
        sparse_part("demo"),
        Column(
            "Sample",
            310,
            {
                "sampler": sampler(24, 1.0, "euler", ("latent", 0)),
                "decode": Node("MCSparseDemoDecode", {}, {"samples": ("sampler", 0)}),
            },
        ),
        Column(
            "Clip",
            430,
            {
                "save": Node(
                    "SaveAnimatedWEBP",
                    {"filename_prefix": "mc_sparse_demo", "fps": 12.0, "lossless": True, "quality": 90, "method": "default"},
                    {"images": ("decode", 0)},
                    height=480,
                )
            },
        ),
        report_part(),
    ],
    "wan2.1-t2v-mc-sparse": [
        Column(
            "Model",
            370,
            {
                "model": Node("UNETLoader", {"unet_name": "wan2.1_t2v_1.3B_fp16.safetensors", "weight_dtype": "default"}),
                "clip": Node("CLIPLoader", {"clip_name": "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "type": "wan", "device": "default"}),
                "vae": Node("VAELoader", {"vae_name": "wan_2.1_vae.safetensors"}),
                "latent": Node("EmptyHunyuanLatentVideo", {"width": 832, "height": 480, "length": 81, "batch_size": 1}),
            },
        ),
        Column(
            "Prompt",
            340,
            {
                "positive": Node(
                    "CLIPTextEncode",
                    {"text": "A fox runs through deep snow at sunrise, camera tracking from the side, breath visible in the cold air"},
                    {"clip": ("clip", 0)},
                    "Prompt",
                    height=200,
                ),
                "negative": Node("CLIPTextEncode", {"text": NEGATIVE}, {"clip": ("clip", 0)}, "Negative prompt", height=200),
            },
        ),
        note(WAN_NOTE, 340, 520),
        sparse_part("wan"),
        Column(
            "Sample",
            310,
            {
                "sampler": sampler(30, 6.0, "uni_pc", ("latent", 0)),
                "decode": Node("VAEDecode", {}, {"samples": ("sampler", 0), "vae": ("vae", 0)}),
            },
        ),
        Column(
            "Video",
            430,
            {
                "save": Node(
                    "SaveWEBM",
                    {"filename_prefix": "wan_mc_sparse", "codec": "vp9", "fps": 16.0, "crf": 24.0},
                    {"images": ("decode", 0)},
                    height=360,
                )
            },
        ),
        report_part(),
    ],
}

PICTURED = {  # groups
    "mc-sparse-demo": ["MC-Sparse", "Sample", "Clip"],
    "wan2.1-t2v-mc-sparse": ["Model", "Prompt", "MC-Sparse", "Sample"],
}

# Adds the columns to an empty graph, left to right. Raises on an unknown node, widget or input.
BUILD = """
async columns => {
  const graph = window.app.graph, made = {}, between = 60, title = 30
  graph.clear()
  let x = 0, y = 0, right = 0, gap = 0
  for (const column of columns) {
    if (column.below) y += 80
    else [x, y] = [right, 0]
    const top = y
    for (const [name, spec] of Object.entries(column.nodes)) {
      const node = LiteGraph.createNode(spec.type)
      if (!node) throw new Error('no node ' + spec.type)
      graph.add(node)
      if (spec.title) node.title = spec.title
      for (const [key, value] of Object.entries(spec.widgets)) {
        const widget = key ? node.widgets.find(w => w.name === key) : node.widgets[0]
        if (!widget) throw new Error(spec.type + ' has no widget ' + key)
        widget.value = value
      }
      const least = node.computeSize()
      node.setSize([column.width, Math.max(least[1], spec.height ?? 0)])
      node.pos = [x, y]
      y += node.size[1] + title + (gap = 40 + 6 * (node.widgets?.length ?? 0)) // in Nodes 2.0 nodes are taller
      made[name] = node
    }
    if (column.title) {
      const group = new LiteGraph.LGraphGroup(column.title)
      group.pos = [x - 15, top - 85]
      group.size = [column.width + 30, y - gap / 2 - title - top + 100]
      graph.add(group)
    }
    right = x + column.width + between
  }
  for (const column of columns)
    for (const [name, spec] of Object.entries(column.nodes))
      for (const [input, [source, output]] of Object.entries(spec.inputs)) {
        const slot = made[name].findInputSlot(input)
        if (slot < 0) throw new Error(spec.type + ' has no input ' + input)
        made[source].connect(output, made[name], slot)
      }
}
"""
# Pan and zoom so that these groups fill the window; where they then are, in pixels of the page.
FIT = """
([titles, margin]) => {
  const canvas = window.app.canvas, boxes = window.app.graph.groups.filter(g => titles.includes(g.title)).map(g => g._bounding)
  const left = Math.min(...boxes.map(b => b[0])), top = Math.min(...boxes.map(b => b[1]))
  const width = Math.max(...boxes.map(b => b[0] + b[2])) - left, height = Math.max(...boxes.map(b => b[1] + b[3])) - top
  const area = canvas.canvas.getBoundingClientRect()
  const scale = Math.min((area.width - 2 * margin) / width, (area.height - 2 * margin) / height)
  canvas.ds.scale = scale
  canvas.ds.offset = [margin / scale - left, margin / scale - top]
  canvas.setDirty(true, true)
  return [margin, margin, margin + width * scale, margin + height * scale]
}
"""
CHART = "() => window.app.graph.nodes.find(n => n.type === 'MCSparseStats').imgs?.[0].src"
HOME = "() => { const ds = window.app.canvas.ds; ds.scale = 0.7; ds.offset = [120, 220] }"
SAVE = "() => JSON.stringify(window.app.graph.serialize())"
READY = "() => Boolean(window.app?.extensionManager && window.app.graph && window.LiteGraph?.registered_node_types?.MCSparsePatchModel)"


def chromium() -> str | None:
    """Path of an installed Chromium or Chrome."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def open_page(playwright, url: str, size=(2400, 1300)) -> Page:
    """The frontend, ready to take a graph."""
    browser = playwright.chromium.launch(executable_path=chromium(), args=["--headless", "--no-sandbox", "--disable-gpu"])
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    page.request.post(f"{url}/settings/Comfy.TutorialCompleted", data=json.dumps(True))
    for panel in ("Comfy.Minimap.Visible", "Comfy.RightSidePanel.IsOpen"):
        page.request.post(f"{url}/settings/{panel}", data=json.dumps(False))
    page.goto(url)
    page.wait_for_function(READY, timeout=90_000)
    page.wait_for_timeout(1500)
    return page


def bare(workflow: dict) -> dict:
    """A saved workflow without what differs from save to save or names this machine's versions."""
    workflow.pop("id", None)
    workflow.get("extra", {}).pop("frontendVersion", None)
    for node in workflow["nodes"]:
        for key in ("cnr_id", "aux_id", "ver"):
            node["properties"].pop(key, None)
    return workflow


def run_queue(page: Page):
    page.evaluate("() => window.app.queuePrompt(0)")
    page.wait_for_timeout(2000)
    url = page.url.rstrip("/")
    for _ in range(600):
        queue = page.request.get(f"{url}/queue").json()
        if not queue["queue_running"] and not queue["queue_pending"]:
            break
        page.wait_for_timeout(500)
    page.wait_for_timeout(3000)


def picture(page: Page, target: Path, groups: list[str], width=1000):
    """These groups as a JPEG that is small enough, and below them the chart if there is one."""
    box = page.evaluate(FIT, [groups, BARS])
    page.wait_for_timeout(1500)
    parts = [Image.open(BytesIO(page.screenshot())).convert("RGB").crop([round(x) for x in box])]
    if chart := page.evaluate(CHART):
        parts.append(Image.open(BytesIO(page.request.get(chart).body())).convert("RGB"))
    parts = [p.resize((width, round(p.height * width / p.width)), Image.LANCZOS) for p in parts]
    image = Image.new("RGB", (width, sum(p.height for p in parts)))
    for i, part in enumerate(parts):
        image.paste(part, (0, sum(p.height for p in parts[:i])))
    for quality in (90, 80, 70, 60):
        image.save(target, quality=quality)
        if target.stat().st_size < PICTURE_BYTES:
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--run", action="store_true", help="queue the demo before its picture is taken")
    arguments = parser.parse_args()
    if chromium() is None:
        sys.exit("Chromium is not installed.")
    with sync_playwright() as playwright:
        for name, columns in WORKFLOWS.items():
            page = open_page(playwright, arguments.url)
            page.evaluate(BUILD, [asdict(c) for c in columns])
            page.evaluate(HOME)
            page.wait_for_timeout(500)
            workflow = bare(json.loads(page.evaluate(SAVE)))
            (FOLDER / f"{name}.json").write_text(json.dumps(workflow, indent=1) + "\n")
            if arguments.run and "demo" in name:
                run_queue(page)
            picture(page, FOLDER / f"{name}.jpg", PICTURED[name])
            page.context.browser.close()
            print(name, len(workflow["nodes"]), "nodes")


if __name__ == "__main__":
    main()
