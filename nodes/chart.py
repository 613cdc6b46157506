"""One run's report as a picture: steps x sites by action, how much was selected, where the time went. PIL and numpy only."""
from __future__ import annotations

from functools import cache

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH, MARGIN, LEFT = 1200, 24, 150  # pixels; LEFT: column of row labels
GRID_HEIGHT, MIN_ROW = 360, 7
INK, FAINT, PAPER = (32, 34, 38), (120, 124, 132), (255, 255, 255)
ANCHOR, REUSE, NOTHING = (214, 96, 30), (44, 142, 96), (238, 239, 241)
# Dense, by reason: in the order in which reasons appear. Reasons beyond the last colour share it.
DENSE = ((64, 92, 148), (128, 152, 204), (140, 112, 176), (92, 150, 176), (178, 144, 190), (168, 178, 194))


def chart(report: dict) -> np.ndarray:
    """Picture (H, 1200, 3) uint8 of one report."""
    rows, steps = report["sites"], max(report["steps"], 1 + max((t[0] for t in report["timeline"]), default=0))
    colours = _colours(report)
    legend = _legend_lines(colours)
    row = max(MIN_ROW, min(26, GRID_HEIGHT // max(1, len(rows))))
    grid = row * max(1, len(rows))
    notes = [line for note in report["notes"] for line in _wrapped(f"Note: {note}", WIDTH - 2 * MARGIN, 15)]
    height = 78 + grid + 34 + 28 * len(legend) + 150 + 24 * len(notes) + MARGIN
    image = Image.new("RGB", (WIDTH, height), PAPER)
    draw = ImageDraw.Draw(image)
    _heading(draw, report)
    y = _timeline(draw, report, colours, steps, row, 78)
    y = _legend(draw, legend, y + 34)
    y = _numbers(draw, report, y + 6)
    for line in notes:
        draw.text((MARGIN, y), line, INK, _font(15))
        y += 24
    return np.asarray(image)


def blank(text: str) -> np.ndarray:
    """Picture (H, 1200, 3) uint8 that only says something."""
    image = Image.new("RGB", (WIDTH, 160), PAPER)
    draw = ImageDraw.Draw(image)
    for i, line in enumerate(_wrapped(text, WIDTH - 2 * MARGIN, 18)):
        draw.text((MARGIN, 40 + 28 * i), line, FAINT, _font(18))
    return np.asarray(image)


def stacked(pictures: list[np.ndarray]) -> np.ndarray:
    """Pictures of one width below each other."""
    return np.concatenate(pictures)


def _heading(draw: ImageDraw.ImageDraw, report: dict):
    recipe, counts = report["recipe"], report["counts"]
    total = sum(counts.values())
    draw.text((MARGIN, 18), f"MC-Sparse, {report.get('model') or report['plan']['preset']}: {report['status']}", INK, _font(22))
    line = (
        f"preset {report['plan']['preset']}, density {recipe['density']:g}, tail {recipe['tail'] or 'none'}, {recipe['grouping']}, "
        f"{recipe['granularity']}, residual {recipe['residual']}; {counts['reuse']} reuse, {counts['anchor']} anchor, "
        f"{counts['dense']} dense of {total} attention calls"
    )
    draw.text((MARGIN, 48), line, FAINT, _font(15))


def _colours(report: dict) -> dict[tuple[str, str], tuple]:
    """Colour of each (action, reason) that occurs."""
    reasons = list(dict.fromkeys(reason for *_, action, reason in report["timeline"] if action == "dense"))
    colours = {("dense", reason): DENSE[min(i, len(DENSE) - 1)] for i, reason in enumerate(reasons)}
    return colours | {("anchor", ""): ANCHOR, ("reuse", ""): REUSE}


def _timeline(draw: ImageDraw.ImageDraw, report: dict, colours: dict, steps: int, row: int, top: int) -> int:
    sites = report["sites"]
    width = (WIDTH - LEFT - MARGIN) / steps
    bottom = top + row * max(1, len(sites))
    draw.rectangle((LEFT, top, WIDTH - MARGIN, bottom), fill=NOTHING)
    for step, site, action, reason in report["timeline"]:
        x, y, gap = LEFT + step * width, top + site * row, 1 if row > 8 else 0
        draw.rectangle((x, y, x + max(0.0, width - 1), y + row - 1 - gap), fill=colours[action, reason if action == "dense" else ""])
    every = max(1, -(-20 // row))  # label no more rows than fit
    for i in range(0, len(sites), every):
        draw.text((LEFT - 10, top + i * row + row / 2), sites[i], INK, _font(14), anchor="rm")
    each = max(1, -(-steps // 30))
    for step in range(0, steps, each):
        draw.text((LEFT + (step + 0.5) * width, bottom + 6), str(step), INK, _font(14), anchor="ma")
    draw.text((LEFT - 10, bottom + 6), "step", FAINT, _font(14), anchor="ra")
    return bottom


def _legend_lines(colours: dict) -> list[list[tuple]]:
    """Entries (x, colour, text), in lines that fit the width."""
    lines, x = [[]], MARGIN
    for (action, reason), colour in colours.items():
        text = f"dense: {reason}" if action == "dense" else {"anchor": "anchor (dense, selects keys)", "reuse": "reuse (sparse)"}[action]
        text = _shortened(text, WIDTH - 2 * MARGIN - 26, 15)
        wide = 26 + _font(15).getlength(text) + 24
        if x + wide > WIDTH and lines[-1]:
            lines.append([])
            x = MARGIN
        lines[-1].append((x, colour, text))
        x += wide
    return lines


def _legend(draw: ImageDraw.ImageDraw, lines: list[list[tuple]], y: int) -> int:
    for line in lines:
        for x, colour, text in line:
            draw.rectangle((x, y + 2, x + 16, y + 18), fill=colour)
            draw.text((x + 24, y + 10), text, INK, _font(15), anchor="lm")
        y += 28
    return y


def _numbers(draw: ImageDraw.ImageDraw, report: dict, y: int) -> int:
    right = 560
    for label, value in (("retained attention mass", report["retained_mass"]), ("density of keys, realised", report["realised_density"])):
        draw.text((MARGIN, y + 10), label, INK, _font(15), anchor="lm")
        draw.rectangle((260, y + 1, right, y + 19), fill=NOTHING)
        if value is not None:
            draw.rectangle((260, y + 1, 260 + (right - 260) * min(1.0, value), y + 19), fill=REUSE)
        draw.text((right + 12, y + 10), "no anchor" if value is None else f"{value:.1%}", INK, _font(15), anchor="lm")
        y += 30
    draw.text((MARGIN, y + 10), "cache at its largest", INK, _font(15), anchor="lm")
    draw.text((260, y + 10), f"{report['cache_bytes'] / 2**20:.1f} MiB", INK, _font(15), anchor="lm")
    y += 30
    return _time_split(draw, report, y)


def _time_split(draw: ImageDraw.ImageDraw, report: dict, y: int) -> int:
    seconds = {kind: s for kind, s in report["attention_seconds"].items() if s > 0}
    rest = report["seconds"] - sum(seconds.values())
    parts = [(kind, s, {"dense": DENSE[0], "anchor": ANCHOR, "reuse": REUSE}[kind]) for kind, s in sorted(seconds.items())]
    if rest > 0:
        parts.append(("everything else", rest, FAINT))
    whole = sum(s for _, s, _ in parts) or 1.0
    draw.text((MARGIN, y + 10), f"time, {report['seconds']:.1f} s", INK, _font(15), anchor="lm")
    x = 260.0
    for name, s, colour in parts:
        wide = (WIDTH - MARGIN - 260) * s / whole
        draw.rectangle((x, y + 1, x + wide, y + 19), fill=colour)
        text = f"{name} {s:.1f} s"
        if _font(14).getlength(text) + 8 < wide:
            draw.text((x + wide / 2, y + 10), text, PAPER, _font(14), anchor="mm")
        x += wide
    return y + 36


def _wrapped(text: str, width: float, size: int) -> list[str]:
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and _font(size).getlength(longer) > width:
            lines.append(line)
            longer = word
        line = longer
    return [*lines, line]


def _shortened(text: str, width: float, size: int) -> str:
    while len(text) > 1 and _font(size).getlength(text) > width:
        text = text[:-2] + "\u2026"
    return text


@cache
def _font(size: int):
    return ImageFont.load_default(size)
