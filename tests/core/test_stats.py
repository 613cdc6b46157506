"""What a run's times say."""
from __future__ import annotations

import pytest
import torch

from mc_sparse.mcsparse_core import stats
from mc_sparse.mcsparse_core.context import SiteKey
from mc_sparse.mcsparse_core.schedule import Action


def numbers_of(monkeypatch, calls):
    """Of a run on the CPU with calls (action, seconds) one after the other."""
    run, now = stats.RunStats(), [0.0]
    monkeypatch.setattr(stats.time, "perf_counter", lambda: now[0])
    for step, (action, seconds) in enumerate(calls):
        run.count(step, SiteKey("double", 0, 0, 1), action)
        with run.timed(action.value, torch.device("cpu")):
            now[0] += seconds
    return run.numbers()


def test_a_cold_first_call_is_not_taken_for_all(monkeypatch):
    """The first call loads and compiles: 3 s beside calls of 0.1 s, of which six sparse ones of 0.15 s saved nothing."""
    dense, anchor, reuse = [(Action.DENSE, s) for s in (3.0, 0.1, 0.1)], [(Action.ANCHOR, 0.2)], [(Action.REUSE, 0.15)] * 6
    numbers = numbers_of(monkeypatch, dense + anchor + reuse)
    assert numbers["attention_seconds"] == pytest.approx({"dense": 3.2, "anchor": 0.2, "reuse": 0.9})
    assert numbers["typical_seconds"] == pytest.approx({"dense": 0.1, "anchor": 0.2, "reuse": 0.15})
    assert stats._saved(numbers) == "; all dense about 3.90 s, so about 0.40 s lost"


def test_without_a_dense_call_nothing_is_said(monkeypatch):
    numbers = numbers_of(monkeypatch, [(Action.ANCHOR, 0.2), (Action.REUSE, 0.1)])
    assert stats._saved(numbers) == "" and set(numbers["typical_seconds"]) == {"anchor", "reuse"}
