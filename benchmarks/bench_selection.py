"""Speed of key selection against dense attention on the same tensors; run by path on a CUDA machine.

    python benchmarks/bench_selection.py [--out FILE] [--quick] [--tune]

Correct first: the keys of sampled groups are compared with those of masses computed in float32 by PyTorch. `agreement` is the
share of the selected keys that both have; `worst_exchange` how far from the threshold mass, relative to it, an exchanged key lies.
Of the lagged selection, which computes the dense output too, `recall` is the share of the exact selection's keys that it has.
"""
from __future__ import annotations

import argparse
import math
import time
from itertools import product

import harness
import torch

from mc_sparse.kernels import cell_order, dense_attention, group_queries, key_budget, select_keys, unpack_bits
from mc_sparse.kernels.launch import Launch
from mc_sparse.kernels.registry import BackendUnavailable
from mc_sparse.kernels.selection import select_keys_lagged, triton_heaviest, triton_lagged, triton_select
from mc_sparse.kernels.selection.bits import popcount
from mc_sparse.kernels.shapes import GROUP_SIZE
from mc_sparse.kernels.testing import make_qkv

SIZES = ((40, 75600, 128), (40, 32760, 128), (16, 32768, 64))
GRIDS = {75600: (21, 45, 80), 32760: (21, 30, 52), 32768: (32, 32, 32)}
DENSITY = 0.15
LEAST_AGREEMENT = 0.995
OLDER_NOISE = 0.05  # the step that the lagged lse is from had q and k with this much more noise, of their standard deviation
SLOW_HEADS = 2  # of a baseline too slow for all heads


