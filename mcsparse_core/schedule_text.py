"""The schedule as people type it, to the values of `Schedule`. Every error says what came, what is allowed and an example."""
from __future__ import annotations

import re

from .schedule import Schedule, Span

_DASHES = re.compile("[\u2010-\u2015\u2212\uff0d]")  # hyphens, dashes and minus signs that editors put in


def _error(field: str, text: str, allowed: str) -> ValueError:
    return ValueError(f"MC-Sparse schedule: {field} is {text!r}. {allowed}")


def _items(text: str) -> list[str]:
    text = _DASHES.sub("-", text).strip()
    return [item.strip() for item in text.split(",")] if text else []


def parse_span(text: str, field: str) -> Span:
    """'6' steps, '20%' or '0.2' of the noise range, '' or '0' nothing."""
    t = text.strip()
    try:
        if t.endswith("%"):
            return Span(fraction=float(t[:-1]) / 100)
        if re.fullmatch(r"\d+", t) or not t:
            return Span(steps=int(t or 0))
        return Span(fraction=float(t))
    except ValueError as e:
        raise _error(field, text, "Write whole steps (6), a share of the noise range (20% or 0.2, below 100%), or 0 for none.") from e


def parse_anchors(text: str) -> dict:
    """'first', 'every 5' or '9, 25' as keyword arguments of Schedule."""
    t = text.strip().lower()
    if t in ("", "first", "first only"):
        return {}
    allowed = "Write 'first', 'every N' with N of 2 or more, or ascending 0-based steps like '9, 25'."
    if match := re.fullmatch(r"every\s+(\d+)(\s+steps)?", t):
        if int(match[1]) < 2:
            raise _error("anchors", text, allowed)
        return {"every": int(match[1])}
    try:
        steps = tuple(int(i) for i in _items(t))
    except ValueError as e:
        raise _error("anchors", text, allowed) from e
    if any(s < 0 for s in steps) or list(steps) != sorted(set(steps)):
        raise _error("anchors", text, allowed)
    return {"anchor_steps": steps}


def parse_layers(text: str) -> tuple[int, ...]:
    """'0, 1, 38-40, -1' as block indices in the order written; -1 is the last block."""
    layers: list[int] = []
    for item in _items(text):
        match = re.fullmatch(r"(-?\d+)|(\d+)\s*-\s*(\d+)", item)
        if not match or (match[2] and int(match[2]) > int(match[3])):
            raise _error("dense layers", text, "Write block numbers and ranges like '0, 1, 38-40, -1'; -1 is the last block.")
        layers += [int(match[1])] if match[1] else range(int(match[2]), int(match[3]) + 1)
    return tuple(dict.fromkeys(layers))


def parse_curve(text: str) -> tuple[tuple[float, float], ...]:
    """'0:0.40 0.5:0.25 1:0.15' as (progress, density) points; '' is no curve."""
    allowed = "Write progress:density points in ascending order, like '0:0.40 0.5:0.25 1:0.15' (progress 0 to 1, density 0.05 to 1)."
    try:
        points = tuple((float(p), float(d)) for p, d in (item.split(":") for item in text.replace(",", " ").split()))
        Schedule(density_curve=points)
    except ValueError as e:
        raise _error("density curve", text, allowed) from e
    return points


def parse_schedule(dense_start: str, anchors: str, dense_end: str, dense_layers: str, density_curve: str) -> Schedule:
    """The five fields as one Schedule. Raises ValueError with the field's name."""
    return Schedule(
        dense_start=parse_span(dense_start, "dense start"),
        dense_end=parse_span(dense_end, "dense end"),
        dense_layers=parse_layers(dense_layers),
        density_curve=parse_curve(density_curve),
        **parse_anchors(anchors),
    )
