"""The demo's results as one self-contained HTML page: clips under a drag divider, actions, errors over frames, the table."""
from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image
from torch import Tensor

from .codec import to_uint8
from .metrics import psnr

TEMPLATE = Path(__file__).with_name("page.html")


def write_page(path: Path, metrics: dict, clips: list[Tensor], timelines: list[list[str]]):
    """Writes the page. metrics: what metrics.json holds; clips (1, 3, T, H, W) in [-1, 1] and timelines, one per run, dense first.

    A timeline has one string per block with a letter per step: d dense, a anchor, r reuse.
    """
    frames, height, width = clips[0].shape[2:]
    runs = []
    for run, clip, timeline in zip(metrics["runs"], clips, timelines, strict=True):
        by_frame = None if run["psnr_db"] is None else [psnr(clip[:, :, t], clips[0][:, :, t]) for t in range(frames)]
        runs.append({**run, "strip": _strip(clip), "timeline": timeline, "frame_psnr_db": by_frame})
    data = json.dumps({**metrics, "runs": runs, "frames": frames, "height": height, "width": width}, allow_nan=False)
    # "</" would end the script element that holds the data.
    path.write_text(TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", data.replace("</", "<\\/")), encoding="utf-8")


def _strip(clip: Tensor) -> str:
    """All frames side by side as a PNG data address."""
    picture = Image.fromarray(np.concatenate(list(to_uint8(clip)[0].cpu().numpy()), axis=1))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
