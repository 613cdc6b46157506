"""A fixed linear codec between RGB clips and 16-channel latents: what the demo model has instead of a VAE.

One latent position is a block of 2 frames x 2 x 2 pixels: 24 RGB values seen through 16 orthonormal directions, the 8 Haar coefficients of
luma and, per chroma axis, the 4 that are constant along x (4:2:2). So F latent frames of h x w are 2F RGB frames of 2h x 2w pixels,
`encode(decode(z))` returns z, and `decode(encode(clip))` is the clip with its chroma halved along x.

Latents here are what the diffusion model sees. ComfyUI keeps Wan latents in another scaling: apply
`comfy.latent_formats.Wan21().process_in` to a sampler's result before `decode`, and `process_out` after `encode`.
"""

import torch

# sqrt(standard deviation) of each channel over the training clips (`python demo/train.py --statistics`); their means are near 0. So coarse
# channels stay louder than fine ones and come out of the noise first.
SCALE = (1.34, 0.472, 0.513, 0.238, 0.561, 0.315, 0.293, 0.181, 1.264, 0.358, 0.557, 0.273, 0.857, 0.257, 0.458, 0.195)


def _basis():
    """Analysis matrix (16, 24) with orthonormal rows; a column is (colour, frame, y, x) of the block."""
    colour = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, -1.0], [1.0, -2.0, 1.0]], dtype=torch.float64)
    colour = colour / colour.norm(dim=1, keepdim=True)
    haar = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    luma = torch.kron(torch.kron(haar, haar), haar)
    chroma = luma[0::2]  # even rows are constant along x
    return torch.cat([torch.kron(colour[:1], luma), torch.kron(colour[1:], chroma)])


def _scaled_basis(device):
    """Analysis (16, 24) and synthesis (24, 16) matrices with the channel scales, float32; analysis @ synthesis = identity."""
    basis, scale = _basis(), torch.tensor(SCALE, dtype=torch.float64).unsqueeze(1)
    return (basis / scale).to(device, torch.float32), (basis * scale).T.to(device, torch.float32)


def encode(clip):
    """Latents (B, 16, T/2, H/2, W/2) float32 of an RGB clip (B, 3, T, H, W) in [-1, 1]; T, H and W are even."""
    b, c, t, h, w = clip.shape
    if c != 3 or t % 2 or h % 2 or w % 2:
        raise ValueError(f"encode: a clip (B, 3, T, H, W) with even T, H, W is needed, not {tuple(clip.shape)}")
    analysis, _ = _scaled_basis(clip.device)
    blocks = clip.float().reshape(b, 3, t // 2, 2, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 7, 2, 4, 6).flatten(1, 4)
    return torch.einsum("ki,bifhw->bkfhw", analysis, blocks)


def decode(latents):
    """RGB clip (B, 3, 2F, 2h, 2w) float32, not clamped, of latents (B, 16, F, h, w) in model scaling."""
    b, c, f, h, w = latents.shape
    if c != 16:
        raise ValueError(f"decode: latents (B, 16, F, h, w) are needed, not {tuple(latents.shape)}")
    _, synthesis = _scaled_basis(latents.device)
    blocks = torch.einsum("ik,bkfhw->bifhw", synthesis, latents.float())
    return blocks.reshape(b, 3, 2, 2, 2, f, h, w).permute(0, 1, 5, 2, 6, 3, 7, 4).reshape(b, 3, 2 * f, 2 * h, 2 * w)


def to_uint8(clip):
    """Frames (B, T, H, W, 3) uint8 of a clip (B, 3, T, H, W); values outside [-1, 1] are clamped."""
    return ((clip.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1)
