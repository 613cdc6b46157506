"""Token orders of the Wan family. Numbers are counted by hand: a latent of 4 x 8 x 8 in patches of 1 x 2 x 2 is 4 x 4 x 4 = 64 tokens."""
import pytest
import torch

from mc_sparse.kernels import cell_order
from mc_sparse.mcsparse_core.context import TokenLayout
from mc_sparse.nodes.layouts import ORDERS, facts, latent_tokens, token_layout, why_unsupported

LATENT, PATCH, GRID = (1, 16, 4, 8, 8), (1, 2, 2), (4, 4, 4)


def frames(n, height=8, width=8):
    return torch.empty(1, 16, n, height, width)


def layout(family, tokens, grid=None, has_ref_conv=False, latent=LATENT, patch=PATCH, **conditioning):
    return token_layout(facts(family, patch, latent, conditioning, has_ref_conv), tokens, grid)


@pytest.mark.parametrize("family", ORDERS)
@pytest.mark.parametrize("grid", [None, GRID])
def test_plain_raster(family, grid):
    assert layout(family, 64, grid) == TokenLayout(GRID)


def test_odd_latents_are_padded_to_patches():
    assert layout("WanModel", 3 * 23 * 31, latent=(1, 16, 3, 45, 62)) == TokenLayout((3, 23, 31))


def test_other_patches():
    assert layout("WanModel", 2 * 4 * 4, latent=(1, 48, 2, 4, 4), patch=(1, 1, 1)) == TokenLayout((2, 4, 4))


def test_appended_frames_join_the_raster():
    assert layout("WanModel", 96, time_dim_concat=frames(2)) == TokenLayout((6, 4, 4))
    assert layout("WanModel", 96, grid=(6, 4, 4), time_dim_concat=frames(2)) == TokenLayout((6, 4, 4))


def test_reference_image_by_its_own_convolution():
    image = torch.empty(1, 16, 8, 8)  # 16 tokens of 80: too many to keep exact
    assert layout("WanModel", 80, GRID, True, reference_latent=image) == TokenLayout(GRID, before=16)
    longer = layout("WanModel", 12 * 16 + 16, (12, 4, 4), True, reference_latent=image)
    assert longer == TokenLayout((12, 4, 4), before=16, exact=((0, 16),))  # 16 of 208


def test_reference_image_without_the_convolution_adds_nothing():
    assert layout("WanModel", 64, GRID, False, reference_latent=torch.empty(1, 16, 8, 8)) == TokenLayout(GRID)


def test_context_latents_follow_the_raster():
    assert layout("WanModel", 64 + 8 + 4, context_latents=[frames(2, 4, 4), frames(1, 4, 4)]) == TokenLayout(GRID, after=12)
    kept = layout("WanModel", 64 + 8, context_latents=[frames(2, 4, 4)])
    assert kept == TokenLayout(GRID, after=8, exact=((64, 72),))  # 8 of 72 is one ninth


@pytest.mark.parametrize("family", ["WanModel_S2V", "HumoWanModel"])
def test_open_end(family):
    assert layout(family, 64 + 9) == TokenLayout(GRID, after=9, exact=((64, 73),))
    assert layout(family, 64 + 64) == TokenLayout(GRID, after=64)


@pytest.mark.parametrize("grid", [None, (5, 4, 4)])
def test_scail_reference_frames_and_pose(grid):
    found = layout("SCAILWanModel", 16 + 64 + 8, grid, reference_latent=frames(1), pose_latents=frames(2, 4, 4))
    assert found == TokenLayout(GRID, before=16, after=8)


def test_exact_tokens_at_exactly_one_eighth():
    assert layout("HumoWanModel", 64 + 9).exact and layout("WanModel_S2V", 72).exact
    eight = layout("HumoWanModel", 56 + 8, latent=(1, 16, 7, 4, 8))
    assert eight == TokenLayout((7, 2, 4), after=8, exact=((56, 64),))


@pytest.mark.parametrize("tokens", [63, 65, 640])
def test_unexpected_length_is_a_reason(tokens):
    reason = layout("WanModel", tokens)
    assert isinstance(reason, str) and str(tokens) in reason and "4x4x4" in reason


def test_layouts_fill_the_sequence():
    found = layout("SCAILWanModel", 88, reference_latent=frames(1), pose_latents=frames(2, 4, 4))
    order = cell_order(found.grid, before=found.before, after=found.after)
    assert found.length == len(order) == 88 and sorted(order.order.tolist()) == list(range(88))


def test_other_models_have_a_reason():
    assert why_unsupported("WanModel") is None
    assert why_unsupported("Flux") == "model family Flux is not supported yet"
    assert "frame by frame" in why_unsupported("WanAnimate2Model") and "cache" in why_unsupported("CausalWanModel")


def test_tokens_of_a_latent():
    assert latent_tokens("WanModel", PATCH, (1, 16, 21, 60, 104)) == 21 * 30 * 52
