"""Clips are reproducible, in range, and show what their prompt says."""

import torch

from mc_sparse.demo import clips


def render(scenes, seed=0, size=(6, 32, 28)):
    return clips.render(torch.tensor(scenes), *size, torch.Generator().manual_seed(seed))


def test_same_seed_same_clip_in_range():
    first, again, other = render([0, 5]), render([0, 5]), render([0, 5], seed=1)
    assert first.shape == (2, 3, 6, 32, 28)
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.min() >= -1 and first.max() <= 1


def test_prompts_differ_more_than_seeds():
    mean_colour = torch.stack([render(list(range(8)), seed).mean((2, 3, 4)) for seed in range(4)])  # (seeds, scenes, colours)
    between = torch.cdist(mean_colour.mean(0), mean_colour.mean(0)) + 9 * torch.eye(8)
    within = (mean_colour - mean_colour.mean(0)).norm(dim=-1).mean(0)
    assert (between.min(1).values > within).all()


def test_objects_move():
    clip = render(list(range(8)))
    assert ((clip[:, :, -1] - clip[:, :, 0]).abs().mean((1, 2, 3)) > 0.01).all()
