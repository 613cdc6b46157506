"""Choosing a backend: first that can, or the named one, with every reason in words; and letting go of one that is wrong or fails."""
import logging
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mc_sparse.kernels import (
    BackendUnavailable,
    Geometry,
    backend_names,
    cell_order,
    compress_residual,
    dense_attention,
    group_queries,
    pick,
    pool_cells,
    registry,
    select_keys,
    selfcheck,
    sparse_residual,
    token_sparse_attention,
    why_none,
)
from mc_sparse.kernels.attention import reference, torch_dense
from mc_sparse.kernels.registry import Candidate, candidates
from mc_sparse.kernels.testing import KINDS, make_qkv

CPU = Geometry(1, 2, 300, 300, 64, torch.float32, "cpu")
CUDA = Geometry(1, 2, 300, 300, 64, torch.bfloat16, "cuda", (9, 0))
OPS = ["group_queries", "pool_cells", "dense_attention", "select_keys", "token_sparse_attention"]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """The registry without what earlier tests found out, and with the reference and torch alone."""
    own = {op: tuple(c for c in listed if c.name in ("reference", "torch")) for op, listed in registry._CANDIDATES.items()}
    monkeypatch.setattr(registry, "_CANDIDATES", own)
    monkeypatch.setattr(registry, "_verified", set())
    monkeypatch.setattr(registry, "_demoted", {})


ALL = dict(registry._CANDIDATES)  # as they are for users


@pytest.fixture
def with_fast(monkeypatch):
    """A backend "fast" of token_sparse_attention that takes head dim 64 only, and "gone" whose package is missing."""
    fast = SimpleNamespace(NAME="fast", why_not=lambda g: None if g.head_dim == 64 else f"takes head dim 64, not {g.head_dim}")
    monkeypatch.setitem(sys.modules, "mc_sparse.kernels.attention.fast", fast)
    table = dict(registry._CANDIDATES)
    table["token_sparse_attention"] = (
        Candidate("gone", "._missing_third_party"), Candidate("fast", ".attention.fast"), *table["token_sparse_attention"],
    )
    monkeypatch.setattr(registry, "_CANDIDATES", table)
    real = registry.import_module

    def importing(name, package):
        if name == "._missing_third_party":
            raise ModuleNotFoundError("No module named 'gone_package'", name="gone_package")
        return real(name, package)

    monkeypatch.setattr(registry, "import_module", importing)
    registry.load.cache_clear()
    yield fast
    registry.load.cache_clear()


@pytest.mark.parametrize("op", OPS)
def test_every_candidate_keeps_its_promises(op, monkeypatch):
    monkeypatch.setattr(registry, "_CANDIDATES", ALL)
    for candidate in candidates(op):
        module, reason = registry.load(candidate.module)
        if module is None:  # a package that is not installed here
            assert reason and candidate.name not in ("reference", "torch")
            continue
        assert candidate.name == module.NAME
        assert callable(getattr(module, op))
        for geometry in (CPU, CUDA):
            reason = module.why_not(geometry)
            assert reason is None or isinstance(reason, str)
    assert candidates(op)[-1].name == "reference" and pick(op, CPU, "reference").why_not(CPU) is None


def test_before_hopper_cudnn_is_asked_after_pytorch_flash(monkeypatch):
    monkeypatch.setattr(registry, "_CANDIDATES", ALL)
    names = {cap: [c.name for c in candidates("dense_attention", cap)] for cap in ((8, 6), (9, 0), (12, 0), None)}
    assert names[9, 0] == names[12, 0] == names[None] == ["fa3", "fa4", "cudnn", "flash-attn", "torch", "reference"]
    assert names[8, 6] == ["fa3", "fa4", "flash-attn", "torch", "reference", "cudnn"]


def test_auto_on_the_cpu():
    assert why_none(CPU) is None
    assert pick("token_sparse_attention", CPU).NAME == "reference"
    assert pick("dense_attention", CPU).NAME == "torch"


