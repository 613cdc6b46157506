"""Kernels that ship compiled, as <name>.cubin with its facts in <name>.json beside it, launched by the CUDA driver alone.

On request they are compiled where they run instead (cubin_jit.py).
"""
from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from . import cubin_jit

_TYPES = {"p": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def why_not(cubins: Iterable[Path]) -> str | None:
    """None when these cubins (paths without ending) are there, or are made here, and the driver's library can be loaded."""
    for path in cubins:
        missing = _missing(path)
        if missing is not None and not cubin_jit.makes(path.name):
            return f"lacks its compiled kernel's {missing}"
    try:
        driver()
    except OSError as error:
        return f"cannot load the CUDA driver's library: {error}"
    return None


@cache  # asked before every call of an operation
def _missing(path: Path) -> str | None:
    parts = path.with_suffix(".cubin"), path.with_suffix(".json")
    return next((part.name for part in parts if not part.exists()), None)


@cache
def driver() -> ctypes.CDLL:
    """Raises OSError where there is none."""
    return ctypes.WinDLL("nvcuda.dll") if os.name == "nt" else ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({code})")


class Kernel:
    """One cubin (path without ending), loaded into the current CUDA context. facts: the JSON file beside it.

    Raises RuntimeError with the driver's words, from loading as from launching.
    """

    def __init__(self, path: Path):
        self.facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        image = path.with_suffix(".cubin").read_bytes()
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver().cuModuleLoadData(ctypes.byref(module), image), f"loading {path.name}")
        entry = self.facts["entry"].encode()
        _check(driver().cuModuleGetFunction(ctypes.byref(self._function), module, entry), f"finding {entry.decode()}")
        size = ctypes.c_int(self.facts["shared"])
        _check(driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, size), f"shared memory of {path.name}")

    def launch(self, programs: int, stream: int, **values: int | float | Tensor) -> None:
        """values by the names in `facts`; tensors stand for their addresses."""
        boxes = []
        for name, kind in self.facts["parameters"]:
            value = values.pop(name)
            boxes.append(_TYPES[kind](value.data_ptr() if isinstance(value, Tensor) else value))
        if values:
            raise TypeError(f"{self.facts['entry']} has no parameters {', '.join(values)}")
        addresses = (ctypes.c_void_p * len(boxes))(*(ctypes.addressof(box) for box in boxes))
        grid, block = (programs, 1, 1), (self.facts["threads"], 1, 1)
        shared, stream = ctypes.c_uint(self.facts["shared"]), ctypes.c_void_p(stream)
        _check(driver().cuLaunchKernel(self._function, *grid, *block, shared, stream, addresses, None), f"launching {self.facts['entry']}")


@cache
def kernel(path: Path, device: int) -> Kernel:
    """Loaded once for each device, whose context must be current. Compiled here if that is asked for and works, else as it ships."""
    if cubin_jit.makes(path.name):
        try:
            return Kernel(cubin_jit.compiled(path.name))
        except Exception as error:  # the compiler is a large package, and the driver has a word, too
            cubin_jit.gave_up(path.name, error)
    return Kernel(path)


def aligned(x: Tensor) -> Tensor:
    """x, copied if its last dimension has gaps or a row of it does not begin at a multiple of 16 bytes."""
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)
