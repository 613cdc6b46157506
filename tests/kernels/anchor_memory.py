"""Peak memory of one anchor step on the CPU (Linux), as JSON: `python anchor_memory.py TOKENS HEADS`.

extra_mb: above what the process had before (torch and the package imported). peak_mb: of the whole process.
"""
import json
import re
import sys
import time
from pathlib import Path

import torch

from mc_sparse.kernels import (
    cell_order,
    compress_residual,
    dense_attention,
    group_queries,
    select_keys,
    sparse_residual,
)


def peak_mb():
    # Not getrusage: its maximum includes the parent's memory at the moment of the fork.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) / 1024


def main(tokens, heads):
    before = peak_mb()
    start = time.perf_counter()
    q, k, v = torch.randn(3, 1, heads, tokens, 128, generator=torch.Generator().manual_seed(0))
    cells = cell_order(None, after=tokens)
    dense, lse = dense_attention(q, k, v)
    groups = group_queries(q)
    selection = select_keys(q, k, lse, groups, density=0.25, cells=cells)
    residual = compress_residual(sparse_residual(q, k, v, groups, selection, dense, tail=64), "rank-8")
    kept = selection.nbytes + groups.nbytes + residual.nbytes
    seconds = time.perf_counter() - start
    print(json.dumps({"peak_mb": peak_mb(), "extra_mb": peak_mb() - before, "kept_mb": kept / 2**20, "seconds": seconds}))


main(*map(int, sys.argv[1:]))
