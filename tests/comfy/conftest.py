"""Runs scenario groups in real ComfyUI processes, once per version and group, and hands out what they observed."""
import importlib.util
import json
import os
import subprocess
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


@pytest.fixture(scope="session")
def python():
    return discovery.comfyui_python()


@pytest.fixture(scope="session")
def observed(comfyui, python, tmp_path_factory):
    """observed(group) -> {scenario: what it observed}; each group runs once per version."""
    done = {}

    def run(group: str) -> dict:
        if group not in done:
            work = tmp_path_factory.mktemp(f"{comfyui.name}-{group}")
            out = work / "out.json"
            environment = os.environ | {"LAB_COMFYUI": str(comfyui), "LAB_WORK": str(work), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
            process = subprocess.run(
                [python, HERE / "driver.py", group, out], env=environment, capture_output=True, text=True, timeout=600, cwd=work
            )
            if not out.exists():
                pytest.fail(f"group {group} in {comfyui.name} ended with {process.returncode}:\n{process.stderr[-4000:]}")
            done[group] = json.loads(out.read_text())
        return done[group]

    return run


@pytest.fixture
def scene(observed):
    """scene(group, name) -> what that scenario observed; fails with its traceback if it raised."""

    def get(group: str, name: str) -> dict:
        result = observed(group)[name]
        if isinstance(result, dict) and "error" in result:
            pytest.fail(result["error"])
        return result

    return get
