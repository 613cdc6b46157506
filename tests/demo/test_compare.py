"""The demo end to end on a small clip: counts, files, and the page in a real browser."""
import json
import shutil
from dataclasses import replace

import pytest
import torch

pytest.importorskip("diffusers")
from mc_sparse.demo import compare, metrics  # noqa: E402

GRID = (8, 24, 26)  # 8 x 12 x 13 = 1248 tokens
STEPS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("demo")
    seen = []
    return out, compare.produce(compare.prompts.names()[0], STEPS, 3, out, GRID, seen.append), seen


def test_counts_equal_the_hand_computed_schedule(made):
    _, found, seen = made
    # 20 % of 12 steps: 0, 1, 2 are the warm-up, step 2 anchors. `paper` refreshes at 0.5: step 6; block 0 of 6 is dense throughout.
    # `auto` refreshes at 0.35 and 0.6: steps 5 (0.417) and 8 (0.667).
    expected = {
        "dense": {"dense": 72, "anchor": 0, "reuse": 0},
        "vanilla-bsa": {"dense": 12 + 3 * 5, "anchor": 0, "reuse": 9 * 5},
        "mc-sparse-paper": {"dense": 12 + 2 * 5, "anchor": 2 * 5, "reuse": 8 * 5},
        "mc-sparse": {"dense": 2 * 6, "anchor": 3 * 6, "reuse": 7 * 6},
    }
    assert [r["counts"] for r in found["runs"]] == [expected[r["method"]] for r in found["runs"]]
    assert found["runs"][1]["step_seconds"]["reuse"]["steps"] == 9  # the same warm-up
    assert len(seen) == STEPS * len(found["runs"])
    assert [(r["method"], r["density"]) for r in found["runs"]] == [
        ("dense", 1.0), ("vanilla-bsa", 0.25), ("mc-sparse-paper", 0.25), ("mc-sparse-paper", 0.15), ("mc-sparse", 0.15),
        ("mc-sparse", 0.10),
    ]  # fmt: skip


def test_precision_is_that_of_ours_alone():
    usual, low = compare.methods("auto"), compare.methods("auto", "int8")
    assert [m.plan and m.plan.precision for m in usual] == [None, None, "bf16", "bf16", "auto", "auto"]
    assert low[:4] == usual[:4]
    for before, method in zip(usual[4:], low[4:], strict=True):
        assert method.plan == replace(before.plan, precision="int8") and method.name == f"{before.name} int8"


def test_metrics_file(made):
    out, found, _ = made
    assert json.loads((out / "metrics.json").read_text()) == found
    dense, *sparse = found["runs"]
    assert found["precision"] == "auto" and dense["precisions"] == {} and sparse[-1]["precisions"] == {"bf16": 42}
    assert dense["psnr_db"] is None and dense["ssim"] is None and dense["realised_density"] == 1
    for run in sparse:
        assert 15 < run["psnr_db"] < 70 and 0.5 < run["ssim"] < 1 and 0 < run["retained_mass"] < 1 and run["dit_seconds"] > 0
    # 1248 tokens: 25 % is 312 keys, up to 3 tiles of 128; 15 % 187.2, up to 2; 10 % 124.8, one tile
    tiles = {0.25: 3, 0.15: 2, 0.10: 1}
    for run in sparse[1:]:
        assert run["realised_density"] == pytest.approx(tiles[run["density"]] * 128 / 1248, abs=1e-6)


def test_the_gif_shows_every_frame(made):
    from PIL import Image

    with Image.open(made[0] / "comparison.gif") as gif:
        assert gif.n_frames == 16 and gif.size == (3 * 220, 2 * 242)
    with Image.open(made[0] / "comparison.png") as sheet:
        assert sheet.size == (190 + 6 * 124, 6 * 124)


def test_the_page_in_a_browser(made):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no Chromium on this machine: the demo page was not opened (Debian: apt-get install chromium)")
    sync = pytest.importorskip("playwright.sync_api")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
    with sync.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        page = browser.new_page(viewport={"width": 1100, "height": 1500})
        problems = []
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: problems.append(str(e)))
        page.on("request", lambda r: problems.append(r.url) if r.url.startswith("http") else None)
        page.goto((made[0] / "index.html").as_uri())
        page.wait_for_selector("body[data-ready=yes]", timeout=20_000)
        assert page.locator("#table tr").count() == 7
        assert page.locator("#timeline rect").count() == 6 * STEPS
        assert page.locator("#errors polyline").count() == 5
        page.locator("#play").click()
        page.locator("#right").select_option("1")
        assert "PSNR" in page.locator("#facts").inner_text()
        frame = page.locator("#frame").input_value()
        page.locator("#view").focus()
        page.keyboard.press("End")  # the left clip covers all
        left = page.evaluate("canvas.toDataURL()")
        page.keyboard.press("Home")
        right = page.evaluate("canvas.toDataURL()")
        assert left != right and page.locator("#frame").input_value() == frame
        box = page.locator("#view").bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
        page.mouse.up()
        assert abs(int(page.locator("#view").get_attribute("aria-valuenow")) - 25) <= 1
        page.screenshot(path=made[0] / "page.png")
        browser.close()
        assert not problems


def test_psnr_and_ssim():
    torch.manual_seed(0)
    a = torch.rand(1, 3, 2, 16, 16) * 1.6 - 0.8
    assert metrics.psnr(a, a) == 100 and metrics.ssim(a, a) == pytest.approx(1)
    assert metrics.psnr(a, a + 0.02) == pytest.approx(40, abs=1e-3)  # 10 log10(4 / 0.0004)
    assert metrics.ssim(a, a.flip(-1)) < 0.5