@pytest.mark.parametrize("op", ["select_keys", "token_sparse_attention"])
def test_the_reference_of_large_operations_is_never_automatic_on_a_gpu_but_runs_by_name(op):
    with pytest.raises(BackendUnavailable, match="ask for it by name"):
        pick(op, CUDA)
    assert pick(op, CUDA, "reference").NAME == "reference"
    assert "no backend of select_keys" in why_none(CUDA) and "cuda sm_90" in why_none(CUDA)


@pytest.mark.parametrize("op", ["group_queries", "pool_cells"])
def test_the_reference_of_small_operations_is_the_last_resort_on_a_gpu(op, register):
    assert pick(op, CUDA).NAME == "reference"
    with pytest.raises(BackendUnavailable, match="too slow to be chosen by itself on mps"):
        pick(op, Geometry(1, 2, 300, 300, 64, torch.bfloat16, "mps"))
    register(op, "swift", lambda *args: None)
    assert pick(op, CUDA).NAME == "swift"


def test_first_that_can(with_fast):
    assert pick("token_sparse_attention", CPU) is with_fast
    odd = Geometry(1, 2, 300, 300, 96, torch.float32, "cpu")
    assert pick("token_sparse_attention", odd).NAME == "reference"
    assert backend_names() == ("auto", "reference", "gone", "fast")


def test_a_named_backend_that_cannot_run_raises_with_every_reason(with_fast):
    odd = Geometry(1, 2, 300, 300, 96, torch.float32, "cpu")
    with pytest.raises(BackendUnavailable) as error:
        pick("token_sparse_attention", odd, "fast")
    reasons = ["fast: takes head dim 64, not 96", "gone: No module named 'gone_package'", "reference: can run"]
    for part in ("backend 'fast' cannot run", *reasons):
        assert part in str(error.value)
    with pytest.raises(BackendUnavailable, match="gone_package"):
        pick("token_sparse_attention", CPU, "gone")


def test_a_name_that_only_other_operations_have_is_auto(with_fast):
    assert pick("pool_cells", CPU, "fast").NAME == "reference"
    with pytest.raises(BackendUnavailable, match="ask for it by name"):
        pick("select_keys", CUDA, "fast")


@pytest.mark.parametrize("op", OPS)
def test_an_unknown_name_raises(op):
    with pytest.raises(ValueError, match="there is no backend 'turbo'; choose one of auto, reference"):
        pick(op, CPU, "turbo")


def test_a_missing_module_of_our_own_is_a_bug():
    registry.load.cache_clear()
    with pytest.raises(ModuleNotFoundError):
        registry.load(".attention.does_not_exist")


@pytest.mark.parametrize(
    "geometry, reason",
    [
        (Geometry(1, 1, 9, 9, 64, torch.float64, "cuda", (9, 0)), "takes float32, bfloat16 and float16"),
        (Geometry(1, 1, 9, 9, 60, torch.float16, "cuda", (9, 0)), "multiples of 8"),
        (Geometry(1, 1, 9, 9, 64, torch.float16, "cuda", (7, 5)), "compute capability 8.0"),
        (Geometry(1, 1, 9, 9, 64, torch.float16, "mps"), "on mps"),
    ],
)
def test_fused_dense_attention_says_what_it_lacks(geometry, reason):
    assert reason in torch_dense.why_not(geometry)


# Results that are wrong, and failures. The backends are small modules in front of the reference.


