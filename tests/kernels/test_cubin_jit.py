"""Hopper kernels compiled where they run: when, what is kept, and what happens when it fails."""
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import torch

from mc_sparse.kernels import Geometry, cubin, cubin_build, cubin_jit, registry
from mc_sparse.kernels.attention import cute_sm90
from mc_sparse.kernels.selection import cute_sm90 as selection

HOPPER = Geometry(1, 2, 300, 300, 128, torch.bfloat16, "cuda", (9, 0))
NAME = "rows_bf16_d64"
SHIPPED = cute_sm90.CUBINS / NAME


@pytest.fixture(autouse=True)
def asked(monkeypatch, tmp_path):
    """As with MC_SPARSE_JIT=1 and an empty cache folder, and a compiler of that version."""
    monkeypatch.setenv("MC_SPARSE_JIT", "1")
    monkeypatch.setenv("LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cubin_jit, "_version", lambda: "4.8.1")
    monkeypatch.setattr(cubin_jit, "failures", {})


@pytest.fixture
def builder(monkeypatch, tmp_path):
    """builder(code): a program in the compiler's place. It has `name` and `folder`."""

    def builder(code):
        path = tmp_path / "builder.py"
        path.write_text(f"import sys\nfrom pathlib import Path\nname, folder = sys.argv[1], Path(sys.argv[2])\n{code}\n")
        monkeypatch.setattr(cubin_jit, "BUILDER", path)

    return builder


@pytest.fixture
def loaded(monkeypatch):
    """Kernels are loaded from these paths, for there is no driver here; those in `refused` are not."""
    paths, refused = [], []

    def load(path):
        paths.append(path)
        if path.parent in refused:
            raise RuntimeError("loading: the image is invalid (200)")
        return path

    monkeypatch.setattr(cubin, "Kernel", load)
    monkeypatch.setattr(cubin, "driver", lambda: None)
    cubin.kernel.cache_clear()
    yield paths, refused
    cubin.kernel.cache_clear()


WRITES = """
(folder / f"{name}.cubin").write_bytes(b"code")
(folder / f"{name}.json").write_text("{}")
"""


def test_only_on_request_and_with_the_compiler(monkeypatch, loaded):
    for value in ("", "0", "false", "OFF"):
        monkeypatch.setenv("MC_SPARSE_JIT", value)
        assert "MC_SPARSE_JIT=1 is not set" in cubin_jit.why_not()
    monkeypatch.setenv("MC_SPARSE_JIT", "1")
    assert cubin_jit.why_not() is None
    monkeypatch.setattr(cubin_jit, "_version", lambda: None)
    assert cubin_jit.why_not() == "MC_SPARSE_JIT is set, but nvidia-cutlass-dsl is not installed"
    assert cubin.kernel(SHIPPED, 0) == SHIPPED and registry.demotions() == ()


def test_a_kernel_is_compiled_once_and_kept(builder, loaded, caplog):
    caplog.set_level(logging.INFO)
    builder(WRITES)
    path = cubin.kernel(SHIPPED, 0)
    assert path.name == NAME and path.is_relative_to(cubin_jit.folder())
    assert path.with_suffix(".cubin").read_bytes() == b"code" and path.with_suffix(".json").exists()
    assert f"compiling kernel {NAME} with nvidia-cutlass-dsl 4.8.1" in caplog.text and len(caplog.records) == 2
    cubin.kernel.cache_clear()  # as in another process
    assert cubin.kernel(SHIPPED, 1) == path and len(caplog.records) == 2
    assert [child.name for child in cubin_jit.folder().iterdir()] == [path.parent.name]  # nothing else is left
    assert registry.demotions() == ()


def test_what_is_kept_is_of_the_sources_and_the_compiler(builder, monkeypatch):
    builder(WRITES)
    before = cubin_jit.compiled(NAME)
    monkeypatch.setattr(cubin_jit, "_version", lambda: "4.9.0")
    newer = cubin_jit.compiled(NAME)
    assert newer != before and newer.with_suffix(".json").exists()
    changed = cubin_build.SOURCES["rows"]._replace(text=lambda: "other code")
    monkeypatch.setitem(cubin_build.SOURCES, "rows", changed)
    assert cubin_jit.compiled(NAME) not in (before, newer)


@pytest.mark.parametrize(
    "code, reason",
    [
        (WRITES + "sys.exit('no more memory')", "compiling it failed (no more memory)"),
        ("raise ImportError('DLL load failed')", "compiling it failed (ImportError: DLL load failed)"),
        ("import time; time.sleep(60)", "took more than 0.5 s"),
    ],
)
def test_a_failure_leaves_the_shipped_kernel_and_says_why(code, reason, builder, loaded, monkeypatch, caplog):
    builder(code)
    if "0.5" in reason:
        monkeypatch.setattr(cubin_jit, "SECONDS", 0.5)
    assert cubin.kernel(SHIPPED, 0) == SHIPPED and cubin.kernel(SHIPPED, 1) == SHIPPED
    assert reason in cubin_jit.failures[NAME] and caplog.text.count(reason) == 1
    assert list(cubin_jit.folder().iterdir()) == []
    (found,) = registry.demotions()
    assert found[:2] == (NAME, "jit") and reason in found.why


def test_a_kernel_that_the_driver_refuses_leaves_the_shipped_one(builder, loaded):
    builder(WRITES)
    paths, refused = loaded
    refused.append(cubin_jit.compiled(NAME).parent)
    assert cubin.kernel(SHIPPED, 0) == SHIPPED and len(paths) == 2
    assert "the image is invalid" in cubin_jit.failures[NAME]


def test_another_process_that_was_first_is_no_failure(builder):
    sums = "import hashlib; (folder / f'{name}.sum').write_text(hashlib.sha256(b'code{}').hexdigest())\n"
    builder(WRITES + sums + "import shutil; shutil.copytree(folder, folder.parent.parent / 'first')")
    first = cubin_jit.folder() / "first"
    cubin_jit._compile(NAME, first)
    assert (first / f"{NAME}.json").exists() and [child.name for child in cubin_jit.folder().iterdir()] == ["first"]


@pytest.mark.parametrize("ending, content", [(".cubin", b"co"), (".cubin", b""), (".json", b"{"), (".json", None), (".sum", None)])
def test_what_was_damaged_is_compiled_again(ending, content, builder):
    builder(WRITES)
    path = cubin_jit.compiled(NAME)
    file = path.with_suffix(ending)
    file.unlink() if content is None else file.write_bytes(content)
    assert cubin_jit.compiled(NAME) == path and path.with_suffix(".cubin").read_bytes() == b"code"
    assert path.with_suffix(".json").read_bytes() == b"{}" and path.with_suffix(".sum").exists()
    assert [child.name for child in cubin_jit.folder().iterdir()] == [path.parent.name]


def test_a_compiler_that_leaves_nothing_is_asked_again(builder, loaded):
    builder("")
    assert cubin.kernel(SHIPPED, 0) == SHIPPED and list(cubin_jit.folder().iterdir()) == []
    builder(WRITES)
    cubin_jit.failures.clear()  # as in another process
    assert cubin_jit.compiled(NAME).with_suffix(".cubin").read_bytes() == b"code"


@pytest.mark.parametrize("program", ["", "/opt/Application/app"])
def test_a_program_that_is_no_python_is_not_run_again(program, builder, loaded, monkeypatch):
    builder(WRITES)
    monkeypatch.setattr(sys, "executable", program)
    assert cubin.kernel(SHIPPED, 0) == SHIPPED and "needs a Python to run in" in cubin_jit.failures[NAME]


@pytest.mark.parametrize("cut", [0, 63, 3000, 1])
def test_half_a_cubin_is_none(cut):
    whole = SHIPPED.with_suffix(".cubin").read_bytes()
    assert cubin_build._is_whole(whole) and not cubin_build._is_whole(whole[: cut if cut != 1 else -1])


def test_without_shipped_files_those_that_are_made_here_will_do(loaded, monkeypatch, tmp_path):
    for module in (cute_sm90, selection):
        monkeypatch.setattr(module, "CUBINS", tmp_path)
        assert module.why_not(HOPPER) is None
        monkeypatch.setattr(cubin_jit, "failures", dict.fromkeys(("sparse_bf16_d128_n144_s2", "mass_bf16_d128_s4"), "why"))
        assert "lacks its compiled kernel's" in module.why_not(HOPPER)
        monkeypatch.setattr(cubin_jit, "failures", {})


def test_the_doctor_says_which_kernels_run(monkeypatch):
    from mc_sparse.doctor import _hopper_kernels

    assert "compiled here" in _hopper_kernels() and str(cubin_jit.folder()) in _hopper_kernels()
    monkeypatch.setattr(cubin_jit, "_version", lambda: None)
    assert _hopper_kernels().startswith("as shipped") and "nvidia-cutlass-dsl is not installed" in _hopper_kernels()


def test_without_the_compiler_its_absence_is_the_reason(loaded):
    """The real builder."""
    if importlib.util.find_spec("cutlass"):
        pytest.skip("nvidia-cutlass-dsl is installed")
    assert cubin.kernel(SHIPPED, 0) == SHIPPED
    assert "No module named 'cutlass'" in cubin_jit.failures[NAME]


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("name", [NAME, "mass_fp16_d64_s8"])
def test_the_compiler_makes_what_is_shipped(name):
    path, shipped = cubin_jit.compiled(name), next(Path(cubin_build.KERNELS).glob(f"*/cubins/{name}.json"))
    mine, theirs = (json.loads(file.read_text(encoding="utf-8")) for file in (path.with_suffix(".json"), shipped))
    for facts in (mine, theirs):
        del facts["ptxas"], facts["cutlass_dsl"]
    assert mine == theirs and path.with_suffix(".cubin").read_bytes()[:4] == b"\x7fELF"
    assert "cutlass" not in sys.modules
