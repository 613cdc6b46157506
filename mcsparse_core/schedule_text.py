"""The schedule as people type it, to the values of `ScheduleChange`. Every error says what came, what is allowed and an example.

In each field 'auto' (or nothing) is the preset's own.
"""
from __future__ import annotations

import re

from .schedule import ScheduleChange, Span

_DASHES = re.compile("[\u2010-\u2015\u2212\uff0d]")  # hyphens, dashes and minus signs that editors put in


def _error(field: str, text: str, allowed: str) -> ValueError:
    return ValueError(f"MC-Sparse schedule: {field} is {text!r}. {allowed}, or 'auto' for the preset's own.")


def _plain(text: str) -> str:
    return _DASHES.sub("-", str(text)).strip().lower()


def _is_auto(text: str) -> bool:
    return _plain(text) in ("", "auto")


def _items(text: str) -> list[str]:
    return [item.strip() for item in _plain(text).split(",")]


def _share(text: str) -> float:
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def parse_span(text: str, field: str) -> Span | None:
    """'6' or '6 steps', '20%' or '0.2' of the noise range, '0' or 'none' nothing."""
    t = _plain(text)
    if _is_auto(t):
        return None
    try:
        if match := re.fullmatch(r"(\d{1,9})(\s*steps?)?|none", t):
            return Span(steps=int(match[1] or 0))
        return Span(fraction=_share(t))
    except ValueError as e:
        raise _error(field, text, "Write whole steps (6), a share of the noise range (20% or 0.2, below 100%), 0 for none") from e


def parse_anchors(text: str) -> dict:
    """'first', 'every 5', steps '9, 25' or places '35%, 60%' as keyword arguments of ScheduleChange."""
    t = _plain(text)
    if _is_auto(t):
        return {}
    if t in ("first", "first only"):
        return {"refresh": ()}
    allowed = "Write 'first', 'every N' with N of 2 or more, ascending 0-based steps like '9, 25', ascending places like '35%, 60%'"
    try:
        if match := re.fullmatch(r"every\s+(\d{1,9})(\s+steps)?", t):
            change = {"every": int(match[1])}
        elif "%" in t:
            change = {"refresh": tuple(_share(i) if i.endswith("%") else _refuse(i) for i in _items(t))}
        else:
            change = {"anchor_steps": tuple(int(i) for i in _items(t))}
        ScheduleChange(**change)
    except ValueError as e:
        raise _error("anchors", text, allowed) from e
    return change


def _refuse(item: str):
    raise ValueError(f"{item!r} has no % sign")


def parse_layers(text: str) -> tuple[int, ...] | None:
    """'0, 1, 38-40, -1' as block indices in the order written, -1 the last block; 'none' is no layer."""
    if _is_auto(text):
        return None
    layers: list[int] = []
    for item in [] if _plain(text) == "none" else _items(text):
        match = re.fullmatch(r"(-?\d{1,4})|(\d{1,4})\s*-\s*(\d{1,4})", item)  # no model has 10000 blocks
        if not match or (match[2] and int(match[2]) > int(match[3])):
            raise _error("dense layers", text, "Write block numbers and ranges like '0, 1, 38-40, -1' (-1 is the last block), 'none'")
        layers += [int(match[1])] if match[1] else range(int(match[2]), int(match[3]) + 1)
    return tuple(dict.fromkeys(layers))


def parse_curve(text: str) -> tuple[tuple[float, float], ...] | None:
    """'0:0.40 0.5:0.25 1:0.15' as (progress, density) points; 'none' is no curve."""
    if _is_auto(text):
        return None
    allowed = "Write progress:density points in ascending order, like '0:0.40 0.5:0.25 1:0.15' (progress 0 to 1, density 0.05 to 1), 'none'"
    try:
        items = () if _plain(text) == "none" else _plain(text).replace(",", " ").split()
        points = tuple((float(p), float(d)) for p, d in (item.split(":") for item in items))
        ScheduleChange(density_curve=points)
    except ValueError as e:
        raise _error("density curve", text, allowed) from e
    return points


def parse_schedule(dense_start: str, anchors: str, dense_end: str, dense_layers: str, density_curve: str) -> ScheduleChange:
    """The five fields as changes of a preset's schedule. Raises ValueError with the field's name."""
    return ScheduleChange(
        dense_start=parse_span(dense_start, "dense start"),
        dense_end=parse_span(dense_end, "dense end"),
        dense_layers=parse_layers(dense_layers),
        density_curve=parse_curve(density_curve),
        **parse_anchors(anchors),
    )
