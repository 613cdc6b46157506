"""Speed of key selection against dense attention on the same tensors; run by path on a CUDA machine.

    python benchmarks/bench_selection.py [--out FILE] [--quick] [--tune]

--quick: two sizes, clustered data, no lagged selection. --tune: the kernels apart over their launch parameters. Both print the time of
each kernel (laying the keys out, masses, choice).

Correct first: the keys of sampled groups are compared with those of masses computed in float32 by PyTorch. `agreement` is the
share of the selected keys that both have; `worst_exchange` how far from the threshold mass, relative to it, an exchanged key lies.
Of the lagged selection, which computes the dense output too, `recall` is the share of the exact selection's keys that it has.
"""
from __future__ import annotations

import argparse
import math
import subprocess
import sys
from itertools import product

import harness
import torch

from mc_sparse.kernels import cell_order, dense_attention, group_queries, key_budget, registry, select_keys, unpack_bits
from mc_sparse.kernels.launch import Launch, launch
from mc_sparse.kernels.registry import BackendUnavailable
from mc_sparse.kernels.selection import heaviest, select_keys_lagged, triton_heaviest, triton_select
from mc_sparse.kernels.selection.bits import popcount
from mc_sparse.kernels.shapes import GROUP_SIZE, Geometry
from mc_sparse.kernels.testing import make_qkv

SIZES = ((40, 75600, 128), (40, 32760, 128), (16, 32768, 64))
GRIDS = {75600: (21, 45, 80), 32760: (21, 30, 52), 32768: (32, 32, 32)}
QUICK_SIZES = ((40, 75600, 128), (16, 32768, 64))
TUNE_SIZES = ((8, 75600, 128), (16, 32768, 64))
DENSITIES = (0.10, 0.15)
DENSITY = 0.15  # of lagged selection and of --tune
COMPILERS = 12  # processes that compile at one time
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
    about = {"kind": kind, "groups": method, "H": heads, "S": length, "D": head_dim}
    cases, rows = {}, []

    reasons = registry.reasons("select_keys", Geometry.of(q, k))
    backends = [name for name in ("hopper", "triton") if reasons.get(name, "no such backend") is None]
    for density, granularity, backend in product(DENSITIES, ("token", "cell32"), backends):
        def case(density=density, granularity=granularity, backend=backend):
            return select_keys(q, k, lse, groups, density=density, cells=cells, granularity=granularity, backend=backend)

        row = {"backend": backend, "mode": "exact", **about, "density": density, "granularity": granularity}
        selection = case()
        if granularity == "token":
            row["agreement"], row["worst_exchange"] = agreement(selection, q, k, lse, groups)
            assert bool((selection.counts == key_budget(density, length)).all()), "counts"
            assert row["agreement"] >= LEAST_AGREEMENT, row
        row["retained"] = float(selection.retained.mean())
        del selection
        row["peak_bytes"] = harness.peak_extra(case)
        name = f"{backend} {granularity} {density}"
        cases[name] = case
        rows.append((name, row))

    if not quick:
        before = dense_attention(noisy(q, OLDER_NOISE), noisy(k, OLDER_NOISE), v)[1]

        def lagged():
            return select_keys_lagged(q, k, v, before, groups, density=DENSITY, cells=cells)

        row = {"backend": "triton", "mode": "lagged", **about, "density": DENSITY, "granularity": "token", "older_noise": OLDER_NOISE}
        out, lagged_lse, selection = lagged()
        row["recall"] = recall(selection, cases[f"triton token {DENSITY}"]())
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
    for granularity in ("token", "cell32"):
        print(f"H{heads} S{length} D{head_dim} {granularity} {DENSITY}:", breakdown(q, k, lse, groups, cells, granularity))
    out = []
    for name, row in rows:
        scaled = heads / row["measured_heads"] if "measured_heads" in row else 1
        ms = times[name].ms * scaled
        out.append({**row, "ms": ms, "spread": times[name].spread * scaled, f"{dense_name}_ms": times[dense_name].ms,
                    "ratio": ms / times[dense_name].ms})  # fmt: skip
    return out


