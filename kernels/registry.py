"""Which module computes an operation: the first candidate that says it can, or the one that was asked for by name.

A backend is a module with NAME, `why_not(geometry) -> str | None` (None: it can) and the operation's function. Modules are
imported when they are first considered; a third-party package that is missing or broken is a reason, not an error.
A module of the sparse attention that multiplies in more than half precision names them in PRECISIONS.

The first result of a backend for a class of geometries is checked (selfcheck.py). A backend that is wrong, or that fails, is
demoted for that operation and class as long as the process lives: a warning says so once, and `auto` goes on with the next.
"""
from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from importlib import import_module
from threading import Lock
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from . import cubin_jit
from .dtypes import exact
from .shapes import Geometry

AUTO = "auto"
REFERENCE = "reference"
SPARSE = "token_sparse_attention"
_log = logging.getLogger(__name__)


class Backend(Protocol):
    """What a backend module offers, beside the function named after the operation."""

    NAME: str

    def why_not(self, geometry: Geometry) -> str | None:
        """None when this backend can run `geometry`, else a sentence that says what it lacks."""


class BackendUnavailable(ValueError):
    """No backend, or not the named one, can run this geometry; the message lists every candidate with its reason."""


class Mismatch(Exception):
    """A backend's result is wrong; the text says in what."""


class Candidate(NamedTuple):
    name: str
    module: str  # relative to this package
    last_before: tuple[int, int] | None = None  # cards of a lower capability ask it last


class Demotion(NamedTuple):
    """A backend that will not be taken again for `op` at geometries like `geometry` (in words), and what it did."""

    op: str
    backend: str
    geometry: str
    why: str


# Fastest first. The reference comes last: `auto` takes it on the CPU, and of _PLAIN on CUDA devices too; by name it runs anywhere.
_CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "group_queries": (Candidate("triton", ".grouping.triton_pddp"), Candidate(REFERENCE, ".grouping.reference")),
    "pool_cells": (Candidate("triton", ".pooling.triton_pool"), Candidate(REFERENCE, ".pooling.reference")),
    "dense_attention": (
        Candidate("fa3", ".attention.fa3"),
        Candidate("fa4", ".attention.fa4"),
        Candidate("cudnn", ".attention.cudnn", last_before=(9, 0)),
        Candidate("flash-attn", ".attention.flash_attn2"),
        Candidate("torch", ".attention.torch_dense"),
        Candidate(REFERENCE, ".attention.reference"),
    ),
    "select_keys": (
        Candidate("hopper", ".selection.cute_sm90"),
        Candidate("triton", ".selection.triton_select"),
        Candidate(REFERENCE, ".selection.reference"),
    ),
    SPARSE: (
        Candidate("hopper", ".attention.cute_sm90"),
        Candidate("triton", ".attention.triton_sparse"),
        Candidate(REFERENCE, ".attention.reference"),
    ),
}

# Operations whose reference is a matter of some thousand launches on a GPU; they run at anchors only.
_PLAIN = frozenset({"group_queries", "pool_cells"})

# What was found out about backends on this machine, by _class. No tensors.
_verified: set[tuple] = set()
_demoted: dict[tuple, Demotion] = {}
_lock = Lock()

# Of an exception text: a failed allocation, and that the CUDA context is lost.
_OUT_OF_MEMORY = ("out of memory", "alloc_failed", '"aten::new_empty"', '"aten::empty"')
_FINAL_ERRORS = (
    "illegal memory access", "illegal_address", "illegal instruction", "illegal_instruction", "misaligned address", "misaligned_address",
    "launch failure", "launchfailure", "launch_failed", "launch timed out", "device-side assert", "invalid program counter",
)  # fmt: skip


def operations() -> tuple[str, ...]:
    """Every operation that has backends."""
    return tuple(_CANDIDATES)


def reasons(op: str, geometry: Geometry) -> dict[str, str | None]:
    """Each candidate of `op` with what keeps `auto` from it, None for those that can."""
    return {c.name: _why_not(op, c, geometry, by_name=False) for c in candidates(op, geometry.capability)}


def candidates(op: str, capability: tuple[int, int] | None = None) -> tuple[Candidate, ...]:
    """Backends of `op`, in the order in which `auto` asks them on a card of this capability."""
    return tuple(sorted(_CANDIDATES[op], key=lambda c: bool(capability and c.last_before and capability < c.last_before)))


