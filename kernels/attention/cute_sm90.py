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

from ..registry import load
from ..residual import Residual
from ..shapes import GROUP_SIZE, Geometry, KeySelection, PooledTail, QueryGroups, ceil_div

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
LOG2_E = 1.4426950408889634


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
    """As the reference. Heads are computed some at a time, so that laid-out rows and row numbers take bounded memory."""
    from ..launch import launch
    from ..pooling.triton_pool import gather_rows, pool_cells
    from ..shapes import CELL_SIZES
    from ..triton_support import half, needs_fence
    from . import triton_sparse as triton

    batch, heads, length, dim = q.shape
    keys, device = k.shape[2], q.device
    capability = torch.cuda.get_device_capability(device)
    q, k, v = _aligned(half(q)), half(k), half(v)
    hopper = kernel(CHOSEN[q.dtype, dim], device.index)
    tile = hopper.facts["tile"]
    how = launch("sparse_online", dim, capability)
    shape = (batch, heads, length, dim) if dense is None else (batch, heads, groups.count * GROUP_SIZE, dim)
    out = torch.empty(shape, dtype=q.dtype, device=device)
    lse = torch.empty((batch, heads, length), dtype=torch.float32, device=device) if with_lse else None
    epilogue, values, scales, rank = triton.epilogue_of(residual, dense, q)
    minus = out if dense is None else _aligned(half(dense))
    order = groups.expanded(batch, heads)
    if isinstance(tail, int) and tail not in CELL_SIZES:
        tail = pool_cells(k, v, selection.cells, tail)
    size = tail.size if isinstance(tail, PooledTail) else tail
    cells = 0 if size is None else ceil_div(keys, size)
    nothing = torch.full((1,), float("-inf"), device=device)

    wide = ceil_div(selection.most + cells + tile, 16) * 16
    per_head = 4 * groups.count * (wide + cells + 1 + ceil_div(keys, 32)) + 4 * (keys + cells) * dim
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    stream = torch.cuda.current_stream(device).cuda_stream
    for b in range(batch):
        for some in triton.heads_at_once(heads, per_head, device):
            rows = gather_rows(k[b], v[b], selection.cells, some, size, (tail.k[b], tail.v[b]) if isinstance(tail, PooledTail) else None)
            numbers, bias = triton.expanded(selection, b, some, wide, size)
            programs = (some.stop - some.start) * groups.count
            again = torch.zeros(programs, dtype=torch.int32, device=device)
            left, right = (values, scales) if residual is None else (values[b], scales[b])
            hopper.launch(
                min(programs, processors), stream, q=q[b], rows=rows, out=out[b], lse=out if lse is None else lse[b], order=order[b],
                numbers=numbers, counts=selection.counts[b], bias=bias, values=left, scales=right, dense=minus[b], again=again,
                minus=nothing, q_h=q.stride(1), rows_h=rows.stride(0), out_h=out.stride(1), dense_h=minus.stride(1),
                order_h=order.stride(1), q_s=q.stride(2), out_s=out.stride(2), dense_s=minus.stride(2), first=some.start,
                groups=groups.count, total=programs, length=length, wide=wide, cells=cells, rank=rank, epilogue=epilogue,
                with_lse=int(with_lse), scale=scale * LOG2_E,
            )  # fmt: skip
            triton.attend[(min(programs, triton.AGAIN_PROGRAMS),)](
                q[b], rows, out[b], out if lse is None else lse[b], order[b], numbers, selection.counts[b], bias, left, right, minus[b],
                q.stride(1), q.stride(2), rows.stride(0), out.stride(1), out.stride(2), minus.stride(1), minus.stride(2), order.stride(1),
                some.start, groups.count, length, wide, cells, scale * LOG2_E, rank, int(with_lse), again, programs,
                D=dim, BLOCK_D=dim, M=how.queries, N=how.tile, STAGES=how.stages, EPILOGUE=epilogue, ONLINE=True,
                FENCE=needs_fence(capability), **how.options,
            )  # fmt: skip
    return out, lse
