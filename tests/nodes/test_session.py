"""The override against a host made of plain functions: what goes where, with which branch and site."""
from dataclasses import replace

import pytest
import torch

from mc_sparse.mcsparse_core.plan import SparsePlan
from mc_sparse.mcsparse_core.run import SparseRun
from mc_sparse.mcsparse_core.schedule import Schedule, Span
from mc_sparse.nodes.layouts import facts
from mc_sparse.nodes.session import BLOCK_KEY, KEY, OVERRIDE, Session, attention_override

HEADS, S, D = 2, 1024, 32
SIGMAS = [1 - i / 6 for i in range(7)]
PLAN = SparsePlan(density=0.3, residual="bf16", min_tokens=1024, schedule=Schedule(dense_start=Span(steps=1)))


def attention_pytorch(q, k, v, heads, mask=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """A host function whose name says that it is exact."""
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Host:
    """One sampling run: `forward` is a forward pass of two blocks, each with self- and cross-attention."""

    def __init__(self, plan=PLAN, previous=None, decline=None):
        self.run = SparseRun(plan, SIGMAS, [1 - s for s in SIGMAS], decline=decline)
        self.session = Session(self.run, previous)
        self.options = {KEY: self.session, OVERRIDE: attention_override, "uuids": ["a"], "cond_or_uncond": [0]}
        self.step = -1

    def forward(self, rows=1, tokens=S, named=True, **extra):
        self.options |= extra
        self.session.begin_forward(self.options, rows, facts("WanModel", (1, 2, 2), (rows, 16, 4, 32, 32), {}, False))
        outputs = []
        for block in range(2):
            if named:
                self.options |= {"block_type": "double", "block_index": block, "total_blocks": 2}
            outputs.append(self.attend(rows, tokens, tokens, block))
            self.attend(rows, tokens, 77, block)
        return outputs

    def attend(self, rows, tokens, keys, seed, **kwargs):
        generator = torch.Generator().manual_seed(seed)
        q, k = torch.randn(rows, tokens, HEADS * D, generator=generator), torch.randn(rows, keys, HEADS * D, generator=generator)
        return attention_override(attention_pytorch, q, k, k, heads=HEADS, transformer_options=self.options, **kwargs)

    def next(self):
        self.step += 1
        self.run.begin_evaluation(SIGMAS[self.step])

    @property
    def counts(self):
        return dict(self.run.stats.counts)


def test_anchor_then_reuse():
    host = Host()
    dense = None
    for step in range(3):
        host.next()
        outputs = host.forward()
        if step == 0:
            dense = outputs
    assert host.counts == {"anchor": 2, "reuse": 4} and host.run.stats.passed == {"cross-attention": 6}
    for ours, anchor in zip(outputs, dense, strict=True):
        assert ours.shape == (1, S, HEADS * D)
        assert ((ours - anchor).norm() / anchor.norm()).item() < 1e-2  # same inputs: sparse output plus residual


def test_without_a_session_the_call_goes_through():
    q = torch.randn(1, 8, HEADS * D)
    torch.testing.assert_close(attention_override(attention_pytorch, q, q, q, heads=HEADS), attention_pytorch(q, q, q, HEADS))


def test_previous_override_runs_the_dense_calls():
    seen = []

    def previous(func, *args, **kwargs):
        seen.append((args[0].shape[0], args[1].shape[1]))
        return func(*args, **kwargs)

    host = Host(previous=previous)
    host.next()
    host.forward()
    host.next()
    host.forward()
    # The dense part of each anchor and every cross-attention; no reuse.
    assert seen == [(1, S), (1, 77)] * 2 + [(1, 77)] * 2 and "previous" in host.session.dense_path


def test_branches_are_kept_apart_whatever_their_order():
    host = Host()
    host.next()
    host.forward(rows=2, uuids=["n", "p"], cond_or_uncond=[1, 0])
    host.next()
    together = host.forward(rows=2, uuids=["n", "p"], cond_or_uncond=[1, 0])
    host.next()
    swapped = host.forward(rows=2, uuids=["p", "n"], cond_or_uncond=[0, 1])
    assert host.counts == {"anchor": 4, "reuse": 8} and len(host.run.cache) == 4
    assert not torch.equal(together[0], swapped[0])  # row 0 used the other branch's state


def test_unknown_rows_stay_dense():
    host = Host()
    host.next()
    host.forward(rows=3, uuids=["n", "p"], cond_or_uncond=[1, 0])
    assert host.run.stats.reasons == {"the host names no conditioning": 2}


def test_mask_stays_dense():
    host = Host()
    host.next()
    host.forward()
    out = host.attend(1, S, S, 0, mask=torch.zeros(S, S))
    assert host.run.stats.reasons == {"attention mask": 1}
    torch.testing.assert_close(out, host.attend(1, S, S, 0))  # the zero mask changes nothing, and this one is eligible again


def test_the_host_can_rule_low_precision_out_call_by_call():
    host = Host(replace(PLAN, precision="int8"))
    for _ in range(3):
        host.next()
        host.forward()
        host.attend(1, S, S, 2, low_precision_attention=False)  # a third block
    assert host.counts == {"anchor": 3, "reuse": 6} and host.run.stats.precisions == {"int8": 4, "bf16": 2}
    assert host.run.stats.precision_reasons == {"the model rules low precision out": 2}


def test_unexpected_token_count_stays_dense_and_is_said_once():
    host = Host()
    host.next()
    host.forward(tokens=S + 64)
    host.forward(tokens=S + 64)
    assert sum(host.run.stats.reasons.values()) == 4 and len(host.run.notes) == 1
    assert str(S + 64) in host.run.notes[0] and "stay dense" in host.run.notes[0]


def test_declined_run_counts_its_reason():
    host = Host(decline="model family Flux is not supported yet")
    host.next()
    host.forward()
    assert host.run.stats.reasons == {"model family Flux is not supported yet": 2} and host.counts == {"dense": 2}


def test_own_block_names_come_first():
    host = Host()
    host.next()
    host.forward(**{BLOCK_KEY: ("double", 7, 9)})
    assert {(s.block_index, s.ordinal, s.blocks) for _, s in host.run.stats.timeline} == {(7, 0, 9), (7, 1, 9)}


def test_calls_are_counted_where_blocks_have_no_name():
    host = Host()
    for _ in range(2):
        host.next()
        host.forward(named=False)
    assert host.counts == {"anchor": 2, "reuse": 2}
    assert {s for _, s in host.run.stats.timeline} == {("call", 0, 0, 0), ("call", 1, 0, 0)}


def test_replaced_override_is_said_once(caplog):
    host = Host()
    host.next()
    host.forward()
    host.options[OVERRIDE] = print
    for _ in range(3):
        host.session.end_forward(host.options, host.session.calls)
    assert len(host.run.notes) == 1 and "print" in host.run.notes[0] and caplog.text.count("replaced") == 1
    host.session.end_forward(host.options, host.session.calls - 1)  # the other one calls ours: nothing to say
    assert len(host.run.notes) == 1


def test_window_and_area_are_parts_of_the_branch():
    class Window:
        index_list = [0, 1, 2]

    host = Host()
    host.next()
    host.forward()
    host.forward(context_window=Window())
    assert host.counts == {"anchor": 4}


def test_sparse_work_is_done_outside_the_hosts_memory_graph():
    entered = []

    class Pause:
        def __enter__(self):
            entered.append(True)

        def __exit__(self, *error):
            entered.append(False)

    host = Host()
    host.session.outside_graph = Pause
    host.next()
    host.forward()
    assert entered == [True, False] * 2


@pytest.mark.parametrize("how", ["copy", "deepcopy"])
def test_copies_of_the_options_share_the_session(how):
    import copy

    session = Host().session
    assert getattr(copy, how)({KEY: session})[KEY] is session
