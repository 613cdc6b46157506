"""Compiles a Triton kernel for a card that is not here and reports what the compiler made of it."""
from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS = (80, 86, 89, 90, 120)
# Shared memory one program may take, bytes.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}


@dataclass(frozen=True)
class Report:
    """Of one compiled kernel: registers per thread, spilled bytes (stack), shared memory in bytes, its disassembly and PTX."""

    registers: int
    stack: int
    shared: int
    sass: str
    ptx: str

    def count(self, pattern: str) -> int:
        """Instructions of the disassembly that match a regular expression, LDGSTS.*128 or HGMMA for example."""
        return len(re.findall(pattern, self.sass))


def compile_for(target: int, kernel, signature: dict[str, str], constants: dict, warps: int, stages: int, **options) -> Report:
    """`kernel` (a triton.jit function) for sm_<target>.

    signature: Triton type by argument, "*bf16", "i32", "fp32", ... ; "constexpr" and ":16" suffixes ("*bf16:16": a multiple of 16) as
    understood here. constants: values of the constexpr arguments. Needs no GPU.
    """
    positions = {name: i for i, name in enumerate(kernel.arg_names)}
    types, aligned = dict.fromkeys(constants, "constexpr"), {}
    for name, kind in signature.items():
        types[name], _, multiple = kind.partition(":")
        if multiple:
            aligned[(positions[name],)] = [["tt.divisibility", int(multiple)]]
    in_order = {name: types[name] for name in kernel.arg_names}
    source = ASTSource(kernel, in_order, constexprs={(positions[n],): v for n, v in constants.items()}, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options={"num_warps": warps, "num_stages": stages, **options})
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(made.asm["cubin"])
        usage = subprocess.check_output([tools / "cuobjdump", "--dump-resource-usage", cubin], text=True, stderr=subprocess.STDOUT)
        sass = subprocess.check_output([tools / "cuobjdump", "--dump-sass", cubin], text=True)
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Report(found["REG"], found["STACK"], made.metadata.shared, sass, made.asm["ptx"])
