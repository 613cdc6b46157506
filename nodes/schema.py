"""Node declarations that load on every version of ComfyUI: keywords that a version does not know are left out."""
from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable

from comfy_api.latest import io

CATEGORY = "MC-Sparse"
Schedule = io.Custom("MC_SPARSE_SCHEDULE")


def declare(make: Callable, *args, **keywords):
    """`make(*args, **keywords)` with only those keywords that this version's `make` takes."""
    if dataclasses.is_dataclass(make):
        known = {field.name for field in dataclasses.fields(make)}
    else:
        known = set(inspect.signature(make).parameters)
    return make(*args, **{name: value for name, value in keywords.items() if name in known})


def schema(node_id: str, display_name: str, **keywords) -> io.Schema:
    """A Schema in our category, unless another is given."""
    return declare(io.Schema, **{"node_id": node_id, "display_name": display_name, "category": CATEGORY, **keywords})
