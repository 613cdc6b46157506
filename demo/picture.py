"""Clips side by side as one animated picture."""
from __future__ import annotations

from pathlib import Path

import imageio.v3 as iio
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from .codec import to_uint8

PIXELS = 216  # height and width of one clip
LABEL = 22  # height of its caption
FRAMES_PER_SECOND = 12


def side_by_side(clips: list[Tensor], labels: list[str], path: Path, columns: int = 3):
    """Writes clips (1, 3, T, H, W) in [-1, 1] with captions as a looping GIF."""
    font = ImageFont.load_default(14)
    frames = np.stack([to_uint8(clip)[0].cpu().numpy() for clip in clips], 1)  # (T, clips, H, W, 3)
    rows = -(-len(clips) // columns)
    sheet_size = (columns * (PIXELS + 4), rows * (PIXELS + LABEL + 4))
    sheets = []
    for frame in frames:
        sheet = Image.new("RGB", sheet_size, "white")
        draw = ImageDraw.Draw(sheet)
        for i, (picture, label) in enumerate(zip(frame, labels, strict=True)):
            x, y = (i % columns) * (PIXELS + 4) + 2, (i // columns) * (PIXELS + LABEL + 4)
            draw.text((x + 2, y + 2), label, fill="black", font=font)
            sheet.paste(Image.fromarray(picture).resize((PIXELS, PIXELS), Image.Resampling.BICUBIC), (x, y + LABEL))
        sheets.append(np.asarray(sheet))
    iio.imwrite(path, sheets, loop=0, duration=1000 / FRAMES_PER_SECOND)
