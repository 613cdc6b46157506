#!/usr/bin/env python3
"""One command for a fresh clone: makes .venv, installs what is needed and runs.

    python3 run.py demo      one clip, dense and sparse side by side
    python3 run.py test      the whole test suite
    python3 run.py doctor    what this machine can run, and why not; installs nothing

Needs only Python 3.10 or newer with venv. PyTorch is taken from the Python that runs this, if it has it; without, doctor reports on .venv
if that is there.
"""
import hashlib
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENV = ROOT / ".venv"
BIN = ENV / ("Scripts" if os.name == "nt" else "bin")
TORCH = "torch==2.13.0"
TRITON = "triton==3.6.0"  # for tests where PyTorch brings none: its CPU builds
COMMANDS = ("demo", "test", "doctor")


def main() -> int:
    if sys.version_info < (3, 10):
        print(f"MC-Sparse needs Python 3.10 or newer; this is {sys.version.split()[0]} ({sys.executable}).")
        return 2
    command, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if command not in COMMANDS:
        print(__doc__)
        return 0 if command in ("-h", "--help") else 2
    has_torch = importlib.util.find_spec("torch") is not None
    if command == "doctor":  # of the Python at hand, ComfyUI's perhaps
        there = not has_torch and Path(sys.prefix).resolve() != ENV and _runs("import torch")
        return subprocess.call([BIN / "python", __file__, command]) if there else doctor()
    try:
        set_up(command, has_torch)
    except (subprocess.CalledProcessError, OSError) as e:
        print(f"\nSetting up {ENV} failed: {e}. The lines above say why; delete the folder to start anew.")
        return 1
    # Waiting threads spin for microseconds, then sleep: where other programs share the cores, longer spinning stalls every small operation
    # (2 cores, one of them busy: sparse attention 50 ms instead of 80; idle cores: 26 instead of 25).
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
    if command == "test":
        return test(arguments)
    run_cli = "import sys; from mc_sparse.cli import main; sys.exit(main())"
    return subprocess.call([BIN / "python", "-I", "-c", run_cli, command, *arguments])


def doctor() -> int:
    """The report, without installing the package: this folder becomes `mc_sparse`."""
    spec = importlib.util.spec_from_file_location("mc_sparse", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]
    sys.modules["mc_sparse"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    return importlib.import_module("mc_sparse.doctor").main()


def set_up(extra: str, has_torch: bool):
    """Makes .venv and installs the package with an extra, unless that was done for this pyproject.toml."""
    stamp = ENV / f".mc-sparse-{extra}"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest() + f" {ROOT}"
    works = _runs("import pip")
    if works and stamp.exists() and stamp.read_text() == wanted:
        return
    if not works:
        if ENV.is_symlink() or ENV.is_file():
            ENV.unlink()
        shutil.rmtree(ENV, ignore_errors=True)  # cut off while it was made, moved, or of a Python that is gone
        print(f"Making {ENV}" + (" over this Python's PyTorch" if has_torch else ""), flush=True)
        venv.create(ENV, with_pip=True, system_site_packages=has_torch, symlinks=os.name != "nt")
        if has_torch and sys.prefix != sys.base_prefix:  # a venv of a venv sees the base Python only
            folder = subprocess.check_output([BIN / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
            Path(folder.strip(), "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [BIN / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if not _runs("import torch"):
        print(f"Installing {TORCH} (the largest part)", flush=True)
        subprocess.run([*pip, TORCH], check=True)
    if extra == "test" and sys.platform == "linux" and not _runs("import triton"):
        subprocess.run([*pip, TRITON], check=True)
    print(f"Installing MC-Sparse for {extra}", flush=True)
    subprocess.run([*pip, "--editable", f"{ROOT}[{extra}]"], check=True)
    stamp.write_text(wanted)


def _runs(code: str) -> bool:
    """True if .venv is there and its Python runs this."""
    try:
        return subprocess.call([BIN / "python", "-c", code], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def test(arguments: list) -> int:
    """Lint, then every test; ComfyUI tests run where a ComfyUI is found (COMFYUI_PATH, COMFYUI_PYTHON).

    Without arguments those of the Triton kernels follow in an interpreter on the CPU, which a process has from its start or not at all.
    """
    lint = subprocess.call([BIN / "ruff", "check", "."], cwd=ROOT)
    failed = subprocess.call([BIN / "python", "-m", "pytest", *arguments], cwd=ROOT)
    interpreted = 0 if arguments else interpreted_tests()
    return failed or interpreted or lint


def interpreted_tests() -> int:
    if not _runs("import triton"):
        print("NOT TESTED: the Triton kernels in the interpreter, for Triton cannot be imported here")
        return 0
    print("\nThe Triton kernels in the interpreter", flush=True)
    files = sorted(ROOT.glob("tests/kernels/test_triton_*.py"))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.call([BIN / "python", "-m", "pytest", *files], cwd=ROOT, env=environment)


if __name__ == "__main__":
    sys.exit(main())
