"""run.py as a newcomer meets it."""
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments, cwd=ROOT, script=ROOT / "run.py"):
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, cwd=cwd, check=False)


def test_usage():
    for arguments, code in (((), 2), (("dance",), 2), (("--help",), 0)):
        done = run(*arguments)
        assert done.returncode == code and "run.py demo" in done.stdout and not done.stderr


def test_doctor_uses_the_python_at_hand_and_installs_nothing(tmp_path):
    # A copy with a space in its path and no .venv, called from elsewhere.
    folder = tmp_path / "a folder" / "pack"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "tests", "demo", "build"))
    done = run("doctor", cwd=tmp_path, script=folder / "run.py")
    assert done.returncode == 0, done.stderr
    assert "cpu, head dim 128, float32: sparse" in done.stdout and sys.executable in done.stdout
    assert "token_sparse_attention in int8: reference\n" in done.stdout and "token_sparse_attention in fp8: reference\n" in done.stdout
    assert not (folder / ".venv").exists()


def test_doctor_without_pytorch_says_so_and_installs_nothing(tmp_path):
    folder = tmp_path / "pack"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "tests", "demo", "build"))
    python = Path(sys.base_prefix, "python.exe" if sys.platform == "win32" else f"bin/python{sys.version_info[0]}.{sys.version_info[1]}")
    done = subprocess.run([python, "-I", "-S", folder / "run.py", "doctor"], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1 and "run this with ComfyUI's Python" in done.stdout, done.stderr
    assert not (folder / ".venv").exists()


def test_doctor_with_nonsense_in_the_environment(monkeypatch, capsys):
    from mc_sparse.doctor import comfyui_folders

    for value in ("/nonexistent", "~nosuchuser/x", "x" * 5000):
        monkeypatch.setenv("COMFYUI_PATH", value)
        assert comfyui_folders() == []


def test_demo_refuses_what_it_cannot_do(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for arguments, words in (
        (("--steps", "3"), "--steps is 3"), (("--seed", "-1"), "--seed is -1"), (("--seed", "9" * 30), "--seed is"),
        (("--out", str(file)), "a file; name a folder"), (("--prompt", "a cat"), "invalid choice"),
        (("--precision", "int4"), "choose from"),
    ):  # fmt: skip
        code = f"import sys; from mc_sparse.cli import main; sys.exit(main(['demo', *{list(arguments)!r}]))"
        done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 2 and words in done.stderr, done.stderr
