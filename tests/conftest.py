"""Keeps our folders off `sys.path`, finds ComfyUI, and skips what this machine cannot run."""
import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# As top-level names our `nodes` and `kernels` would shadow ComfyUI's and Hugging Face's.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]


@pytest.fixture(scope="session")
def script():
    """script(path): a file that is run by its path, such as those of benchmarks/ and scripts/, as a module; path from the root."""

    def load(path: str):
        spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def comfyui_checkouts() -> list[Path]:
    """ComfyUI folders, as `doctor` finds them."""
    from mc_sparse.doctor import comfyui_folders

    return comfyui_folders()


def comfyui_python() -> Path | None:
    """Interpreter that runs ComfyUI: COMFYUI_PYTHON, else ~/venv-comfy."""
    path = Path(os.environ.get("COMFYUI_PYTHON") or Path.home() / "venv-comfy" / "bin" / "python").expanduser()
    return path if path.is_file() else None


def why_no_comfyui() -> str | None:
    if not comfyui_checkouts():
        return "NOT TESTED in ComfyUI: no checkout found; set COMFYUI_PATH"
    if comfyui_python() is None:
        return "NOT TESTED in ComfyUI: no interpreter found; set COMFYUI_PYTHON to one that has ComfyUI's requirements"
    return None


def pytest_collection_modifyitems(items):
    no_comfyui, no_gpu = why_no_comfyui(), None
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        no_gpu = None if torch.cuda.is_available() else "needs a CUDA device"
    for item in items:
        if no_comfyui and item.get_closest_marker("comfy"):
            item.add_marker(pytest.mark.skip(reason=no_comfyui))
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=no_gpu))


def pytest_terminal_summary(terminalreporter):
    if any("NOT TESTED in ComfyUI" in str(r.longrepr) for r in terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(why_no_comfyui() or "", yellow=True)