def backend_names() -> tuple[str, ...]:
    """Every request a user can make: "auto", "reference", then the fast backends in order of preference.

    Backends of dense attention alone are not among them: it is exact in all of them, so `auto` decides.
    """
    fast = dict.fromkeys(c.name for op in _CANDIDATES if op != "dense_attention" for c in _CANDIDATES[op] if c.name != REFERENCE)
    return (AUTO, REFERENCE, *fast)


def call(op: str, geometry: Geometry, request: str, *args):
    """The result of `op` on args from the backend that `pick` names; from the next one where `auto` meets one that is wrong or fails.

    A named backend that is wrong or fails raises BackendUnavailable. Running out of memory is no fault of the backend and is raised
    as torch.cuda.OutOfMemoryError, whatever the backend raised; a CUDA error after which nothing can run on the device is raised with the
    backend's name.
    """
    while True:
        backend = pick(op, geometry, request)
        if _is_definition(backend.NAME, geometry) or _is_recording(geometry):
            return _run(backend, op, args)
        try:
            return _checked(backend, op, geometry, args)
        except Exception as error:
            if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
                raise
            if is_out_of_memory(error):  # hosts know it by its class
                raise torch.cuda.OutOfMemoryError(_first_line(error)) from error
            if _is_final(error):
                raise RuntimeError(
                    f"{op}: the GPU stopped while backend {backend.NAME} ran on {_words(geometry)} ({_first_line(error)}). "
                    "Restart the program; if it happens again, choose another backend"
                ) from error
            _demote(op, backend.NAME, geometry, error)
            if _is_named(op, request):
                raise BackendUnavailable(_unavailable(op, geometry, request)) from error


def pick(op: str, geometry: Geometry, request: str = AUTO) -> ModuleType:
    """The module that computes `op` for `geometry`.

    request "auto": the first candidate that can. A name: that backend, or BackendUnavailable. A name that other operations
    have but this one does not ("hopper" for pooling, say) is read as "auto" here.
    """
    named = _is_named(op, request)
    if not named and request not in backend_names():
        known = dict.fromkeys((*backend_names(), *(c.name for c in candidates(op))))
        raise BackendUnavailable(f"{op}: there is no backend {request!r}; choose one of {', '.join(known)}")
    for candidate in candidates(op, geometry.capability):
        if named and candidate.name != request:
            continue
        if _why_not(op, candidate, geometry, by_name=named) is None:
            return load(candidate.module)[0]
    raise BackendUnavailable(_unavailable(op, geometry, request))


def why_none(geometry: Geometry) -> str | None:
    """None when `auto` has a backend of every operation for this geometry, else a sentence naming the first that has none."""
    for op in _CANDIDATES:
        if why_not := _why_not_any(op, geometry):
            return f"no backend of {op} can run {_words(geometry)} ({why_not})"
    return None


def why_no_precision(geometry: Geometry, precision: str) -> str | None:
    """None when `auto` has a backend of the sparse attention for this geometry in a precision, else every backend's reason."""
    return _why_not_any(SPARSE, replace(geometry, precision=precision))


def _why_not_any(op: str, geometry: Geometry) -> str | None:
    if all(_why_not(op, c, geometry, by_name=False) for c in candidates(op)):
        return _reasons(op, geometry, by_name=False)
    return None


def demotions() -> tuple[Demotion, ...]:
    """What was demoted since the process began, oldest first; then the kernels that could not be compiled here (cubin_jit.py)."""
    with _lock:
        return *_demoted.values(), *(Demotion(name, "jit", "Hopper GPUs", why) for name, why in cubin_jit.failures.items())


def _class(op: str, name: str, geometry: Geometry) -> tuple:
    """Geometries that a backend computes alike: all but rows and heads, lengths within a factor of two."""
    g = geometry
    return op, name, g.dtype, g.head_dim, g.device_type, g.capability, g.precision, g.q_len.bit_length(), g.k_len.bit_length()


def _run(backend: ModuleType, op: str, args: tuple):
    with torch.cuda.device_of(args[0]), exact(args[0]):  # kernels are launched on the current device
        return getattr(backend, op)(*args)


