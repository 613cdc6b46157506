"""Dense attention with its log-sum-exp on a GPU: every backend that can run here, and what its one self-check costs. Run by path.

Correct first: each result passes the self-check, or the backend is shown with its reason and not timed.
"""
from __future__ import annotations

import argparse
import functools
import importlib

import harness
import torch

from mc_sparse.kernels import Geometry, dense_attention, registry, selfcheck

SIZES = [(40, 75600, 128), (40, 32760, 128), (16, 32768, 64)]  # H, S, D
OP = "dense_attention"


def measure(heads: int, length: int, dim: int, rounds: int) -> list[dict]:
    generator = torch.Generator("cuda").manual_seed(0)
    bshd = torch.randn(3, 1, length, heads, dim, generator=generator, device="cuda", dtype=torch.bfloat16)
    q, k, v = bshd.transpose(2, 3)
    scale = dim**-0.5
    size = {"heads": heads, "length": length, "head_dim": dim}
    rows, cases = [], {}
    for name, reason in registry.reasons(OP, Geometry.of(q, k)).items():
        if name == registry.REFERENCE:
            continue
        try:
            if reason is None:
                dense_attention(q, k, v, backend=name)
        except registry.BackendUnavailable as error:
            reason = str(error)
        if reason is None:
            cases[name] = functools.partial(dense_attention, q, k, v, backend=name)
        else:
            rows.append({**size, "backend": name, "reason": reason})
            print(f"{heads} x {length} x {dim} {name}: {reason}")
    modules = {c.name: importlib.import_module(f"mc_sparse.kernels{c.module}") for c in registry.candidates(OP) if c.name in cases}
    for name, taken in harness.interleaved(cases, rounds).items():
        result = getattr(modules[name], OP)(q, k, v, scale)
        check = harness.interleaved({"check": functools.partial(selfcheck.check, OP, result, (q, k, v, scale))}, 5)["check"]
        tflops = 4 * heads * length**2 * dim / taken.ms / 1e9
        rows.append({**size, "backend": name, "ms": taken.ms, "spread": taken.spread, "tflops": tflops, "check_ms": check.ms})
        print(f"{heads} x {length} x {dim} {name}: {taken.ms:.1f} ms (+-{taken.spread:.1f}), {tflops:.0f} TFLOP/s, check {check.ms:.2f} ms")
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="the first size, fewer rounds")
    args = parser.parse_args()
    harness.need_gpu()
    rows = []
    for size in SIZES[:1] if args.quick else SIZES:
        rows += measure(*size, rounds=3 if args.quick else 7)
    if args.out:
        harness.write(args.out, rows)


if __name__ == "__main__":
    main()
