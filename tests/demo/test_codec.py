"""The codec is an exact bijection on latents and an orthogonal projection on clips."""

import pytest
import torch

from mc_sparse.demo import codec


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 5, 4), (13, 36, 36)])
def test_encode_inverts_decode(grid):
    latents = noise(2, 16, *grid)
    clip = codec.decode(latents)
    assert clip.shape == (2, 3, 2 * grid[0], 2 * grid[1], 2 * grid[2])
    torch.testing.assert_close(codec.encode(clip), latents, rtol=0, atol=1e-5)


def test_decoded_clips_are_fixed_points():
    clip = codec.decode(codec.encode(noise(1, 3, 6, 8, 10)))
    torch.testing.assert_close(codec.decode(codec.encode(clip)), clip, rtol=0, atol=1e-5)


def test_grey_clips_are_kept_whole():
    clip = noise(1, 1, 4, 6, 8).expand(-1, 3, -1, -1, -1)
    torch.testing.assert_close(codec.decode(codec.encode(clip)), clip, rtol=0, atol=1e-5)


def test_chroma_is_averaged_over_pixel_pairs_of_a_row():
    clip = noise(1, 3, 4, 6, 8)
    seen = codec.decode(codec.encode(clip))

    def chroma_of_pairs(x):
        chroma = torch.stack([x[:, 0] - x[:, 2], x[:, 0] - 2 * x[:, 1] + x[:, 2]])
        return chroma.unflatten(-1, (-1, 2)).mean(-1)

    torch.testing.assert_close(chroma_of_pairs(seen), chroma_of_pairs(clip), rtol=0, atol=1e-5)
    torch.testing.assert_close(seen.sum(1), clip.sum(1), rtol=0, atol=1e-5)


def test_a_latent_reaches_only_its_own_block():
    latents = torch.zeros(1, 16, 3, 4, 5)
    latents[:, :, 1, 2, 3] = 1
    clip = codec.decode(latents)
    assert clip[:, :, 2:4, 4:6, 6:8].abs().sum() > 0
    clip[:, :, 2:4, 4:6, 6:8] = 0
    assert clip.abs().sum() == 0


def test_to_uint8_clamps_and_moves_colour_last():
    clip = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0]).view(1, 1, 1, 1, 5).expand(1, 3, 2, 4, 5)
    frames = codec.to_uint8(clip)
    assert frames.shape == (1, 2, 4, 5, 3) and frames.dtype == torch.uint8
    assert frames[0, 0, 0, :, 0].tolist() == [0, 0, 128, 255, 255]


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match="even T, H, W"):
        codec.encode(torch.zeros(1, 3, 3, 4, 4))
    with pytest.raises(ValueError, match="16"):
        codec.decode(torch.zeros(1, 12, 3, 4, 4))