def _checked(backend: ModuleType, op: str, geometry: Geometry, args: tuple):
    """The backend's result, checked if it is the first of its class and variant."""
    from . import selfcheck  # imports the operations, which import this module

    result = _run(backend, op, args)
    key = (*_class(op, backend.NAME, geometry), *selfcheck.variant(op, args))
    if key not in _verified:
        with _lock:
            if key not in _verified and selfcheck.check(op, result, args):
                _verified.add(key)
    return result


def _demote(op: str, name: str, geometry: Geometry, error: Exception) -> None:
    why = str(error) if isinstance(error, Mismatch) else f"{type(error).__name__}: {_first_line(error)}"
    demotion = Demotion(op, name, _words(geometry), why)
    with _lock:
        if _demoted.setdefault(_class(op, name, geometry), demotion) is not demotion:
            return  # another thread was first
    _log.warning("MC-Sparse: backend %s is not used any more for %s of %s: %s", name, op, demotion.geometry, why)
    _log.debug("MC-Sparse: how backend %s failed", name, exc_info=error)


def _is_definition(name: str, geometry: Geometry) -> bool:
    return name == REFERENCE or (name == "torch" and geometry.device_type == "cpu")


def _is_recording(geometry: Geometry) -> bool:
    """Inside a CUDA graph capture or a torch.compile trace, where nothing can be read back."""
    return torch.compiler.is_compiling() or (geometry.device_type == "cuda" and torch.cuda.is_current_stream_capturing())


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host ran out of memory, in whatever class of error."""
    text = str(error).lower()
    # FlashAttention-3 is built on the stable ABI, where a failed allocation is a failed call of aten::new_empty and no more.
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or any(words in text for words in _OUT_OF_MEMORY)


def _is_final(error: Exception) -> bool:
    """Whether every later call would fail too, of any backend."""
    text = str(error).lower()
    return any(words in text for words in _FINAL_ERRORS)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:300]


def _is_named(op: str, request: str) -> bool:
    return any(c.name == request for c in candidates(op))


def _why_not(op: str, candidate: Candidate, geometry: Geometry, by_name: bool) -> str | None:
    by_itself = geometry.device_type == "cpu" or (geometry.device_type == "cuda" and op in _PLAIN)
    if candidate.name == REFERENCE and not by_name and not by_itself:
        return f"is too slow to be chosen by itself on {geometry.device_type}; ask for it by name"
    demotion = _demoted.get(_class(op, candidate.name, geometry))
    if demotion is not None:
        return f"was demoted: {demotion.why}"
    module, reason = load(candidate.module)
    if module is None:
        return reason
    if op == SPARSE and geometry.precision not in getattr(module, "PRECISIONS", ("half",)):
        return f"does not compute in {geometry.precision}"
    return module.why_not(geometry)


def _unavailable(op: str, geometry: Geometry, request: str) -> str:
    named = _is_named(op, request)
    asked = f"backend {request!r} cannot run" if named else "no backend can run"
    return f"{op}: {asked} {_words(geometry)}. {_reasons(op, geometry, named)}. Choose another backend or run dense."


def _reasons(op: str, geometry: Geometry, by_name: bool) -> str:
    found = ((c.name, _why_not(op, c, geometry, by_name)) for c in candidates(op, geometry.capability))
    return "; ".join(f"{name}: {reason or 'can run'}" for name, reason in found)


def _words(g: Geometry) -> str:
    capability = "" if g.capability is None else " sm_{}{}".format(*g.capability)
    dtype, precision = str(g.dtype).removeprefix("torch."), "" if g.precision == "half" else f", products in {g.precision}"
    return f"{g.q_len} queries x {g.k_len} keys, head dim {g.head_dim}, {dtype}, {g.device_type}{capability}{precision}"


@cache
def load(module: str) -> tuple[ModuleType | None, str | None]:
    """The module, or None and what keeps a package that it imports from loading."""
    try:
        return import_module(module, __package__), None
    except Exception as error:
        if _is_ours(error):
            raise
        return None, str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {_first_line(error)}"


def _is_ours(error: Exception) -> bool:
    """Whether an exception at import is a bug of this package rather than the state of one that it imports."""
    ours = __package__.partition(".")[0]
    if isinstance(error, ImportError):
        return (error.name or "").partition(".")[0] == ours
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):  # something an older release of a package lacks
        return error.obj.__name__.partition(".")[0] == ours
    frame = error.__traceback__
    while frame.tb_next is not None:
        frame = frame.tb_next
    return frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] == ours
