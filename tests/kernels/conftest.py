"""The operations again, written as their definitions say, in float64 and without a thought for speed."""
import json
import math
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

# Triton kernels run on a GPU, or interpreted on the CPU in a process of their own (TRITON_INTERPRET=1; `run.py test` starts one).
collect_ignore_glob = [] if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" else ["test_triton_*.py"]


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """These tests are many small operations; on a shared machine a second thread makes them wait, not faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def dumped():
    """dumped(file, option): what cuobjdump, which Triton carries, says about a cubin."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return lambda file, option: subprocess.run([tool, option, file], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="session")
def parameter_places(dumped):
    """parameter_places(file): (ordinal, offset, size) of each parameter, as the cubin says and as the types in its facts lie."""
    sizes = {"p": 8, "i64": 8, "i32": 4, "f32": 4}

    def parameter_places(file):
        found = re.findall(r"Ordinal : (0x\w+)\s+Offset\s+: (0x\w+)\s+Size\s+: (0x\w+)", dumped(file, "--dump-elf"))
        found = sorted(tuple(int(number, 16) for number in one) for one in found)
        expected, offset = [], 0
        for ordinal, (_, kind) in enumerate(json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))["parameters"]):
            size = sizes[kind]
            offset = -(-offset // size) * size
            expected.append((ordinal, offset, size))
            offset += size
        return found, expected

    return parameter_places


def dense(q, k, v, scale=None):
    scores = q.double() @ k.double().mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v.double(), lse


def group_members(groups, batch, heads):
    """{(b, h, g): tensor of the group's query tokens}."""
    members = {}
    for b in range(batch):
        for h in range(heads):
            order = groups.order[b % groups.order.shape[0], h % groups.order.shape[1]]
            for g, group in enumerate(order.long().split(128)):
                members[b, h, g] = group[group >= 0]
    return members


def selected_tokens(selection):
    """(B, H, G, S) bool in token order, read from the bits by numpy."""
    words = selection.bits.numpy()
    units = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    if selection.granularity == "cell32":
        units = units.repeat(32, axis=-1)
    length = len(selection.cells)
    tokens = np.zeros((*units.shape[:-1], length), dtype=bool)
    tokens[..., selection.cells.order.numpy()] = units[..., :length]
    assert not units[..., length:].any() or selection.granularity == "cell32"
    return torch.from_numpy(tokens)


def mass(q, k, lse, groups, scale=None):
    """(B, H, G, S) float64 in token order."""
    batch, heads, length, dim = q.shape
    scores = q.double() @ k.double().mT * (dim**-0.5 if scale is None else scale)
    share = (scores - lse.double()[..., None]).exp()
    share[lse == -math.inf] = 0
    out = torch.zeros(batch, heads, -(-length // 128), k.shape[2], dtype=torch.float64)
    for (b, h, g), members in group_members(groups, batch, heads).items():
        out[b, h, g] = share[b, h, members].sum(0)
    return out


def sparse(q, k, v, groups, tokens, cells=None, size=None, scale=None, dtype=torch.float64):
    """Output and lse with the keys `tokens` (B, H, G, S) and, given cells and size, the pooled tail; all in dtype."""
    batch, heads, length, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    out = torch.zeros_like(q)
    lse = q.new_full(q.shape[:3], -math.inf)
    for (b, h, g), members in group_members(groups, batch, heads).items():
        chosen = tokens[b, h, g]
        keys, values, bias = [k[b, h, chosen]], [v[b, h, chosen]], [q.new_zeros(int(chosen.sum()))]
        for cell in cells.order.split(size) if size else ():
            unselected = int((~chosen[cell]).sum())
            if unselected:
                keys.append(k[b, h, cell].mean(0, keepdim=True))
                values.append(v[b, h, cell].mean(0, keepdim=True))
                bias.append(q.new_tensor([math.log(unselected)]))
        keys, values, bias = torch.cat(keys), torch.cat(values), torch.cat(bias)
        if len(keys):
            scores = q[b, h, members] @ keys.T * scale + bias
            lse[b, h, members] = scores.logsumexp(1)
            out[b, h, members] = scores.softmax(1) @ values
    return out, lse


@pytest.fixture(scope="session")
def definition():
    return SimpleNamespace(dense=dense, group_members=group_members, selected_tokens=selected_tokens, mass=mass, sparse=sparse)
