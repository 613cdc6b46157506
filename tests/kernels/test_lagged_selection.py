"""Dense attention and selection in one call, where two operations do it."""
import math

import pytest
import torch

from mc_sparse.kernels import cell_order, dense_attention, group_queries, select_keys
from mc_sparse.kernels.selection import select_keys_lagged
from mc_sparse.kernels.testing import make_qkv


@pytest.mark.parametrize("granularity, kept", [("token", ((3, 50),)), ("cell32", ())])
def test_lagged_is_dense_attention_and_selection_with_the_old_lse(granularity, kept):
    q, k, v = make_qkv(1, 2, 300, 16, kind="clustered")
    cells, groups = cell_order((3, 10, 10)), group_queries(q)
    out, lse = dense_attention(q, k, v)
    before = lse + torch.randn(lse.shape, generator=torch.Generator().manual_seed(0))
    arguments = {"density": 0.3, "cells": cells, "granularity": granularity, "kept": kept}
    lagged_out, lagged_lse, selection = select_keys_lagged(q, k, v, before, groups, **arguments)
    assert torch.equal(lagged_out, out) and torch.equal(lagged_lse, lse)
    expected = select_keys(q, k, before, groups, **arguments)
    assert torch.equal(selection.bits, expected.bits) and torch.equal(selection.counts, expected.counts)
    assert not torch.equal(selection.bits, select_keys(q, k, lse, groups, **arguments).bits)


def test_an_unusable_old_lse_counts_as_the_new_one():
    q, k, v = make_qkv(1, 1, 130, 16)
    cells, groups = cell_order(None, after=130), group_queries(q)
    _, lse = dense_attention(q, k, v)
    before = lse.clone()
    before[..., ::3] = torch.tensor([math.inf, -math.inf, math.nan, 1000.0]).repeat(11)
    selection = select_keys_lagged(q, k, v, before, groups, density=0.3, cells=cells)[2]
    assert torch.equal(selection.bits, select_keys(q, k, lse, groups, density=0.3, cells=cells).bits)


def test_what_is_refused():
    q, k, v = make_qkv(1, 1, 130, 16)
    cells, groups, lse = cell_order(None, after=130), group_queries(q), torch.zeros(1, 1, 130)
    with pytest.raises(ValueError, match="select_keys_lagged: k and v have"):
        select_keys_lagged(q, k, v[:, :, 1:], lse, groups, density=0.3, cells=cells)
    with pytest.raises(ValueError, match="select_keys_lagged: lse is"):
        select_keys_lagged(q, k, v, lse[..., 1:], groups, density=0.3, cells=cells)
