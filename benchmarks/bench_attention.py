"""Token-sparse attention on a GPU, everything a reuse step does counted, beside dense and sparse attention of others. Run by path.

Efficiency is executed keys / S x t(FlashAttention-3 dense) / t in one run: 1 would be all of the speed that leaving keys out can give.
Executed: selected keys and pooled cells. Without FlashAttention-3 the fastest dense backend takes its place, and the row says so.
Correct first: sampled groups against float32, else no time is shown. `error` of ours is against float32 attention with the same selection
and tail, before a residual; `dense_error`, of ours and of others, against float32 attention over all keys.
"""
from __future__ import annotations

import argparse
import functools
import importlib.util
import math
import re
from dataclasses import replace

import harness
import torch

from mc_sparse.kernels import (
    CellOrder,
    Geometry,
    KeySelection,
    PooledTail,
    QueryGroups,
    cell_order,
    compress_residual,
    dense_attention,
    group_queries,
    key_budget,
    pack_bits,
    registry,
    select_keys,
    sparse_residual,
    token_sparse_attention,
    unpack_bits,
)
from mc_sparse.kernels.pooling.reference import pool_cells

OP = "token_sparse_attention"
WAN_720, WAN_480, SHAPE = (40, (21, 45, 80), 128), (40, (21, 30, 52), 128), (16, (32, 32, 32), 64)  # heads, grid, head dim
# Relative error of the sampled groups; on clustered data e4m3 is known to be far off.
LIMIT = {"int8": 3e-2, "fp8": 0.25, torch.bfloat16: 6e-3, torch.float16: 1e-3}
SAMPLED = 4


