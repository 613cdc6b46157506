"""Splitting work so that temporary memory stays bounded."""
from __future__ import annotations

from collections.abc import Iterator

import torch

# Temporary bytes of one chunk. On the CPU a few MB stay in the caches; on a GPU large launches matter more.
CPU_CHUNK_BYTES = 8 << 20
DEVICE_CHUNK_BYTES = 128 << 20


def chunks(count: int, bytes_each: int, device: torch.device, at_least: int = 1) -> Iterator[slice]:
    """Slices that cover 0..count, each of at most a chunk's bytes (but at least `at_least` items)."""
    budget = CPU_CHUNK_BYTES if device.type == "cpu" else DEVICE_CHUNK_BYTES
    step = max(at_least, budget // max(1, bytes_each))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))
