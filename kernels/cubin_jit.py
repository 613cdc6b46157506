"""Hopper kernels compiled where they run, instead of those that ship: with MC_SPARSE_JIT=1 and nvidia-cutlass-dsl installed.

The compiler runs in a process of its own, for it sets environment variables and its packages are large. What it made is kept in the user's
cache folder, by the device sources and the compiler's version.
"""
from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from threading import Lock

from . import cubin_build

VARIABLE = "MC_SPARSE_JIT"
PACKAGE = "nvidia-cutlass-dsl"
BUILDER = Path(cubin_build.__file__)
SECONDS = 600  # after which a compilation is given up
failures: dict[str, str] = {}  # kernels that could not be compiled or loaded, with the reason: the ones that ship are used
_lock = Lock()
_log = logging.getLogger(__name__)


def why_not() -> str | None:
    """None where kernels are compiled here, else why not."""
    if os.environ.get(VARIABLE, "").lower() in ("", "0", "false", "no", "off"):
        return f"{VARIABLE}=1 is not set"
    return None if _version() else f"{VARIABLE} is set, but {PACKAGE} is not installed"


def makes(name: str) -> bool:
    """Whether this kernel is to be compiled here."""
    return name not in failures and why_not() is None


def gave_up(name: str, error: Exception) -> None:
    """Remembers why a kernel could not be compiled or loaded."""
    failures[name] = f"{error}; the one that ships is used"
    _log.warning("MC-Sparse: kernel %s: %s", name, failures[name])


def compiled(name: str) -> Path:
    """The path without ending of a kernel that was compiled here, now if it was not before. Raises RuntimeError or OSError."""
    path = folder() / _key(name) / name
    with _lock:
        if not _is_whole(path):
            _compile(name, path.parent)
    return path


def folder() -> Path:
    """Where compiled kernels are kept."""
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mc-sparse" / "cubins"


def _compile(name: str, to: Path) -> None:
    """The kernel in a folder `to`, in place of one there that is not whole."""
    if "python" not in Path(sys.executable or "").name.lower():
        raise RuntimeError(f"the compiler needs a Python to run in, and this program is {sys.executable or 'unknown'}")
    _log.info("MC-Sparse: compiling kernel %s with %s %s, once", name, PACKAGE, _version())
    began = time.perf_counter()
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as scratch:
        made = Path(scratch, "made")
        made.mkdir()
        try:
            command = [sys.executable, BUILDER, name, made]
            done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"compiling it took more than {SECONDS} s") from error
        if done.returncode:
            words = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise RuntimeError(f"compiling it failed ({words[-1][:300]})")
        (made / f"{name}.sum").write_text(_sum(made / name), encoding="ascii")
        try:
            if to.exists() and not _is_whole(to / name):
                to.rename(Path(scratch, "broken"))
            made.rename(to)
        except OSError:
            if not _is_whole(to / name):  # else another process was first
                raise
    _log.info("MC-Sparse: compiled kernel %s in %.0f s", name, time.perf_counter() - began)


def _is_whole(path: Path) -> bool:
    """Whether a kernel is kept at this path without ending as it was made."""
    try:
        return path.with_suffix(".sum").read_text(encoding="ascii") == _sum(path)
    except (OSError, ValueError):
        return False


def _sum(path: Path) -> str:
    """Of a kernel's two files."""
    return hashlib.sha256(b"".join(path.with_suffix(ending).read_bytes() for ending in (".cubin", ".json"))).hexdigest()


def _key(name: str) -> str:
    sources = "".join(source.text() for source in cubin_build.SOURCES.values()) + BUILDER.read_text(encoding="utf-8")
    return hashlib.sha256(f"{name} {_version()} {sources}".encode()).hexdigest()[:32]


@cache
def _version() -> str | None:
    """Of the compiler, None without one."""
    try:
        return importlib.metadata.version(PACKAGE)
    except Exception:  # not there, or a broken installation
        return None
