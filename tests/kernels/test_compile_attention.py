"""The sparse attention compiled as it is launched on every supported card, and how many kernels one model can ask for.

Launches are recorded: the host code runs on CPU tensors as on a card, and what it would launch is kept instead of run.
"""
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from mc_sparse.kernels import (
    FORMATS,
    Geometry,
    KeySelection,
    QueryGroups,
    cell_order,
    compress_residual,
    pack_bits,
)
from mc_sparse.kernels.testing import make_qkv
from mc_sparse.mcsparse_core.plan import TAILS

pytest.importorskip("triton")
from triton.compiler.compiler import GPUTarget, make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from mc_sparse.kernels.attention import triton_sparse  # noqa: E402
from mc_sparse.kernels.grouping import triton_pddp  # noqa: E402
from mc_sparse.kernels.pooling import triton_pool  # noqa: E402
from mc_sparse.kernels.selection import triton_select  # noqa: E402
from mc_sparse.kernels.triton_compile import SHARED_LIMIT, TARGETS, compile_for  # noqa: E402
from mc_sparse.kernels.triton_support import INTERPRETED, VERSION  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels cannot be compiled")

MOST_KERNELS = 40  # of one head dim and dtype: at 1 to 2 s each, the price of trying every option of the plan
LONG = 2 * triton_pddp.FUSED_ROWS + 100  # tokens: the grouping begins with the kernels of large nodes


@dataclass(frozen=True)
class Launched:
    """One kernel with the types and constants that Triton would compile it for; equal ones share a compiled kernel."""

    kernel: JITFunction
    types: tuple[tuple[str, str], ...]  # as compile_for wants them
    constants: tuple[tuple[str, object], ...]
    options: tuple[tuple[str, int], ...]

    def compile(self, target, **changed):
        options = dict(self.options)
        constants = dict(self.constants) | changed
        warps, stages = options.pop("num_warps", 4), options.pop("num_stages", 3)  # Triton's defaults
        return compile_for(target, self.kernel, dict(self.types), constants, warps, stages, **options)


class Recorder:
    """Distinct launches, in order, of everything that was called since it was made."""

    def __init__(self, target):
        self.backend, self.found = make_backend(GPUTarget("cuda", target, 32)), {}

    def run(self, kernel, *args, grid, warmup, **kwargs):
        """In place of JITFunction.run: the same types, constants and alignments by Triton's own rules."""
        bound, special, options = create_function_from_signature(kernel.signature, kernel.params, self.backend)(*args, **kwargs)
        types, constants = {}, {}
        for name, (kind, fact) in zip(bound, special, strict=True):
            if kind == "constexpr":
                constants[name] = bound[name]
            else:
                types[name] = f"{kind}:16" if fact == "D" else kind
        self.found[Launched(kernel, *(tuple(x.items()) for x in (types, constants, options)))] = None


@pytest.fixture(scope="module")
def record():
    """record(target, call): the distinct launches of call() on a card of that capability."""
    with pytest.MonkeyPatch.context() as patch:
        real = Geometry.of

        def record(target, call):
            recorder = Recorder(target)
            patch.setattr(Geometry, "of", lambda *args: replace(real(*args), capability=divmod(target, 10)))
            patch.setattr(JITFunction, "run", lambda kernel, *args, **kwargs: recorder.run(kernel, *args, **kwargs))
            call()
            patch.undo()
            return list(recorder.found)

        yield record


