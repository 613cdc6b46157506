"""Runs scenario groups in real ComfyUI processes, once per version and group, and hands out what they observed."""
import importlib.util
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("discovery", HERE.parent / "conftest.py")
discovery = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(discovery)


def pytest_generate_tests(metafunc):
    if "comfyui" in metafunc.fixturenames:
        checkouts = discovery.comfyui_checkouts() or [None]
        metafunc.parametrize("comfyui", checkouts, ids=[p.name if p else "none" for p in checkouts], scope="session")


@pytest.fixture
def version(comfyui) -> tuple[int, ...]:
    """Of the ComfyUI under test."""
    text = (comfyui / "comfyui_version.py").read_text().split('"')[1]
    return tuple(int(part) for part in text.split("."))


@pytest.fixture(scope="session")
def python():
    return discovery.comfyui_python()


@pytest.fixture(scope="session")
def processes(request, python, tmp_path_factory):
    """{(checkout, group): future of what it observed}: all groups that this test run needs, two processes at a time."""
    wanted = dict.fromkeys((item.callspec.params["comfyui"], item.module.GROUP) for item in request.session.items if _uses_group(item))
    pool = ThreadPoolExecutor(2)
    yield {key: pool.submit(_observe, *key, python, tmp_path_factory.mktemp(f"{key[0].name}-{key[1]}")) for key in wanted}
    pool.shutdown(cancel_futures=True)


def _uses_group(item) -> bool:
    return hasattr(getattr(item, "module", None), "GROUP") and "comfyui" in getattr(getattr(item, "callspec", None), "params", {})


def _observe(comfyui: Path, group: str, python: Path, work: Path) -> dict:
    out = work / "out.json"
    environment = os.environ | {"LAB_COMFYUI": str(comfyui), "LAB_WORK": str(work), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [python, HERE / "driver.py", group, out]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd=work)
    if not out.exists():
        raise RuntimeError(f"group {group} in {comfyui.name} ended with {process.returncode}:\n{process.stderr[-4000:]}")
    return json.loads(out.read_text())


@pytest.fixture
def scene(comfyui, processes, request):
    """scene(name) -> what that scenario of this module's GROUP observed; fails with its traceback if it raised."""

    def get(name: str) -> dict:
        result = processes[comfyui, request.module.GROUP].result()[name]
        if "Traceback" in str(result.get("error")):
            pytest.fail(result["error"])
        return result

    return get
