"""The compile tests again with the newest Triton there is: users have whichever their PyTorch brings.

It is put into a folder of pytest's cache (190 MB, once per release), not into the environment.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def pip_install(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps", "--only-binary", ":all:"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=300)


def last_line(text):
    return (text.strip().splitlines() or ["no message"])[-1][:200]


@pytest.fixture(scope="module")
def newest(request):
    """(version, folder to put first on the path)."""
    found = pip_install("--dry-run", "--ignore-installed", "--report", "-", "triton")
    if found.returncode:
        pytest.skip(f"NOT TESTED with the newest Triton: pip finds none ({last_line(found.stderr)})")
    version = json.loads(found.stdout)["install"][0]["metadata"]["version"]
    folder = Path(request.config.cache.mkdir("triton"), version)
    if not (folder / "complete").exists():
        made = pip_install("--upgrade", "--target", str(folder), f"triton=={version}")
        if made.returncode:
            pytest.skip(f"NOT TESTED with Triton {version}: pip cannot install it ({last_line(made.stderr)})")
        (folder / "complete").touch()
    return version, folder


def test_kernels_compile_with_the_newest_triton(newest):
    version, folder = newest
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    used = subprocess.check_output([sys.executable, "-c", "import triton; print(triton.__version__)"], env=environment, text=True)
    assert used.strip() == version
    # Two at a time: the one of the attention, and all others. sm_86 and sm_89 have the code of sm_80 and the launches of sm_120, so one
    # Triton is enough for them.
    tests = sorted(FOLDER.glob("test_compile_*.py"))
    parts = [[t for t in tests if (t.stem == "test_compile_attention") == of_attention] for of_attention in (True, False)]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-k", "not 86 and not 89 and not one_model"]
    streams = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    runs = [subprocess.Popen([*command, *map(str, part)], cwd=ROOT, env=environment, **streams) for part in parts]
    said = [run.communicate()[0] for run in runs]
    for run, text in zip(runs, said, strict=True):
        assert run.returncode == 0 and " passed" in text, text