def inputs(dim, dtype=torch.bfloat16, length=300, layout="bshd", granularity="token"):
    """q, k, v, groups and a selection of a third of the keys."""
    q, k, v = make_qkv(1, 2, length, dim, dtype=dtype, layout=layout)
    order = torch.nn.functional.pad(torch.arange(length, dtype=torch.int32), (0, -length % 128), value=-1).expand(1, 2, -1)
    cells = cell_order(None, after=length)
    sizes = cells.sizes(1 if granularity == "token" else 32)
    mask = (torch.arange(len(sizes)) % 3 == 0).expand(1, 2, order.shape[2] // 128, -1)
    counts = (mask * sizes).sum(-1, dtype=torch.int32)
    return q, k, v, QueryGroups(order, length), KeySelection(pack_bits(mask), counts, torch.ones(counts.shape), granularity, cells)


def attention(dim, epilogue="none", dtype=torch.bfloat16, tail=64, precision="half", **geometry):
    """Calls the backend; epilogue: a residual's format, "difference" or "none"."""
    q, k, v, groups, selection = inputs(dim, dtype, **geometry)
    dense = q if epilogue == "difference" else None
    residual = None
    if epilogue not in ("none", "difference"):
        residual = compress_residual(torch.ones((1, 2, groups.order.shape[2], dim), dtype=dtype), epilogue)
    triton_sparse.token_sparse_attention(q, k, v, groups, selection, tail, residual, 0.125, dense is None, dense, precision)


# ---- what the compiler makes of it

EPILOGUES = ("none", "bf16", "fp8", "int4", "int2", "rank-8", "difference")
# Every end of the kernel on a card of each kind, every head dim on every card; float16 runs with a maximum only.
CASES = [(target, 128, end, torch.bfloat16, "half") for target in (80, 90, 120) for end in EPILOGUES]
CASES += [(target, 128, end, torch.bfloat16, "half") for target in (86, 89) for end in ("none", "int4")]
CASES += [(target, dim, "none", torch.bfloat16, "half") for target in TARGETS for dim in (64, 256)]
CASES += [(target, 128, "none", torch.float16, "half") for target in TARGETS]
# Low precision has all ends in one kernel but on Hopper.
CASES += [(target, 128, "none", torch.bfloat16, low) for target in TARGETS for low in ("int8", "fp8") if low == "int8" or target >= 89]
CASES += [(target, dim, "none", torch.bfloat16, "int8") for target in TARGETS for dim in (64, 256)]
CASES += [(90, 128, end, torch.bfloat16, "int8") for end in ("int4", "rank-8", "difference")]
CASES += [(target, 128, "none", torch.float16, "int8") for target in (80, 90, 120)]
PRODUCTS = {"int8": "IMMA|IGMMA", "fp8": "QMMA|QGMMA"}


@pytest.fixture(scope="module")
def compiled(record):
    """(target, dim, epilogue, dtype, precision) -> {is it the online one: (launch, future of its report)}; two at a time are compiled."""
    kernels = {}
    with ThreadPoolExecutor(2) as pool:
        for case in CASES:
            target, dim, end, dtype, precision = case
            found = record(target, lambda: attention(dim, end, dtype, precision=precision))  # noqa: B023
            by = {dict(x.constants)["ONLINE"]: x for x in found if x.kernel is triton_sparse.attend}
            if end != "none" and dtype == torch.bfloat16:
                by.pop(True)  # the one of "none"
            kernels[case] = {online: (x, pool.submit(x.compile, target)) for online, x in by.items()}
        yield kernels
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("target, dim, end, dtype, precision", CASES)
def test_kernels_fit_every_card(target, dim, end, dtype, precision, compiled):
    """Shared memory suffices, loads are asynchronous and 16 bytes wide, products run on tensor cores; no spills up to a head dim of 128.

    On Hopper a program of 4 warps has all 255 registers and spills some, but next to nothing in the loop. What has all ends and a running
    maximum may spill outside of the loop.
    """
    kernels = compiled[target, dim, end, dtype, precision]
    assert kernels
    for online, (launched, future) in kernels.items():
        report = future.result()
        what = f"online {online}, {dict(launched.options)}, {report.registers} registers"
        assert report.shared <= SHARED_LIMIT[target], what
        assert report.count(r"LDGSTS\S*128") > 0, what
        body = main_loop(report.sass)
        spills = sum("LDL" in line or "STL" in line for line in body)
        assert report.count("HGMMA" if target == 90 else "HMMA") > 0, what
        assert precision == "half" or any(re.search(PRODUCTS[precision], line) for line in body), what
        if dim <= 128 and target != 90:
            assert spills == 0 if dict(launched.constants)["EPILOGUE"] == triton_sparse.ANY and online else report.stack == 0, what
        assert spills <= 0.02 * len(body), what


def main_loop(sass):
    """Instructions of the smallest loop with matrix products."""
    lines = [(int(address, 16), text) for address, text in re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)]
    bodies = []
    for end, text in lines:
        to = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        if to and int(to[1], 16) <= end:
            body = [line for address, line in lines if int(to[1], 16) <= address <= end]
            bodies += [body] if any("MMA" in line for line in body) else []
    return min(bodies, key=len)