def make_inputs(heads: int, length: int, head_dim: int, kind: str):
    """q, k, v (1, H, S, D) bfloat16 on the GPU, a few heads made at a time, and a little noise so that heads differ."""
    parts = [make_qkv(1, 1, length, head_dim, kind=kind, seed=h, dtype=torch.bfloat16, device="cuda") for h in range(min(heads, 4))]
    q, k, v = (torch.cat([part[i] for part in parts] * -(-heads // len(parts)), 1)[:, :heads] for i in range(3))
    return noisy(q, 0.1), noisy(k, 0.1), v


def noisy(x: torch.Tensor, share: float) -> torch.Tensor:
    """x plus normal noise of `share` of its standard deviation, a head at a time."""
    out = x.clone()
    for h in range(x.shape[1]):
        out[:, h] += share * x[:, h].float().std() * torch.randn_like(x[:, h])
    return out


def grouped(q: torch.Tensor, length: int):
    """PDDP groups; where no backend makes them on this machine, groups of consecutive tokens."""
    try:
        return group_queries(q), "pddp"
    except BackendUnavailable as error:
        print(f"groups by cells: {error}")
        return group_queries(q, method="cells", cells=cell_order(GRIDS[length])), "cells"


def exact_masses(q, k, lse, groups, h: int, g: int) -> torch.Tensor:
    """Masses (S,) float32 of one group, in token order."""
    order = groups.expanded(q.shape[0], q.shape[1])[0, h, g * GROUP_SIZE : (g + 1) * GROUP_SIZE].long()
    order = order[order >= 0]
    scores = q[0, h, order].float() @ k[0, h].float().T * q.shape[3] ** -0.5
    return (scores - lse[0, h, order, None]).exp().sum(0)


def agreement(selection, q, k, lse, groups, samples: int = 8) -> tuple[float, float]:
    """(share of the keys in common, worst distance of an exchanged key from the threshold) over some groups; token granularity."""
    heads, count = selection.counts.shape[1:]
    length, common, total, worst = k.shape[2], 0, 0, 0.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(samples):
        h, g = int(torch.randint(heads, (), generator=generator)), int(torch.randint(count, (), generator=generator))
        mass = exact_masses(q, k, lse, groups, h, g)
        chosen = unpack_bits(selection.bits[0, h, g], length)[selection.cells.place]
        budget = int(selection.counts[0, h, g])
        heaviest = mass.topk(budget)
        expected = torch.zeros_like(chosen)
        expected[heaviest.indices] = True
        common += int((chosen & expected).sum())
        total += budget
        exchanged = mass[chosen != expected]
        if exchanged.numel():
            worst = max(worst, float((exchanged / heaviest.values.min() - 1).abs().max()))
    return common / total, worst


def recall(selection, exact) -> float:
    """Share of the keys of `exact` that `selection` has too."""
    common = sum(int(popcount(a & b).sum()) for a, b in zip(selection.bits.flatten(0, 1), exact.bits.flatten(0, 1), strict=True))
    return common / int(exact.counts.sum())


def dense_case(q, k, v):
    """(name, call, heads) of dense attention as fast as this machine has it: FA3, else the fastest of PyTorch's."""
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        return "torch", lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)
    views = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    return "fa3", lambda: flash_attn_func(*views)


def colreduce_case(q, k, groups):
    """flash-colreduce on a few heads, or None. It computes its own log-sum-exp; only the masses, no choice."""
    try:
        from flash_colreduce import flash_colreduce
    except ImportError:
        return None
    heads, (length, dim) = min(SLOW_HEADS, q.shape[1]), k.shape[2:]
    order = groups.expanded(1, q.shape[1])[0, :heads, : length // GROUP_SIZE * GROUP_SIZE].long()
    queries = torch.stack([q[0, h, order[h]] for h in range(heads)]).view(heads, -1, GROUP_SIZE, dim)
    keys = k[0, :heads, None].expand(heads, queries.shape[1], length, dim)
    return lambda: flash_colreduce(queries, keys, reduction="sum", scale=dim**-0.5)


def measure(heads: int, length: int, head_dim: int, kind: str, quick: bool) -> list[dict]:
    q, k, v = make_inputs(heads, length, head_dim, kind)
    cells = cell_order(GRIDS[length]).to("cuda")
    groups, method = grouped(q, length)
    lse = dense_attention(q, k, v)[1]
    about = {"kind": kind, "groups": method, "H": heads, "S": length, "D": head_dim, "density": DENSITY}
    cases, rows = {}, []

    for granularity in ("token", "cell32"):
        def case(granularity=granularity):
            return select_keys(q, k, lse, groups, density=DENSITY, cells=cells, granularity=granularity, backend="triton")

        row = {"backend": "triton", "mode": "exact", **about, "granularity": granularity}
        selection = case()
        if granularity == "token":
            row["agreement"], row["worst_exchange"] = agreement(selection, q, k, lse, groups)
            assert bool((selection.counts == key_budget(DENSITY, length)).all()), "counts"
            assert row["agreement"] >= LEAST_AGREEMENT, row
        row["retained"] = float(selection.retained.mean())
        del selection
        row["peak_bytes"] = harness.peak_extra(case)
        cases[granularity] = case
        rows.append((granularity, row))

    before = dense_attention(noisy(q, OLDER_NOISE), noisy(k, OLDER_NOISE), v)[1]

    def lagged():
        return select_keys_lagged(q, k, v, before, groups, density=DENSITY, cells=cells)

    row = {"backend": "triton", "mode": "lagged", **about, "granularity": "token", "older_noise": OLDER_NOISE}
    out, lagged_lse, selection = lagged()
    row["recall"] = recall(selection, cases["token"]())
    row["output_error"] = harness.relative_error(out[:, :2], dense_attention(q[:, :2], k[:, :2], v[:, :2])[0])
    row["lse_error"] = float((lagged_lse - lse).abs().max())
    assert row["output_error"] < 0.01 and row["lse_error"] < 0.01, row
    del out, lagged_lse, selection
    row["peak_bytes"] = harness.peak_extra(lagged)
    cases["lagged"] = lagged
    rows.append(("lagged", row))

    dense_name, dense = dense_case(q, k, v)
    cases[dense_name] = dense
    colreduce = None if quick else colreduce_case(q, k, groups)
    if colreduce:
        cases["flash-colreduce"] = colreduce
        rows.append(("flash-colreduce", {"backend": "flash-colreduce", "mode": "masses only", **about, "measured_heads": SLOW_HEADS}))
    times = harness.interleaved(cases, rounds=3 if quick else 5, warmup=1)
    out = []
    for name, row in rows:
        scaled = heads / row["measured_heads"] if "measured_heads" in row else 1
        ms = times[name].ms * scaled
        out.append({**row, "ms": ms, "spread": times[name].spread * scaled, f"{dense_name}_ms": times[dense_name].ms,
                    "ratio": ms / times[dense_name].ms})  # fmt: skip
    return out


def tune(seconds: float = 75) -> list[dict]:
    """Times the kernels apart over their launch parameters and variants, at 8 heads of the largest size; most of it is compiling."""
    heads, length, head_dim = 8, 75600, 128
    q, k, v = make_inputs(heads, length, head_dim, "clustered")
    cells = cell_order(GRIDS[length]).to("cuda")
    groups, _ = grouped(q, length)
    lse = dense_attention(q, k, v)[1]
    dense_name, dense = dense_case(q, k, v)
    dense_ms = harness.interleaved({dense_name: dense}, rounds=3)[dense_name].ms
    all_rows = heads * groups.count
    rows, memory = next(triton_heaviest.scratch_rows(all_rows, length, q.device))
    truth = torch.empty_like(memory)
    part = len(rows) / all_rows
    print(f"{dense_name} dense, 8 heads: {dense_ms:.2f} ms; {len(rows)} rows of {all_rows} at once")
    launches = [Launch(64, 4, stages, registers) for stages, registers in product((1, 2, 3, 4), (None, 128))]
    launches += [Launch(64, 4, 2, 168), Launch(64, 8, 2), Launch(64, 8, 3), Launch(128, 4, 2), Launch(128, 8, 1), Launch(128, 8, 2),
                 Launch(128, 8, 2, 128), Launch(128, 8, 3)]  # fmt: skip
    variants = [triton_select.Variant(described=d, polynomial=p) for d, p in ((True, 0), (True, 2), (False, 0), (True, 4))]
    triton_select.Masses.of(q, k, lse, groups, cells, head_dim**-0.5, variants[0], Launch(64, 4, 2)).compute(rows, truth)
    begin, out = time.monotonic(), []
    for variant, parameters in product(variants, launches):
        if time.monotonic() - begin > seconds:
            print("time is up")
            break
        row = {"kernel": "mass", "described": variant.described, "polynomial": variant.polynomial, **parameters._asdict()}
        try:
            masses = triton_select.Masses.of(q, k, lse, groups, cells, head_dim**-0.5, variant, parameters)
            masses.compute(rows, memory)
        except Exception as error:  # too much shared memory, say: a line of the table
            print(row, type(error).__name__, str(error).splitlines()[0][:100] if str(error) else "")
            continue
        row["error"] = float(((memory - truth).abs() / truth.clamp_min(1e-9))[:, :length].max())
        row["ms"] = harness.interleaved({"": lambda m=masses: m.compute(rows, memory)}, rounds=3, warmup=1)[""].ms
        row["tflops"] = 2 * len(rows) * GROUP_SIZE * length * head_dim / row["ms"] / 1e9
        row[f"of_{dense_name}"] = row["ms"] / (dense_ms * part)
        out.append(row)
    for sample, warps in product((4096, 8192), (8, 16, 32)):
        choice = triton_heaviest.Choice.of(q, k, groups, DENSITY, cells, "token", (), Launch(sample, warps, 1))
        choice.choose(rows, truth)
        ms = harness.interleaved({"": lambda c=choice: c.choose(rows, truth)}, rounds=3, warmup=1)[""].ms
        out.append({"kernel": "heaviest", "sample": sample, "warps": warps, "ms": ms, f"of_{dense_name}": ms / (dense_ms * part)})
    scale = head_dim**-0.5
    for parameters in (Launch(64, 8, 2), Launch(64, 8, 3), Launch(128, 8, 2), Launch(64, 8, 2, 128), Launch(64, 4, 2)):
        def case(parameters=parameters):
            return triton_lagged.select_keys_lagged(q, k, v, lse, groups, DENSITY, cells, "token", (), scale, parameters)

        ms = harness.interleaved({"": case}, rounds=3, warmup=1)[""].ms
        out.append({"kernel": "lagged", **parameters._asdict(), "ms": ms, f"of_{dense_name}": ms / dense_ms})
    for row in sorted(out, key=lambda r: (r["kernel"], r["ms"])):
        print(" ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()))
    return out


def table(rows: list[dict]) -> None:
    for row in rows:
        dense = next((key for key in row if key.endswith("_ms")), None)
        share = f"{row['agreement']:.5f} ({row['worst_exchange']:.1e})" if "worst_exchange" in row else f"{row.get('recall', math.nan):.5f}"
        print(
            f"{row['backend']:16} {row['mode']:12} {row['kind']:10} {row['groups']:6} H{row['H']} S{row['S']} D{row['D']} "
            f"{row.get('granularity', ''):7} {row['ms']:9.2f} ms +-{row['spread']:.2f} {row['ratio']:.3f} of {dense[:-3]} "
            f"({row[dense]:.2f} ms) agreement {share} peak {row.get('peak_bytes', 0) / 1e9:.2f} GB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="clustered data only, fewer rounds")
    parser.add_argument("--tune", action="store_true", help="sweep launch parameters instead")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    if arguments.tune:
        rows = tune()
    else:
        for size, kind in product(SIZES, ("clustered",) if arguments.quick else ("clustered", "random")):
            rows += measure(*size, kind, arguments.quick)
            torch.cuda.empty_cache()
    if arguments.out:
        harness.write(arguments.out, rows)
    if not arguments.tune:
        table(rows)


if __name__ == "__main__":
    main()
