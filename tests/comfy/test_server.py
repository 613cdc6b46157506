"""The real server with the pack in custom_nodes: loads, declares its nodes, runs the demo workflow over HTTP."""
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.comfy
ROOT = Path(__file__).resolve().parent.parent.parent
START_SECONDS, PROMPT_SECONDS = 180, 180


class Server:
    def __init__(self, comfyui: Path, python: Path, base: Path):
        for folder in ("custom_nodes", "models/diffusion_models", "user", "input", "output", "temp"):
            (base / folder).mkdir(parents=True)
        (base / "custom_nodes" / "mc-sparse").symlink_to(ROOT, target_is_directory=True)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.url, self.base, self.log_file = f"http://127.0.0.1:{port}", base, base / "log.txt"
        flags = ["--cpu", "--use-pytorch-cross-attention", "--disable-api-nodes"]
        command = [python, "main.py", "--port", port, "--base-directory", base, *flags]
        with self.log_file.open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            self.process = subprocess.Popen([str(c) for c in command], cwd=comfyui, env=environment, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_SECONDS
        while self._get("/object_info/KSampler", quiet=True) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.3)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def _get(self, path: str, quiet=False):
        try:
            with urllib.request.urlopen(self.url + path, timeout=30) as answer:
                return json.load(answer)
        except OSError:
            if quiet:
                return None
            raise

    def node(self, node_id: str) -> dict:
        return self._get(f"/object_info/{node_id}")[node_id]

    def post(self, workflow: dict) -> dict:
        body = json.dumps({"prompt": workflow}).encode()
        request = urllib.request.Request(self.url + "/prompt", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refused:
            return json.load(refused)

    def ended(self, prompt: str) -> dict:
        """The history entry of a prompt, once it has ended."""
        deadline = time.monotonic() + PROMPT_SECONDS
        while prompt not in (history := self._get(f"/history/{prompt}")):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log[-3000:]
            time.sleep(0.3)
        return history[prompt]

    def run(self, workflow: dict) -> dict:
        """The history entry of a prompt that ended well."""
        answer = self.post(workflow)
        assert "prompt_id" in answer and not answer.get("node_errors"), answer
        entry = self.ended(answer["prompt_id"])
        assert entry["status"]["status_str"] == "success", json.dumps(entry["status"])[-3000:]
        return entry


@pytest.fixture(scope="module")
def server(comfyui, python, tmp_path_factory):
    server = Server(comfyui, python, tmp_path_factory.mktemp("server") / "base")
    yield server
    server.process.terminate()
    server.process.wait(30)


def demo(**changes) -> dict:
    """The shipped workflow in small: 1024 tokens, 10 steps, anchors at steps 1 and 5. changes: inputs of the KSampler."""
    workflow = json.loads((ROOT / "workflows" / "api" / "demo_api.json").read_text())
    workflow["6"]["inputs"] |= {"width": 256, "height": 256, "length": 13}
    schedule = {"dense_start": "2", "anchors": "1, 5", "dense_end": "0", "dense_layers": "", "density_curve": ""}
    workflow["13"] = {"class_type": "MCSparseSchedule", "inputs": schedule}
    workflow["3"]["inputs"] |= {"min_tokens": 1024, "schedule": ["13", 0]}
    workflow["7"]["inputs"] |= {"steps": 10} | changes
    return workflow


def executed(entry: dict) -> list[str]:
    cached = next(m[1]["nodes"] for m in entry["status"]["messages"] if m[0] == "execution_cached")
    return [node for node in demo() if node not in cached]


def test_loads_without_a_complaint(server):
    assert "IMPORT FAILED" not in server.log
    assert "Error while calling comfy_entrypoint" not in server.log


def test_patch_node_declares_its_inputs_in_the_fixed_order(server):
    node = server.node("MCSparsePatchModel")
    assert node["display_name"] == "MC-Sparse Patch Model" and node["category"] == "MC-Sparse" and node["output"] == ["MODEL"]
    required = ["model", "preset", "density", "tail", "grouping", "granularity", "residual", "min_tokens", "backend", "verbose"]
    assert node["input_order"] == {"required": required, "optional": ["schedule", "precision"]}
    inputs = node["input"]["required"] | node["input"]["optional"]
    assert all(len(v[1].get("tooltip", "")) > 30 for v in inputs.values())
    density = inputs["density"][1]
    assert [density[k] for k in ("default", "min", "max", "step", "display")] == [0.0, 0.0, 1.0, 0.01, "slider"]
    assert inputs["min_tokens"][1]["default"] == 4096 and inputs["min_tokens"][1]["min"] == 1024
    assert inputs["schedule"][0] == "MC_SPARSE_SCHEDULE"
    options = inputs["preset"][1].get("options") or inputs["preset"][0]
    assert options == ["auto", "paper", "paper-h3", "quality", "speed", "few-step", "custom"]


def test_other_nodes_are_there(server):
    schedule = server.node("MCSparseSchedule")
    assert schedule["input_order"]["required"] == ["dense_start", "anchors", "dense_end", "dense_layers", "density_curve"]
    assert [schedule["input"]["required"][n][1]["default"] for n in schedule["input_order"]["required"]] == ["auto"] * 5
    stats = server.node("MCSparseStats")
    assert stats["output_node"] is True and stats["output"] == ["*", "STRING", "STRING", "IMAGE"]
    for demo_node in ("MCSparseDemoModel", "MCSparseDemoPrompt", "MCSparseDemoDecode"):
        assert server.node(demo_node)["category"] == "MC-Sparse/demo"


def test_demo_workflow_twice(server):
    first = server.run(demo(seed=1))
    outputs = first["outputs"]
    assert len(outputs["10"]["images"]) == 8 and len(outputs["11"]["images"]) == 1
    for image in outputs["10"]["images"] + outputs["11"]["images"]:
        assert (server.base / "output" / image["subfolder"] / image["filename"]).stat().st_size > 100
    assert len(outputs["8"]["images"]) == 1  # the chart shows on the node
    text = outputs["8"]["text"][0]
    assert "1 sampling run of this model in this prompt" in text and "42 reuse, 12 anchor, 6 dense of 60" in text

    second = server.run(demo(seed=2))
    assert executed(second) == ["7", "8", "9", "10", "11"]
    again = second["outputs"]["8"]["text"][0]
    assert "1 sampling run of this model in this prompt" in again and "42 reuse, 12 anchor, 6 dense of 60" in again

    third = server.run(demo(seed=2, cfg=2.0))
    assert "84 reuse, 24 anchor, 12 dense of 120" in third["outputs"]["8"]["text"][0]


def test_precision_and_workflows_from_before_it(server):
    workflow = demo(seed=8)
    workflow["3"]["inputs"]["precision"] = "int8"
    text = server.run(workflow)["outputs"]["8"]["text"][0]
    assert "42 reuse, 12 anchor, 6 dense of 60" in text and "backend auto (reference), precision int8\n" in text
    del workflow["3"]["inputs"]["precision"]
    text = server.run(workflow)["outputs"]["8"]["text"][0]
    assert "42 reuse, 12 anchor, 6 dense of 60" in text and "precision auto (bf16)\n" in text


def test_stats_of_a_cached_run_say_so(server):
    server.run(demo(seed=3))
    workflow = demo(seed=3)
    workflow["12"] = workflow["8"] | {"inputs": {"model": ["3", 0], "value": ["6", 0]}}
    assert "from an earlier prompt" in server.run(workflow)["outputs"]["12"]["text"][0]


def test_two_samplers_in_one_prompt(server):
    workflow = demo(seed=4)
    workflow["17"] = json.loads(json.dumps(workflow["7"]))
    workflow["17"]["inputs"] |= {"latent_image": ["7", 0], "denoise": 0.5, "seed": 5}
    workflow["8"]["inputs"]["value"] = ["17", 0]
    assert "2 sampling runs of this model in this prompt" in server.run(workflow)["outputs"]["8"]["text"][0]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("density", 0.03, "outside 0.05 to 1.00"), ("preset", "fastest", "few-step"), ("tail", "48", "128"), ("precision", "int4", "fp8"),
        ("min_tokens", 100, "min"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(server, name, value, words):
    workflow = demo()
    workflow["3"]["inputs"][name] = value
    answer = server.post(workflow)
    if "prompt_id" in answer:  # 0.3.64 does not check combos of V3 nodes; then the node does
        answer = server.ended(answer["prompt_id"])
        assert answer["status"]["status_str"] == "error"
    assert words in json.dumps(answer), answer


def test_interrupt_over_http(server):
    workflow = demo(seed=6, steps=200)
    prompt = server.post(workflow)["prompt_id"]
    while "/200" not in server.log.rsplit("got prompt", 1)[-1]:
        assert server.process.poll() is None
        time.sleep(0.1)
    urllib.request.urlopen(urllib.request.Request(server.url + "/interrupt", b"", method="POST"), timeout=30).close()
    messages = server.ended(prompt)["status"]["messages"]
    assert any(m[0] == "execution_interrupted" for m in messages), server.log[-2000:]
    assert "MC-Sparse: interrupted" in server.log
    assert "42 reuse, 12 anchor, 6 dense of 60" in server.run(demo(seed=7))["outputs"]["8"]["text"][0]
