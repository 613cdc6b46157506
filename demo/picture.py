"""Clips side by side: as one animated picture, and as a sheet of frames."""
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


def sheet(clips: list[Tensor], labels: list[str], path: Path, frames: int = 6, pixels: int = 120):
    """Writes a PNG with a row per clip (1, 3, T, H, W): its label, then `frames` of its frames, evenly spaced."""
    font, margin = ImageFont.load_default(15), 190
    picture = Image.new("RGB", (margin + frames * (pixels + 4), len(clips) * (pixels + 4)), "white")
    draw = ImageDraw.Draw(picture)
    for row, (clip, label) in enumerate(zip(clips, labels, strict=True)):
        shown = to_uint8(clip)[0].cpu().numpy()
        draw.multiline_text((6, row * (pixels + 4) + pixels // 2 - 18), label, fill="black", font=font)
        for column, t in enumerate(np.linspace(0, len(shown) - 1, frames).round().astype(int)):
            frame = Image.fromarray(shown[t]).resize((pixels, pixels), Image.Resampling.BICUBIC)
            picture.paste(frame, (margin + column * (pixels + 4), row * (pixels + 4)))
    picture.save(path, optimize=True)
