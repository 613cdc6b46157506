"""The shipped embeddings belong to the scenes, are distinct, and are what the seed makes."""

import pytest
import torch
from safetensors.torch import load_file

from mc_sparse.demo import clips, prompts


def test_every_scene_has_its_prompt_in_order():
    assert prompts.names() == clips.prompts()
    assert len(set(prompts.names())) == 8


def test_embeddings_are_distinct_and_shaped_like_text():
    table = torch.cat([prompts.embedding(name) for name in [*prompts.names(), ""]])
    assert table.shape == (9, prompts.TOKENS, 4096) and table.dtype == torch.float32
    flat = torch.nn.functional.normalize(table.flatten(1), dim=1)
    assert (flat @ flat.T - torch.eye(9)).abs().max() < 0.05
    assert torch.equal(table, prompts.table())


def test_the_file_is_what_the_seed_makes(tmp_path):
    prompts.write(clips.prompts(), tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")["embeddings"].float()
    torch.testing.assert_close(again, prompts.table(), rtol=0, atol=2e-3)  # one float16 step: CPUs differ in the last bit of randn


def test_unknown_prompt_names_the_known_ones():
    with pytest.raises(ValueError, match="red checkered ball"):
        prompts.embedding("a cat")