@pytest.fixture
def register(monkeypatch):
    """register(op, name, function): a backend of that name, asked first."""

    def add(op, name, function, why_not=lambda geometry: None):
        relative = f"._{name}_{op}"
        module = ModuleType(f"mc_sparse.kernels{relative}")
        module.NAME, module.why_not = name, why_not
        setattr(module, op, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(registry._CANDIDATES, op, (Candidate(name, relative), *registry._CANDIDATES[op]))
        registry.load.cache_clear()

    yield add
    registry.load.cache_clear()


def wrong_scale(q, k, v, scale):
    return reference.dense_attention(q, k, v, 1.2 * scale)


def sparse_case(length=300):
    q, k, v = make_qkv(1, 2, length, 32, dtype=torch.bfloat16)
    cells = cell_order(None, before=length)
    out, lse = dense_attention(q, k, v, backend="reference")
    groups = group_queries(q)
    selection = select_keys(q, k, lse, groups, density=0.4, cells=cells)
    r = sparse_residual(q, k, v, groups, selection, out, backend="reference")
    return q, k, v, groups, selection, compress_residual(r, "bf16")


def test_a_wrong_result_is_replaced_and_the_backend_not_asked_again(register, caplog):
    calls = []

    def wrong(*args):
        calls.append(args)
        return wrong_scale(*args)

    register("dense_attention", "swift", wrong)
    q, k, v = make_qkv(dtype=torch.bfloat16)
    expected = dense_attention(q, k, v, backend="torch")
    for _ in range(2):
        for found, truth in zip(dense_attention(q, k, v), expected, strict=True):
            assert torch.equal(found, truth)
    assert len(calls) == 1
    assert [r.levelno for r in caplog.records] == [logging.WARNING] and "swift" in caplog.text and "output rows differ" in caplog.text
    (demotion,) = registry.demotions()
    assert demotion[:2] == ("dense_attention", "swift") and "300 queries x 300 keys, head dim 64, bfloat16, cpu" in demotion.geometry

    geometry = Geometry.of(q, k)
    assert registry.reasons("dense_attention", geometry)["swift"].startswith("was demoted: output rows differ")
    assert pick("dense_attention", geometry).NAME == "torch"
    assert registry.reasons("dense_attention", CPU)["swift"] is None  # float32: another class
    longer = make_qkv(length=700, dtype=torch.bfloat16)
    dense_attention(*longer)
    assert len(calls) == 2 and len(registry.demotions()) == 2


def test_a_wrong_backend_by_name_raises(register):
    register("dense_attention", "swift", wrong_scale)
    q, k, v = make_qkv()
    for _ in range(2):  # at once, and when it is known
        with pytest.raises(BackendUnavailable, match="swift: was demoted: output rows differ.*torch: can run"):
            dense_attention(q, k, v, backend="swift")


def test_a_missing_residual_and_swapped_keys_are_found(register):
    q, k, v, groups, selection, residual = sparse_case()
    expected = token_sparse_attention(q, k, v, groups, selection, residual=residual, backend="reference")
    register("token_sparse_attention", "forgetful", lambda *a: reference.token_sparse_attention(*a[:6], None, *a[7:]))
    assert torch.equal(token_sparse_attention(q, k, v, groups, selection, residual=residual), expected)

    def swapped(q, k, *rest):
        k = k.clone()
        k[:, :, [3, 170]] = k[:, :, [170, 3]] * 3
        return reference.token_sparse_attention(q, k, *rest)

    register("token_sparse_attention", "swapping", swapped)
    assert torch.equal(token_sparse_attention(q, k, v, groups, selection, residual=residual), expected)
    assert [d.backend for d in registry.demotions()] == ["forgetful", "swapping"]


def test_a_right_backend_is_checked_once_for_each_class_and_variant(register, monkeypatch):
    register("token_sparse_attention", "right", reference.token_sparse_attention)
    checks = []
    real = selfcheck.check

    def counted(*args):
        checks.append(args[0])
        return real(*args)

    monkeypatch.setattr(selfcheck, "check", counted)
    q, k, v, groups, selection, residual = sparse_case()
    for _ in range(3):
        token_sparse_attention(q, k, v, groups, selection)
    assert len(checks) == 1
    for _ in range(2):
        token_sparse_attention(q, k, v, groups, selection, residual=residual)
        token_sparse_attention(q, k, v, groups, selection, return_lse=True)
        token_sparse_attention(*(torch.cat([t, t], 1) for t in (q, k, v)), *[sparse_twice(x) for x in (groups, selection)])
    assert len(checks) == 3 and registry.demotions() == ()
    token_sparse_attention(q, k, v, groups, selection, backend="reference")  # the definition itself
    assert len(checks) == 3


def sparse_twice(x):
    """Groups or a selection of twice the heads."""
    fields = {n: torch.cat([t, t], 1) for n, t in vars(x).items() if torch.is_tensor(t)}
    return type(x)(**{**vars(x), **fields})


@pytest.mark.parametrize("kind", KINDS)
def test_peaked_data_and_outliers_never_demote_a_right_backend(register, kind):
    for op in OPS:
        register(op, "right", getattr(registry.load(registry._CANDIDATES[op][-1].module)[0], op))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q, k, v = make_qkv(2, 3, 300, 48, kind=kind, dtype=dtype, layout="bshd", nan_slack=3)
        cells = cell_order((3, 9, 11), before=3)
        out, lse = dense_attention(q, k, v)
        groups = group_queries(q)
        for granularity in ("token", "cell32"):
            selection = select_keys(q, k, lse, groups, density=0.3, cells=cells, granularity=granularity, kept=((0, 3),))
            tail = pool_cells(k, v, cells, 32)
            residual = compress_residual(sparse_residual(q, k, v, groups, selection, out, tail=tail), "int4")
            token_sparse_attention(q, k, v, groups, selection, tail=tail, residual=residual, return_lse=True)
    assert registry.demotions() == () and {key[1] for key in registry._verified} == {"right"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_leave_a_backend_unchecked(register, value):
    register("dense_attention", "right", reference.dense_attention)
    q, k, v = make_qkv()
    v[0, 0, 7, 3] = value
    dense_attention(q, k, v)
    assert registry.demotions() == () and not registry._verified
    register("dense_attention", "swift", wrong_scale)
    dense_attention(q, k, v)  # nothing can be said of it yet
    assert registry.demotions() == ()
    dense_attention(q, k, v.nan_to_num(0, 0, 0))
    assert [d.backend for d in registry.demotions()] == ["swift"]


FAILURES = [RuntimeError("no kernel image"), NotImplementedError("head dim"), ImportError("libcudart"), AssertionError(), TypeError("word")]


@pytest.mark.parametrize("error", FAILURES)
def test_a_failure_is_a_demotion(register, error):
    fails = []

    def fail(q, k, v, scale):
        fails.append(1)
        raise error

    register("dense_attention", "frail", fail)
    q, k, v = make_qkv()
    expected = dense_attention(q, k, v, backend="torch")
    assert torch.equal(dense_attention(q, k, v)[0], expected[0]) and torch.equal(dense_attention(q, k, v)[0], expected[0])
    assert len(fails) == 1 and registry.demotions()[0].why == f"{type(error).__name__}: {str(error) or 'no message'}"
    register("dense_attention", "frail2", fail)
    with pytest.raises(BackendUnavailable, match="frail2: was demoted") as raised:
        dense_attention(q, k, v, backend="frail2")
    assert raised.value.__cause__ is error


def test_a_failure_on_a_later_call_is_a_demotion_too(register):
    calls = []

    def second(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("compilation failed\n" + 100 * "a long story\n")
        return reference.dense_attention(*args)

    register("dense_attention", "frail", second)
    q, k, v = make_qkv()
    for _ in range(4):
        assert dense_attention(q, k, v)[0].isfinite().all()
    assert len(calls) == 2 and registry.demotions()[0].why == "RuntimeError: compilation failed"


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate"), MemoryError(), KeyboardInterrupt(), SystemExit(),
    ],
)  # fmt: skip
def test_no_memory_and_interrupts_pass_through(register, error):
    def fail(*args):
        raise error

    register("dense_attention", "heavy", fail)
    for request in ("auto", "heavy"):
        with pytest.raises(type(error)) as raised:
            dense_attention(*make_qkv(), backend=request)
        assert raised.value is error
    assert registry.demotions() == ()


NO_MEMORY = ("Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", 'torch_call_dispatcher( "aten::new_empty"')


@pytest.mark.parametrize("text", NO_MEMORY)
def test_hosts_know_no_memory_by_its_class(register, text):
    def fail(*args):
        raise RuntimeError(text)

    register("dense_attention", "heavy", fail)
    for request in ("auto", "heavy"):
        with pytest.raises(torch.cuda.OutOfMemoryError) as raised:
            dense_attention(*make_qkv(), backend=request)
        assert str(raised.value.__cause__) == text
    assert registry.demotions() == ()


@pytest.mark.parametrize("text", ["CUDA error: an illegal memory access was encountered", "CUDA error: unspecified launch failure"])
def test_a_lost_device_is_said_with_the_backends_name(register, text):
    def fail(*args):
        raise RuntimeError(text)

    register("dense_attention", "wild", fail)
    with pytest.raises(RuntimeError, match="dense_attention: the GPU stopped while backend wild ran.*Restart") as raised:
        dense_attention(*make_qkv())
    assert str(raised.value.__cause__) == text and registry.demotions() == ()


def test_a_bug_of_the_reference_surfaces(monkeypatch):
    def broken(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(reference, "dense_attention", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        dense_attention(*make_qkv(), backend="reference")
    assert registry.demotions() == ()


def test_the_last_backend_demoted_is_a_reason_for_every_later_question(register, monkeypatch):
    register("pool_cells", "swift", lambda k, v, cells, size: None)
    monkeypatch.setitem(registry._CANDIDATES, "pool_cells", registry._CANDIDATES["pool_cells"][:1])
    q, k, v = make_qkv()
    assert why_none(Geometry.of(k, k)) is None
    with pytest.raises(BackendUnavailable, match="pool_cells: no backend can run .*swift: was demoted: AttributeError"):
        pool_cells(k, v, cell_order(None, before=300), 32)
    assert "no backend of pool_cells" in why_none(Geometry.of(k, k)) and "was demoted" in why_none(Geometry.of(k, k))


def test_threads_demote_once_and_all_get_the_next_backends_result(register, caplog):
    together = threading.Barrier(6)

    def wrong(*args):
        together.wait(10)  # every thread holds a wrong result before any is checked
        return wrong_scale(*args)

    register("dense_attention", "swift", wrong)
    q, k, v = make_qkv()
    expected = dense_attention(q, k, v, backend="torch")[0]
    found = [None] * 6

    def run(i):
        found[i] = dense_attention(q, k, v)[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert all(torch.equal(f, expected) for f in found)
    assert len(registry.demotions()) == 1 and len(caplog.records) == 1


def test_threads_check_a_class_once(register, monkeypatch):
    together = threading.Barrier(6)

    def right(*args):
        together.wait(10)
        return reference.dense_attention(*args)

    register("dense_attention", "right", right)
    checks, real = [], selfcheck.check
    monkeypatch.setattr(selfcheck, "check", lambda *a: (checks.append(1), real(*a))[1])
    threads = [threading.Thread(target=dense_attention, args=make_qkv()) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert checks == [1] and len(registry._verified) == 1


# Packages in any state, in a process of their own.

ROOT = Path(__file__).resolve().parents[2]
QUESTION = """
import torch
from mc_sparse.kernels import Geometry, cell_order, cubin, dense_attention, group_queries, registry
from mc_sparse.kernels.selection import cute_sm90, select_keys_lagged
cubin.driver = lambda: None  # as if it were here
for capability in (8, 6), (9, 0):
    geometry = Geometry(1, 2, 300, 300, 64, torch.bfloat16, "cuda", capability)
    for op in registry.operations():
        for name, reason in registry.reasons(op, geometry).items():
            print(op, capability, name, reason)
    print("why none:", capability, registry.why_none(geometry))
print("around the masses:", cute_sm90.steps(geometry).__name__)
q, k, v = torch.randn(3, 1, 2, 300, 64)
lse = dense_attention(q, k, v)[1]
select_keys_lagged(q, k, v, lse, group_queries(q), density=0.5, cells=cell_order(None, after=300))
from mc_sparse.doctor import main
main()
"""


def answers(folder, *preamble):
    code = "\n".join([f"import sys; sys.path.insert(0, {str(folder)!r})", *preamble, QUESTION])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "line, reason",
    [
        ("raise RuntimeError('0 active drivers')", "RuntimeError: 0 active drivers"),
        ("raise OSError('libtriton.so: cannot open shared object file')", "OSError: libtriton.so"),
        ("raise ImportError('DLL load failed')", "DLL load failed"),
        ("import a_package_that_is_not_there", "No module named 'a_package_that_is_not_there'"),
        ("", "cannot import name|No module named|has no attribute"),
    ],
)
def test_broken_packages_are_reasons(tmp_path, line, reason):
    for package in ("triton", "flash_attn", "fa3_fwd_interface"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(line + "\n")
    out = answers(tmp_path)
    kernels = ("select_keys", "triton"), ("token_sparse_attention", "triton")
    for op, name in (*kernels, ("dense_attention", "fa3"), ("dense_attention", "fa4"), ("dense_attention", "flash-attn")):
        (found,) = [text for text in out.splitlines() if text.startswith(f"{op} (9, 0) {name} ")]
        assert any(part in found for part in reason.split("|")), found
    assert "Triton: does not load" in out


def test_no_triton_is_a_reason(tmp_path):
    out = answers(tmp_path, "sys.modules['triton'] = None")
    assert "select_keys (9, 0) triton import of triton halted" in out
    assert "token_sparse_attention (9, 0) triton import of triton halted" in out and "Triton: does not load (ModuleNotFoundError" in out
    for op in OPS:
        fast = {"group_queries": "reference", "pool_cells": "reference", "dense_attention": "torch"}.get(op, "hopper")
        assert f"{op} (9, 0) {fast} None" in out
    assert "why none: (9, 0) None" in out and "why none: (8, 6) no backend of select_keys can run" in out
    assert "around the masses: mc_sparse.kernels.selection.torch_steps" in out and "keys chosen with PyTorch: slower anchors" in out


def test_an_old_triton_is_a_reason(tmp_path):
    triton = pytest.importorskip("triton")
    package = Path(triton.__file__).parent
    (tmp_path / "triton").mkdir()
    for part in package.iterdir():
        if part.name not in ("__init__.py", "__pycache__"):
            (tmp_path / "triton" / part.name).symlink_to(part)
    text = (package / "__init__.py").read_text().replace(f"__version__ = '{triton.__version__}'", "__version__ = '3.1.0'")
    assert "3.1.0" in text
    text += "\ndef jit(fn=None, *, do_not_specialize=None):\n    return fn or jit\n"  # it knows fewer options
    (tmp_path / "triton" / "__init__.py").write_text(text)
    out = answers(tmp_path)
    for name in ("select_keys (9, 0) triton", "token_sparse_attention (8, 6) triton", "token_sparse_attention (9, 0) triton"):
        assert f"{name} needs Triton 3.2 or newer, this is 3.1.0" in out
    assert "Triton: 3.1.0, compiled kernels in" in out


def test_a_bug_of_our_own_at_import_surfaces(tmp_path):
    folder = tmp_path / "mc_sparse"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "tests", "demo", "build", "benchmarks", "web", "workflows"))
    module = folder / "kernels" / "attention" / "flash_attn2.py"
    for line in ("undefined_name", "from ..shapes import NoSuchShape", "from .. import shapes; shapes.no_such_function()", "1 / 0"):
        module.write_text(f"from torch import Tensor\n{line}\n")
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{QUESTION}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode != 0 and str(module) in done.stderr, (line, done.stderr)
