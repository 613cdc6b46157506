"""The shipped weights carry Wan's names, load without a network, and denoise according to the prompt."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mc_sparse.demo import clips, codec, model, prompts

GRID = (5, 24, 24)


@pytest.fixture(scope="module")
def net():
    pytest.importorskip("diffusers")
    return model.load()


def test_weights_have_the_names_and_shapes_comfyui_detects():
    weights = load_file(model.FOLDER / "model.safetensors")
    assert weights["head.modulation"].shape == (1, 2, 256)
    assert weights["head.head.weight"].shape == (4 * 16, 256)
    assert weights["patch_embedding.weight"].shape == (256, 16, 1, 2, 2)
    assert weights["text_embedding.0.weight"].shape == (256, 4096)
    assert weights["blocks.5.ffn.0.weight"].shape == (1024, 256)
    assert not any("img" in name or "blocks.6" in name for name in weights)
    assert {value.dtype for value in weights.values()} == {torch.float16}


def test_config_is_the_code_s_config():
    config = json.loads((model.FOLDER / "config.json").read_text())
    assert config == json.loads(json.dumps({"_class_name": "WanTransformer3DModel", **model.CONFIG}))


def test_names_map_onto_the_whole_model(net):
    weights = load_file(model.FOLDER / "model.safetensors")
    state = net.state_dict()
    assert {model.wan_name(name) for name in state} == set(weights)
    assert all(torch.equal(value, weights[model.wan_name(name)].float()) for name, value in state.items())


@torch.no_grad()
def test_the_right_prompt_denoises_best(net):
    generator = torch.Generator().manual_seed(3)
    clean = codec.encode(clips.render(torch.arange(8), 2 * GRID[0], 2 * GRID[1], 2 * GRID[2], generator))
    noisy = torch.lerp(clean, torch.randn(clean.shape, generator=generator), 0.8)

    def error(text):
        denoised = noisy - 0.8 * net(noisy, torch.full((8,), 800.0), text).sample
        return (denoised - clean).square().mean((1, 2, 3, 4))

    text = prompts.table()[:-1]
    right = error(text)
    assert (right < error(text.roll(1, 0))).all()
    assert right.mean() < 0.3 * clean.square().mean()


@torch.no_grad()
def test_sampling_is_seeded_and_shows_the_prompt_s_colours(net):
    text = torch.cat([prompts.embedding(name) for name in prompts.names()[:2]])
    latents = model.sample(net, text, GRID, steps=3, seed=5)
    assert torch.equal(latents, model.sample(net, text, GRID, steps=3, seed=5))
    waves, bricks = codec.decode(latents).mean((2, 3, 4))  # mean colour (3,)
    assert waves[2] > waves[0] and bricks[0] > bricks[2]