def breakdown(q, k, lse, groups, cells, granularity: str) -> str:
    """Milliseconds of each part of one selection, in words."""
    choice = triton_heaviest.Choice.of(q, k, groups, DENSITY, cells, granularity, ())
    masses = triton_select.Masses.of(q, k, lse, groups, cells, granularity, q.shape[3] ** -0.5)
    parts = list(heaviest.pieces(choice, masses.launch.queries // GROUP_SIZE, masses.key_bytes))
    piece, memory = parts[0]
    keys = triton_select.laid_out(k, cells, piece.heads)
    cases = {
        "keys": lambda: triton_select.laid_out(k, cells, piece.heads),
        "masses": lambda: masses.launch_kernel(piece, keys, memory),
        "choice": lambda: choice.choose(piece.rows, memory),
    }
    times = harness.interleaved(cases, rounds=5, warmup=1)
    scaled = {"keys": q.shape[1] / len(piece.heads), "masses": choice.rows / len(piece.rows), "choice": choice.rows / len(piece.rows)}
    return ", ".join(f"{name} {times[name].ms * scaled[name]:.2f} ms" for name in cases) + f" (of the first of {len(parts)} parts, scaled)"


def mass_settings() -> list[Launch]:
    """Launch parameters: one or two groups a program."""
    pairs = [Launch(64, 4, stages, registers, 256) for stages, registers in product((2, 3, 4), (208, 232, 255))]
    single = [Launch(64, 4, stages, registers) for stages, registers in product((2, 3), (160, 168, 184, 232))]
    return [*pairs, Launch(64, 4, 3, None, 256), *single, Launch(64, 4, 4, 184)]


def choice_settings() -> list[triton_heaviest.Launches]:
    """Launch parameters: one of the three kernels' other than it runs."""
    usual = triton_heaviest.Launches(*(launch(kernel, 64, None) for kernel in triton_heaviest.Launches._fields))
    shapes = {
        "bracket": ((4096, 4), (8192, 8), (8192, 16)),
        "divide": ((1024, 2), (2048, 8), (4096, 4), (4096, 8), (8192, 8)),
        "heaviest": ((1024, 4), (2048, 8), (2048, 16)),
    }
    return [usual, *(usual._replace(**{kernel: Launch(*shape, 1)}) for kernel in shapes for shape in shapes[kernel])]


def compile_some(index: int) -> None:
    """Fills the compiler's cache with every COMPILERS-th setting, by a run on tiny inputs."""
    for _, _, head_dim in TUNE_SIZES:
        q, k, _ = make_inputs(2, 1024, head_dim, "random")
        groups, cells, lse = group_queries(q, method="cells", cells=cell_order((4, 16, 16))), cell_order((4, 16, 16)), q[..., 0].float()
        work = [*mass_settings(), *(choice_settings() if head_dim == 128 else [])]
        for parameters in work[index::COMPILERS]:
            try:
                tune_case(q, k, lse, groups, cells.to("cuda"), parameters)()
            except Exception as error:  # the one that tunes says it again
                print(parameters, type(error).__name__)
    torch.cuda.synchronize()


def tune_case(q, k, lse, groups, cells, parameters: Launch | triton_heaviest.Launches, masses=None):
    """A call of the mass kernel on all rows, or of the choice on the first of them."""
    if isinstance(parameters, Launch):
        choice = triton_heaviest.Choice.of(q, k, groups, DENSITY, cells, "token", ())
        mass = triton_select.Masses.of(q, k, lse, groups, cells, "token", q.shape[3] ** -0.5, parameters)
        parts = list(heaviest.pieces(choice, parameters.queries // GROUP_SIZE, mass.key_bytes))

        def compute():
            for piece, memory in parts:
                mass.compute(piece, memory)
            return parts[-1]

        return compute
    choice = triton_heaviest.Choice.of(q, k, groups, DENSITY, cells, "token", (), parameters)
    rows = range(min(1584, choice.rows))
    if masses is None:
        masses = torch.zeros(len(rows), heaviest.row_width(k.shape[2]), device="cuda")

    def choose():
        choice.choose(rows, masses)
        return choice.selection.bits.flatten(0, 2)[: len(rows)]

    return choose


def tune() -> list[dict]:
    """Times the kernels apart over their launch parameters; each is checked first."""
    compilers = [subprocess.Popen([sys.executable, __file__, "--compile", str(i)]) for i in range(COMPILERS)]
    out = []
    for heads, length, head_dim in TUNE_SIZES:
        q, k, v = make_inputs(heads, length, head_dim, "clustered")
        cells = cell_order(GRIDS[length]).to("cuda")
        groups, _ = grouped(q, length)
        lse = dense_attention(q, k, v)[1]
        dense_name, dense = dense_case(q, k, v)
        for compiler in compilers:
            compiler.wait()
        dense_ms = harness.interleaved({dense_name: dense}, rounds=5)[dense_name].ms
        print(f"H{heads} S{length} D{head_dim} {dense_name} dense: {dense_ms:.2f} ms", flush=True)
        for parameters in mass_settings():
            row = {"kernel": "mass", "D": head_dim, **parameters._asdict()}
            try:
                case = tune_case(q, k, lse, groups, cells, parameters)
                piece, memory = case()
            except Exception as error:  # too much shared memory, say: a line of the table
                print(row, type(error).__name__, str(error).splitlines()[0][:100] if str(error) else "")
                continue
            some = piece.rows[:: len(piece.rows) // 3]
            row["error"] = max(mass_error(q, k, lse, groups, cells, r, memory[r - piece.rows.start]) for r in some)
            times = harness.interleaved({"": case, dense_name: dense}, rounds=3, warmup=1)
            row["ms"], row[f"of_{dense_name}"] = times[""].ms, times[""].ms / times[dense_name].ms
            out.append(row)
        if head_dim == 128:
            choice = triton_heaviest.Choice.of(q, k, groups, DENSITY, cells, "token", ())
            mass = triton_select.Masses.of(q, k, lse, groups, cells, "token", head_dim**-0.5)
            piece, memory = next(heaviest.pieces(choice, mass.launch.queries // GROUP_SIZE, mass.key_bytes))
            mass.compute(piece, memory)
            expected = None
            for launches in choice_settings():
                case = tune_case(q, k, lse, groups, cells, launches, memory)
                bits = case()
                expected = bits if expected is None else expected
                right = torch.equal(bits, expected)
                ms = harness.interleaved({"": case}, rounds=5, warmup=1)[""].ms * 40 * groups.count / len(bits)
                shapes = {name: f"{one.tile}/{one.warps}" for name, one in launches._asdict().items()}
                out.append({"kernel": "choice", **shapes, "right": right, "ms": ms, "of": "40 heads"})
        del q, k, v
    for row in sorted(out, key=lambda r: (r["kernel"], r.get("D", 0), r["ms"])):
        print(" ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()))
    return out


def mass_error(q, k, lse, groups, cells, row: int, found: torch.Tensor) -> float:
    """Relative error of one row of masses."""
    truth = exact_masses(q, k, lse, groups, row // groups.count, row % groups.count)[cells.order]
    return harness.relative_error(found[: truth.numel()], truth)


def table(rows: list[dict]) -> None:
    for row in rows:
        dense = next((key for key in row if key.endswith("_ms")), None)
        share = f"{row['agreement']:.5f} ({row['worst_exchange']:.1e})" if "worst_exchange" in row else f"{row.get('recall', math.nan):.5f}"
        print(
            f"{row['backend']:16} {row['mode']:12} {row['kind']:10} {row['groups']:6} H{row['H']} S{row['S']} D{row['D']} "
            f"{row.get('granularity', ''):7} {row.get('density', '')} "
            f"{row['ms']:9.2f} ms +-{row['spread']:.2f} {row['ratio']:.3f} of {dense[:-3]} "
            f"({row[dense]:.2f} ms) agreement {share} peak {row.get('peak_bytes', 0) / 1e9:.2f} GB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="two sizes, clustered data, fewer rounds")
    parser.add_argument("--tune", action="store_true", help="sweep launch parameters instead")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    harness.need_gpu()
    torch.manual_seed(0)
    if arguments.compile is not None:
        return compile_some(arguments.compile)
    rows = []
    if arguments.tune:
        rows = tune()
    else:
        sizes, kinds = (QUICK_SIZES, ("clustered",)) if arguments.quick else (SIZES, ("clustered", "random"))
        for size, kind in product(sizes, kinds):
            rows += measure(*size, kind, arguments.quick)
            torch.cuda.empty_cache()
    if arguments.out:
        harness.write(arguments.out, rows)
    if not arguments.tune:
        table(rows)


if __name__ == "__main__":
    main()