EVENTS = r"^\s*(?:(\$L\w+):|(@\S+ )?bra\S*\s+(\$L\w+)|(ret);|(cp\.async\.wait_group|wgmma\.mma_async|fence\.proxy\.async))"


def orders_copies(ptx):
    """Whether on every way from a wait for cp.async to a wgmma there is a fence.proxy.async, or another wait."""
    events = [m.groups() for m in re.finditer(EVENTS, ptx, re.M)]
    labels = {label: i for i, (label, *_) in enumerate(events) if label}
    waits = [i for i, event in enumerate(events) if event[4] == "cp.async.wait_group"]
    assert waits and any(event[4] == "wgmma.mma_async" for event in events)
    for wait in waits:
        seen, ahead = set(), [wait + 1]
        while ahead:
            at = ahead.pop()
            if at in seen or at == len(events):
                continue
            seen.add(at)
            _, condition, to, end, what = events[at]
            if what == "wgmma.mma_async":
                return False
            if to:
                ahead.append(labels[to])
            if not (what or end or (to and not condition)):
                ahead.append(at + 1)
    return True


@pytest.mark.parametrize("case", [c for c in CASES if c[0] == 90], ids=str)
def test_copies_are_ordered_before_products_on_hopper(case, compiled):
    """See kernels/triton_support.fence: without, results are wrong now and then."""
    for _, future in compiled[case].values():
        assert orders_copies(future.result().ptx)


@pytest.mark.skipif(VERSION >= (3, 7), reason="this Triton orders them by itself")
def test_that_order_is_not_there_without_the_fence(compiled):
    for launched, _ in compiled[90, 128, "none", torch.bfloat16, "half"].values():
        assert not orders_copies(launched.compile(90, FENCE=False).ptx)


# ---- how many


def every_option(dim, dtype, layout, precisions):
    """Everything that any plan makes these kernels compute for one model: every option, and lengths for which they take other ways."""
    for granularity in ("token", "cell32"):
        q, k, _, groups, selection = inputs(dim, dtype, LONG, layout, granularity)
        for kept in ((), ((0, 7),)):
            triton_select.select_keys(q, k, torch.zeros(q.shape[:3]), groups, 0.3, selection.cells, granularity, kept, 0.125)
    triton_pddp.group_queries(q)
    for length in (300, 640):
        for granularity in ("token", "cell32"):
            q, k, v, groups, selection = inputs(dim, dtype, length, layout, granularity)
            lse = torch.zeros(q.shape[:3])
            for density, kept in ((0.3, ()), (0.5, ((0, 7),))):
                triton_select.select_keys(q, k, lse, groups, density, selection.cells, granularity, kept, 0.125)
            for tail, one in itertools.product((tail or None for tail in TAILS), precisions):
                attention(dim, "none", dtype, tail, one, length=length, layout=layout, granularity=granularity)
                attention(dim, "difference", dtype, tail, one, length=length, layout=layout, granularity=granularity)
        for fmt, one in itertools.product(FORMATS, precisions):
            attention(dim, fmt, dtype, 64, one, length=length, layout=layout)
        for tail in filter(None, TAILS):
            triton_pool.pool_cells(k, v, selection.cells, tail)
        triton_pddp.group_queries(q)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("target", [90, 120])
@pytest.mark.parametrize("precision", ["half", "int8", "fp8"])
def test_one_model_compiles_few_kernels(precision, target, dtype, layout, record):
    """Of one head dim, dtype and precision, whatever the plans. Where a low one may be let go for half, that is compiled as well; on Hopper
    another backend has half."""
    together = {precision} if target == 90 else {"half", precision}
    found = record(target, lambda: every_option(128, dtype, layout, together))
    names = [x.kernel.__name__ for x in found]
    counts = {name: names.count(name) for name in names}
    assert {"attend", "mass_kernel", "heaviest_kernel"} < set(counts)
    assert len(found) <= MOST_KERNELS, counts
