"""Token-sparse attention by the Hopper kernel, which ships compiled: at run time only the driver is needed (scripts/build_cubins.py).

The passes are those of triton_sparse.py; the third is the kernel of cute_sm90_mainloop.py. Groups in which a query leaves the range
of its exponentials are computed again by the Triton kernel with a running maximum.
"""
from __future__ import annotations

import ctypes
import json
import os
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..dtypes import half
from ..registry import load
from ..residual import Residual
from ..shapes import Geometry, KeySelection, PooledTail, QueryGroups

NAME = "hopper"
CUBINS = Path(__file__).with_name("cubins")
# Which cubin runs a dtype and head dim.
CHOSEN = {
    (torch.bfloat16, 128): "sparse_bf16_d128_n144_s2",
    (torch.float16, 128): "sparse_fp16_d128_n144_s2",
    (torch.bfloat16, 64): "sparse_bf16_d64_n192_s4",
    (torch.float16, 64): "sparse_fp16_d64_n192_s4",
}
_TYPES = {"p": ctypes.c_uint64, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def why_not(geometry: Geometry) -> str | None:
    """None when the Hopper kernel can run this geometry: sm_90, 16-bit, head dim 64 or 128."""
    if geometry.device_type != "cuda" or geometry.capability != (9, 0):
        return "is compiled for Hopper GPUs (compute capability 9.0)"
    if (geometry.dtype, geometry.head_dim) not in CHOSEN:
        return f"takes bfloat16 and float16 with head dims 64 and 128, not {geometry.dtype} with {geometry.head_dim}"
    name = CHOSEN[geometry.dtype, geometry.head_dim]
    if not (CUBINS / f"{name}.cubin").exists():
        return f"lacks its compiled kernel {name}.cubin"
    try:
        _driver()
    except OSError as error:
        return f"cannot load the CUDA driver's library: {error}"
    triton, reason = load(".attention.triton_sparse")  # the first two passes
    return reason if triton is None else triton.why_not(geometry)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.WinDLL("nvcuda.dll") if os.name == "nt" else ctypes.CDLL("libcuda.so.1")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({code})")


class Kernel:
    """One cubin, loaded into the current CUDA context. facts: the JSON file beside it."""

    def __init__(self, name: str):
        self.facts = json.loads((CUBINS / f"{name}.json").read_text(encoding="utf-8"))
        image = (CUBINS / f"{name}.cubin").read_bytes()
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _check(_driver().cuModuleLoadData(ctypes.byref(module), image), f"loading {name}")
        entry = self.facts["entry"].encode()
        _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, entry), f"finding {entry.decode()}")
        size = ctypes.c_int(self.facts["shared"])
        _check(_driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, size), f"shared memory of {name}")

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
        _check(_driver().cuLaunchKernel(self._function, *grid, *block, shared, stream, addresses, None), "launching the Hopper kernel")


@cache
def kernel(name: str, device: int) -> Kernel:
    """Loaded once for each device, whose context must be current."""
    return Kernel(name)


def _aligned(x: Tensor) -> Tensor:
    """x, copied if a row of it does not begin at a multiple of 16 bytes."""
    fits = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def token_sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, groups: QueryGroups, selection: KeySelection, tail: PooledTail | int | None,
    residual: Residual | None, scale: float, with_lse: bool, dense: Tensor | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As the reference."""
    from ..launch import launch
    from .triton_sparse import in_passes

    q, device = _aligned(half(q)), q.device
    hopper = kernel(CHOSEN[q.dtype, q.shape[3]], device.index)
    how = launch("sparse_online", q.shape[3], torch.cuda.get_device_capability(device))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    stream = torch.cuda.current_stream(device).cuda_stream
    nothing = torch.full((1,), float("-inf"), device=device)

    def fixed(programs: int, epilogue: int, arguments: dict) -> None:
        hopper.launch(min(programs, processors), stream, **arguments, total=programs, epilogue=epilogue, minus=nothing)

    dense = None if dense is None else _aligned(half(dense))
    return in_passes(q, k, v, groups, selection, tail, residual, scale, with_lse, dense, how, hopper.facts["tile"], fixed)
