"""Which module computes an operation: the first candidate that says it can, or the one that was asked for by name.

A backend is a module with NAME, `why_not(geometry) -> str | None` (None: it can) and the operation's function. Modules are
imported when they are first considered; a missing third-party package is a reason, not an error.
"""
from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple, Protocol

from .shapes import Geometry

AUTO = "auto"
REFERENCE = "reference"


class Backend(Protocol):
    """What a backend module offers, beside the function named after the operation."""

    NAME: str

    def why_not(self, geometry: Geometry) -> str | None:
        """None when this backend can run `geometry`, else a sentence that says what it lacks."""


class BackendUnavailable(ValueError):
    """No backend, or not the named one, can run this geometry; the message lists every candidate with its reason."""


class Candidate(NamedTuple):
    name: str
    module: str  # relative to this package


# Fastest first. The reference comes last: `auto` takes it on the CPU only, by name it runs anywhere.
_CANDIDATES: dict[str, tuple[Candidate, ...]] = {
    "group_queries": (Candidate("triton", ".grouping.triton_pddp"), Candidate(REFERENCE, ".grouping.reference")),
    "pool_cells": (Candidate(REFERENCE, ".pooling.reference"),),
    "dense_attention": (Candidate("torch", ".attention.torch_dense"), Candidate(REFERENCE, ".attention.reference")),
    "select_keys": (Candidate(REFERENCE, ".selection.reference"),),
    "token_sparse_attention": (Candidate(REFERENCE, ".attention.reference"),),
}


def operations() -> tuple[str, ...]:
    """Every operation that has backends."""
    return tuple(_CANDIDATES)


def reasons(op: str, geometry: Geometry) -> dict[str, str | None]:
    """Each candidate of `op` with what keeps `auto` from it, None for those that can."""
    return {c.name: _why_not(c, geometry, by_name=False) for c in candidates(op)}


def candidates(op: str) -> tuple[Candidate, ...]:
    """Backends of `op`, in the order in which `auto` asks them."""
    return _CANDIDATES[op]


def backend_names() -> tuple[str, ...]:
    """Every request a user can make: "auto", "reference", then the fast backends in order of preference.

    Backends of dense attention alone are not among them: it is exact in all of them, so `auto` decides.
    """
    fast = dict.fromkeys(c.name for op in _CANDIDATES if op != "dense_attention" for c in _CANDIDATES[op] if c.name != REFERENCE)
    return (AUTO, REFERENCE, *fast)


def pick(op: str, geometry: Geometry, request: str = AUTO) -> ModuleType:
    """The module that computes `op` for `geometry`.

    request "auto": the first candidate that can. A name: that backend, or BackendUnavailable. A name that other operations
    have but this one does not ("hopper" for pooling, say) is read as "auto" here.
    """
    named = any(c.name == request for c in candidates(op))
    if not named and request not in backend_names():
        known = dict.fromkeys((*backend_names(), *(c.name for c in candidates(op))))
        raise BackendUnavailable(f"{op}: there is no backend {request!r}; choose one of {', '.join(known)}")
    for candidate in candidates(op):
        if named and candidate.name != request:
            continue
        if _why_not(candidate, geometry, by_name=named) is None:
            return _load(candidate.module)[0]
    asked = f"backend {request!r} cannot run" if named else "no backend can run"
    raise BackendUnavailable(f"{op}: {asked} {_words(geometry)}. {_reasons(op, geometry, named)}. Choose another backend or run dense.")


def why_none(geometry: Geometry) -> str | None:
    """None when `auto` has a backend of every operation for this geometry, else a sentence naming the first that has none."""
    for op in _CANDIDATES:
        if all(_why_not(c, geometry, by_name=False) for c in candidates(op)):
            return f"no backend of {op} can run {_words(geometry)} ({_reasons(op, geometry, by_name=False)})"
    return None


def _why_not(candidate: Candidate, geometry: Geometry, by_name: bool) -> str | None:
    if candidate.name == REFERENCE and not by_name and geometry.device_type != "cpu":
        return f"is too slow to be chosen by itself on {geometry.device_type}; ask for it by name"
    module, reason = _load(candidate.module)
    return reason if module is None else module.why_not(geometry)


def _reasons(op: str, geometry: Geometry, by_name: bool) -> str:
    return "; ".join(f"{c.name}: {_why_not(c, geometry, by_name) or 'can run'}" for c in candidates(op))


def _words(g: Geometry) -> str:
    capability = "" if g.capability is None else " sm_{}{}".format(*g.capability)
    return f"{g.q_len} queries x {g.k_len} keys, head dim {g.head_dim}, {str(g.dtype).removeprefix('torch.')}, {g.device_type}{capability}"


@cache
def _load(module: str) -> tuple[ModuleType | None, str | None]:
    """The module, or None and the text of the third-party ImportError that keeps it from loading."""
    try:
        return import_module(module, __package__), None
    except ImportError as error:
        if (error.name or "").startswith(__package__.partition(".")[0]):
            raise  # a missing module of our own is a bug
        return None, str(error)
