"""Sparse attention on Hopper with Triton out of reach: every operation by `auto`, checked against float32 samples, with times and memory.

With --triton the same with Triton, to compare: the lines "bits" must be equal. Run by path.
"""
from __future__ import annotations

import argparse
import hashlib
import sys
import time

PARSER = argparse.ArgumentParser(description=__doc__)
PARSER.add_argument("--triton", action="store_true", help="with Triton")
PARSER.add_argument("--out", help="JSON file to write")
ARGS = PARSER.parse_args()
BLOCKED = not ARGS.triton
if BLOCKED:
    sys.modules["triton"] = None  # before PyTorch is imported

import harness  # noqa: E402
import torch  # noqa: E402

from mc_sparse.kernels import (  # noqa: E402
    cell_order,
    cubin_jit,
    dense_attention,
    group_queries,
    key_budget,
    pool_cells,
    registry,
    select_keys,
    selfcheck,
    sparse_residual,
    token_sparse_attention,
    unpack_bits,
)
from mc_sparse.kernels.selection import cute_sm90  # noqa: E402
from mc_sparse.kernels.selection.bits import popcount  # noqa: E402
from mc_sparse.kernels.shapes import Geometry  # noqa: E402

H, S, D, DENSITY, GRID = 40, 75600, 128, 0.15, (21, 45, 80)
START = time.time()
ROWS = []