def inputs(kind: str, heads: int, length: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """q, k, v (1, H, S, D), views of (1, S, H, D) as most video models keep them.

    random: normal. clustered: 64 centres shared by q and k, in runs along the sequence: peaked attention.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, length, heads, dim, generator=generator, device="cuda") for _ in range(3))
    if kind == "clustered":
        centres = 1.5 * torch.randn(64, heads, dim, generator=generator, device="cuda")
        of = (torch.arange(length, device="cuda") * 256 // length) % 64
        for x in (q, k):
            x.mul_(0.7).add_(centres[of])
    return tuple(x.to(dtype).transpose(1, 2) for x in (q, k, v))


def demo_inputs(dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], tuple[int, int, int]]:
    """q, k, v (1, H, S, D) of a middle layer of the demo's trained model at its second step of four, and its token grid."""
    from mc_sparse.demo import model as demo
    from mc_sparse.demo import prompts
    from mc_sparse.mcsparse_core.diffusers_host import self_attention

    network = demo.load().to("cuda", torch.bfloat16)
    seen = []

    def record(block, q, k, v, mask):
        seen.append((q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)

    text = prompts.embedding(prompts.names()[0]).to("cuda", torch.bfloat16)
    with torch.inference_mode(), self_attention(network, record):
        demo.sample(Rounded(network), text, steps=4)
    return tuple(x.to(dtype) for x in seen[len(seen) * 3 // 8]), demo.token_grid()


class Rounded:
    """A model in bfloat16 for latents in float32."""

    def __init__(self, network):
        self.network = network

    def __call__(self, latents, time, text):
        return self.network(latents.to(text.dtype), time, text)


def random_selection(heads: int, length: int, density: float, cells: CellOrder, granularity: str) -> KeySelection:
    """Every group its own random keys: nothing that caches could gain from. Four heads' worth, repeated."""
    generator = torch.Generator("cuda").manual_seed(1)
    groups, budget = -(-length // 128), key_budget(density, length)
    units = length if granularity == "token" else -(-length // 32)
    chosen = budget if granularity == "token" else -(-budget // 32)
    some = []
    for _ in range(min(4, heads)):
        heaviest = torch.rand(groups, units, generator=generator, device="cuda").topk(chosen, dim=1, sorted=False).indices
        some.append(pack_bits(torch.zeros(groups, units, dtype=torch.bool, device="cuda").scatter_(1, heaviest, True)))
    bits = torch.stack(some).repeat(-(-heads // len(some)), 1, 1)[None, :heads].contiguous()
    sizes = cells.sizes(1 if granularity == "token" else 32)
    counts = torch.stack([(unpack_bits(head, units) * sizes).sum(-1) for head in bits[0]])[None].int()
    return KeySelection(bits, counts, torch.ones(counts.shape, device="cuda"), granularity, cells)


def random_groups(heads: int, length: int) -> QueryGroups:
    slack = torch.full((-length % 128,), -1, device="cuda")
    return QueryGroups(torch.stack([torch.cat([torch.randperm(length, device="cuda"), slack]) for _ in range(heads)])[None].int(), length)


def error(q, k, v, groups: QueryGroups, selection: KeySelection, tail: int, out: torch.Tensor) -> float:
    """Largest relative error of sampled groups against float32."""
    worst = 0.0
    heads, order = q.shape[1], groups.expanded(1, q.shape[1])
    for i in range(SAMPLED):
        h, g = i * (heads - 1) // (SAMPLED - 1), i * (groups.count - 1) // (SAMPLED - 1)
        rows = order[0, h, g * 128 : (g + 1) * 128].long()
        rows = rows[rows >= 0]
        per_bit = 1 if selection.granularity == "token" else 32
        chosen = unpack_bits(selection.bits[0, h, g], -(-k.shape[2] // per_bit)).repeat_interleave(per_bit)[: k.shape[2]]
        tokens = selection.cells.order[chosen]
        keys, values = k[0, h, tokens].float(), v[0, h, tokens].float()
        logits = q[0, h, rows].float() @ keys.T * q.shape[3] ** -0.5
        if tail:
            pooled: PooledTail = pool_cells(k[:, h : h + 1], v[:, h : h + 1], selection.cells, tail)
            left = torch.stack([(~cell).sum() for cell in chosen.split(tail)]).float()
            logits = torch.cat([logits, q[0, h, rows].float() @ pooled.k[0, 0].float().T * q.shape[3] ** -0.5 + left.log()], 1)
            values = torch.cat([values, pooled.v[0, 0].float()])
        worst = max(worst, harness.relative_error(out[0, h, rows], logits.softmax(1) @ values))
    return worst


def dense_error(q, k, v, out: torch.Tensor) -> float:
    """Largest relative error of some rows of sampled heads against float32 attention over all keys."""
    worst, heads = 0.0, q.shape[1]
    rows = torch.linspace(0, q.shape[2] - 1, 128, device=q.device).long()
    for h in {0, heads // 2, heads - 1}:
        logits = q[0, h, rows].float() @ k[0, h].float().T * q.shape[3] ** -0.5
        worst = max(worst, harness.relative_error(out[0, h, rows], logits.softmax(1) @ v[0, h].float()))
    return worst


def measure(q, k, v, grid, kinds: list[tuple], what: str, rounds: int, only: re.Pattern, others: bool = False) -> list[dict]:
    """Rows of one geometry, timed together with dense: ours for every (density, tail, granularity, grouping, residual, precision) of
    kinds and every backend, of which those that `only` finds in their names."""
    heads, length, dim = q.shape[1:]
    cells = cell_order(grid).to("cuda")
    geometry = Geometry.of(q, k)
    bf16 = [x.bfloat16() for x in (q, k, v)]  # its wheel has no float16, which would take as long
    base = "fa3"
    if registry.reasons("dense_attention", Geometry.of(*bf16[:2]))[base] is not None:
        base = registry.pick("dense_attention", Geometry.of(*bf16[:2])).NAME
    dense = {base: functools.partial(dense_attention, *bf16, backend=base)}
    cases, rows = dict(dense), {}
    common = {"dtype": str(q.dtype).removeprefix("torch."), "selection": what, "H": heads, "S": length, "D": dim}
    if others:
        for name, case in other_cases(q, k, v, only).items():
            cases[name] = case
    errors = {name: dense_error(q, k, v, output_of(case)) for name, case in cases.items() if not name.startswith("fa4 pages")}
    for density, tail, granularity, grouping, fmt, precision in kinds:
        able = [name for name, why in registry.reasons(OP, replace(geometry, precision=precision)).items() if why is None]
        names = {name: f"{name} {density} {tail} {granularity} {grouping} {fmt} {precision}" for name in able if name != registry.REFERENCE}
        names = {backend: name for backend, name in names.items() if only.search(name)}
        if not names:
            continue
        if what == "random":
            grouping = "random"
            groups, selection = random_groups(heads, length), random_selection(heads, length, density, cells, granularity)
        else:
            groups = group_queries(q, method=grouping, cells=cells)
            lse = dense_attention(q, k, v)[1]
            selection = select_keys(q, k, lse, groups, density=density, cells=cells, granularity=granularity)
        residual = None
        if fmt:
            output = dense_attention(q, k, v)[0]
            difference = sparse_residual(q, k, v, groups, selection, output, tail=tail or None, precision=precision)
            residual = compress_residual(difference, fmt)
        keys = selection.counts.float().mean().item()
        limit = LIMIT.get(precision) or LIMIT[q.dtype]
        for backend, name in names.items():
            same = {"tail": tail or None, "precision": precision, "backend": backend}
            run = functools.partial(token_sparse_attention, q, k, v, groups, selection, **same)
            found = run()
            wrong, errors[name] = error(q, k, v, groups, selection, tail, found), dense_error(q, k, v, found)
            if not wrong <= limit:
                raise SystemExit(f"{what} {name}: relative error {wrong:.2e}, allowed {limit}")
            cases[name] = functools.partial(run, residual=residual)
            executed = keys + (-(-length // tail) if tail else 0)
            rows[name] = {
                "backend": backend, **common, "granularity": granularity, "tail": tail, "grouping": grouping, "residual": fmt or "none",
                "precision": precision,
                "density": density, "realised_density": keys / length, "executed": executed / length, "error": wrong,
            }  # fmt: skip
    times = harness.interleaved(cases, rounds)
    dense_ms = times[base].ms
    out = []
    for name, (ms, spread) in times.items():
        row = rows.get(name) or {"backend": name, **common, "executed": OTHERS.get(name, 1.0)}
        row |= {"ms": ms, "spread": spread, f"{base}_ms": dense_ms, "efficiency": row["executed"] * dense_ms / ms}
        row |= {"error": row.get("error", errors.get(name)), "dense_error": errors.get(name)}
        out.append(row)
        print(
            f"{what} {heads}x{length}x{dim} {row['dtype']} {name}: {ms:.2f} ms (+-{spread:.2f}), efficiency {row['efficiency']:.3f}, "
            f"error {row['error'] or math.nan:.2e}, from dense {row['dense_error'] or math.nan:.2e}"
        )
    return out


OTHERS: dict[str, float] = {}  # executed share of the others' cases


def output_of(case) -> torch.Tensor:
    found = case()
    return found[0] if isinstance(found, tuple) else found


def other_cases(q, k, v, only: re.Pattern) -> dict:
    """Attention of others that is installed here and takes this geometry; what it leaves out of the work is to its favour."""
    cases = {}
    heads, length, dim = q.shape[1:]
    geometry = Geometry.of(q, k)
    for name in ("fa4", "cudnn", "torch"):
        if registry.reasons("dense_attention", geometry).get(name, "no such backend") is None:
            cases[f"{name} dense"] = functools.partial(dense_attention, q, k, v, backend=name)
            OTHERS[f"{name} dense"] = 1.0
    if dim == 128 and importlib.util.find_spec("comfy_kitchen"):
        for share in (0.10, 0.15, 0.30):
            name = f"sol_attn int8 {share}"
            cases[name] = functools.partial(sol_attn, q, k, v, share)
            OTHERS[name] = -(-share * (length / 64) // 1) * 64 / length
    if importlib.util.find_spec("comfy_kitchen"):
        cases["comfy_kitchen int8 dense"] = functools.partial(kitchen_int8, q, k, v)
    if importlib.util.find_spec("sageattention"):
        cases["sageattention dense"] = functools.partial(sage, q, k, v)
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
        for share in (0.10, 0.15):
            name = f"fa4 pages of 1 {share}"
            cases[name], OTHERS[name] = fa4_pages(q, k, v, share)
    return {name: case for name, case in cases.items() if only.search(name) and runs(name, case)}


def sol_attn(q, k, v, share: float) -> torch.Tensor:
    """ComfyUI's block-sparse attention in int8, which also pools what it leaves out."""
    import comfy_kitchen

    return comfy_kitchen.sol_attn(*(x.transpose(1, 2) for x in (q, k, v)), topk_ratio=share).transpose(1, 2)


def kitchen_int8(q, k, v) -> torch.Tensor:
    import comfy_kitchen

    return comfy_kitchen.int8_attention(q, k, v)


def sage(q, k, v) -> torch.Tensor:
    import sageattention

    return sageattention.sageattn(q, k, v, tensor_layout="HND")


def fa4_pages(q, k, v, share: float):
    """FlashAttention-4 with pages of one key: sorted random keys for each group; gathering Q and scattering O are not counted."""
    from flash_attn.cute import flash_attn_varlen_func

    heads, length, dim = q.shape[1:]
    groups, keys = -(-length // 128), key_budget(share, length)
    rows = heads * groups
    pages = torch.empty((heads, groups, keys), dtype=torch.int32, device="cuda")
    for h in range(heads):
        pages[h] = torch.rand(groups, length, device="cuda").topk(keys, dim=1).indices.sort(1).values + h * length
    queries = torch.randn(rows * 128, 1, dim, device="cuda", dtype=q.dtype)
    k_pages, v_pages = (x[0].reshape(heads * length, 1, 1, dim) for x in (k, v))
    starts = torch.arange(0, rows * 128 + 1, 128, device="cuda", dtype=torch.int32)
    used = torch.full((rows,), keys, device="cuda", dtype=torch.int32)
    call = functools.partial(
        flash_attn_varlen_func, queries, k_pages, v_pages, cu_seqlens_q=starts, max_seqlen_q=128, seqused_k=used,
        page_table=pages.view(rows, keys),
    )  # fmt: skip
    return call, keys / length


def runs(name: str, case) -> bool:
    try:
        case()
        torch.cuda.synchronize()
        return True
    except Exception as reason:  # the packages of others fail in many ways; a baseline that does not run is no result
        print(f"{name} does not run here: {str(reason).splitlines()[0][:200] if str(reason) else type(reason).__name__}")
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="one geometry, few rounds")
    parser.add_argument("--only", default="", help="regular expression: cases in whose names it is found, as printed, beside dense")
    parser.add_argument("--data", default="", help="some of random,clustered,fp16,sizes,demo: what is measured, all by default")
    args = parser.parse_args()
    harness.need_gpu()
    only, data = re.compile(args.only), set(args.data.split(",")) - {""}
    rounds = 3 if args.quick else 5
    bf16, fp16 = torch.bfloat16, torch.float16
    plain = [(d, t, "token", "random", None, "half") for d in (0.10, 0.15, 0.20, 0.30) for t in (64, 0)]
    low = [(d, 64, "token", "random", None, precision) for d in (0.10, 0.15, 0.30) for precision in ("int8", "fp8")]
    whole = [(d, 64, "cell32", "random", None, precision) for precision in ("half", "int8") for d in (0.15, 0.10, 0.30)]
    rows = []
    heads, grid, dim = WAN_720
    length = grid[0] * grid[1] * grid[2]
    if not data or "random" in data:
        kinds = plain[:2] + low[:2] if args.quick else plain + low + whole
        rows += measure(*inputs("random", heads, length, dim, bf16), grid, kinds, "random", rounds, only, others=True)
    parts = set() if args.quick else data or {"clustered", "fp16", "sizes", "demo"}
    cells = [(0.10, 64, "token", "cells", "rank-8"), (0.10, 64, "token", "cells", None), (0.15, 64, "token", "pddp", "int4"),
             (0.10, 32, "cell32", "cells", "rank-8")]  # fmt: skip
    cells = [(*kind, "half") for kind in cells] + [(*kind, precision) for kind in cells[:2] for precision in ("int8", "fp8")]
    if "clustered" in parts:
        rows += measure(*inputs("clustered", heads, length, dim, bf16), grid, cells, "clustered", rounds, only, others=True)
    if "fp16" in parts:
        rows += measure(*inputs("random", heads, length, dim, fp16), grid, plain[:4:2] + low[2:3], "random", rounds, only)
    if "sizes" in parts:
        for heads, grid, dim in (WAN_480, SHAPE):
            length = grid[0] * grid[1] * grid[2]
            rows += measure(*inputs("random", heads, length, dim, bf16), grid, plain[:4:2] + low[::2] + whole[::3], "random", rounds, only)
    if "demo" in parts:
        qkv, grid = demo_inputs(bf16)
        rows += measure(*qkv, grid, [kind for kind in cells if kind[:4] == cells[0][:4]], "demo", rounds, only, others=True)
    if args.out:
        harness.write(args.out, rows)


if __name__ == "__main__":
    main()