def clustered(seed):
    """(1, H, S, D) bfloat16: 32 centres a head, alike for every seed, with noise."""
    centres = torch.randn(H, 32, D, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    of = torch.randint(32, (H, S), generator=generator, device="cuda")
    out = torch.empty(1, H, S, D, dtype=torch.bfloat16, device="cuda")
    for h in range(H):
        out[0, h] = centres[h, of[h]] + 0.6 * torch.randn(S, D, generator=generator, device="cuda")
    return out


def timed(name, function, repeats=3):
    """The result; prints the median time and what it took of memory beyond its inputs."""
    result, peak = function(), harness.peak_extra(function)
    ms = harness.interleaved({name: function}, repeats).popitem()[1].ms
    row = {"operation": name.strip(), "triton": not BLOCKED, "H": H, "S": S, "D": D, "density": DENSITY}
    ROWS.append({**row, "ms": ms, "peak_bytes": peak})
    print(f"[{time.time() - START:5.1f} s] {name}: {ms:.1f} ms, {peak / 2**20:.0f} MiB beyond the inputs", flush=True)
    return result


def choices(q):
    """What auto takes, by operation."""
    return {op: registry.pick(op, Geometry.of(q, q)).NAME for op in registry.operations()}


def main():
    harness.need_gpu()
    q, k, v = clustered(1), clustered(2), torch.randn(1, H, S, D, device="cuda").bfloat16()
    geometry = Geometry.of(q, k)
    how = "Triton blocked" if BLOCKED else "with Triton"
    print(torch.cuda.get_device_name(), torch.__version__, how, "| jit:", cubin_jit.why_not() or "on")
    assert registry.why_none(geometry) is None, registry.why_none(geometry)
    around = cute_sm90.steps(geometry)
    print(choices(q), around.__name__.rpartition(".")[2])
    assert not BLOCKED or choices(q) == {
        "group_queries": "reference", "pool_cells": "reference", "select_keys": "hopper", "token_sparse_attention": "hopper",
        "dense_attention": choices(q)["dense_attention"],
    }  # fmt: skip
    assert (around.__name__.endswith("torch_steps")) == BLOCKED
    cells = cell_order(GRID).to("cuda")

    dense, lse = timed("dense_attention " + choices(q)["dense_attention"], lambda: dense_attention(q, k, v))
    pddp = timed("group_queries pddp", lambda: group_queries(q))
    assert selfcheck.check("group_queries", pddp, (q,))
    groups = group_queries(q, method="cells", cells=cells)
    for granularity in ("token", "cell32"):
        arguments = {"density": DENSITY, "cells": cells, "granularity": granularity}
        selection = timed(f"select_keys {granularity}", lambda a=arguments: select_keys(q, k, lse, groups, **a))
        print(f"bits {granularity}", hashlib.sha256(selection.bits.cpu().numpy().tobytes()).hexdigest()[:16])
        assert selfcheck.check("select_keys", selection, (q, k, lse, groups, DENSITY, cells, granularity, (), D**-0.5))
    selection = select_keys(q, k, lse, groups, density=DENSITY, cells=cells)
    assert bool((selection.counts == key_budget(DENSITY, S)).all())
    for bits, counts in zip(selection.bits[0], selection.counts[0], strict=True):
        assert torch.equal(popcount(bits).sum(-1), counts.long())

    # The parts of the selection, of the first piece.
    choice = around.Choice.of(q, k, groups, DENSITY, cells, "token", ())
    masses = cute_sm90.Masses.of(q, k, lse, groups, cells, "token", D**-0.5, around.in_tiles)
    from mc_sparse.kernels.selection.heaviest import pieces

    piece, memory = next(pieces(choice, masses.groups_each, masses.key_bytes))
    tiles = around.in_tiles(k, cells, piece.heads)
    part = f"of {len(piece.rows)} of {choice.rows} rows"
    timed(f"  tiles {part}", lambda: around.in_tiles(k, cells, piece.heads))
    timed(f"  masses {part}", lambda: masses.launch(piece, tiles, memory))
    timed(f"  choice {part}", lambda: choice.choose(piece.rows, memory))

    timed("pool_cells 64", lambda: pool_cells(k, v, cells, 64))
    assert selfcheck.check("pool_cells", pool_cells(k, v, cells, 64), (k, v, cells, 64))
    for some, name in ((groups, "cells"), (pddp, "pddp")):
        own = select_keys(q, k, lse, some, density=DENSITY, cells=cells)
        out = timed(f"token_sparse_attention, {name} groups", lambda g=some, s=own: token_sparse_attention(q, k, v, g, s, tail=64))
        assert selfcheck.check("token_sparse_attention", (out, None), (q, k, v, some, own, 64, None, D**-0.5, False, None))
    timed("sparse_residual", lambda: sparse_residual(q, k, v, groups, selection, dense, tail=64), repeats=1)

    # Whole groups in float32, not by selfcheck: which keys are heaviest, and attention over them without a tail.
    out, worst, agreed = token_sparse_attention(q, k, v, groups, selection), 0.0, 1.0
    for h, g in ((0, 0), (7, 300), (19, 590), (39, 123)):
        rows = groups.expanded(1, H)[0, h, g * 128 : (g + 1) * 128].long()
        rows = rows[rows >= 0]
        scores = q[0, h, rows].float() @ k[0, h].float().T * D**-0.5
        mass = (scores - lse[0, h, rows, None]).exp().sum(0)
        chosen = unpack_bits(selection.bits[0, h, g], S)[cells.place]
        best = torch.zeros_like(chosen)
        best[mass.topk(int(chosen.sum())).indices] = True
        agreed = min(agreed, float((best & chosen).sum() / best.sum()))
        truth = scores.masked_fill(~chosen, float("-inf")).softmax(1) @ v[0, h].float()
        worst = max(worst, float((out[0, h, rows].float() - truth).norm() / truth.norm()))
    print(f"heaviest keys agreed on: {agreed:.4f}, attention's relative error {worst:.4f}; jit failures: {cubin_jit.failures}")
    assert agreed > 0.99 and worst < 0.01
    assert registry.demotions() == (), registry.demotions()
    assert not BLOCKED or not any(name.startswith("triton.") for name in sys.modules)
    print(f"peak of everything {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, {time.time() - START:.0f} s")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
    if ARGS.out:
        harness.write(ARGS.out, ROWS)
