"""How close one clip is to another: PSNR and SSIM."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def psnr(a: Tensor, b: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of clips in [-1, 1] (peak 2); at most 100, which equal clips get."""
    error = (a.clamp(-1, 1) - b.clamp(-1, 1)).double().square().mean().item()
    return min(100.0, 10 * math.log10(4 / error)) if error else 100.0


def ssim(a: Tensor, b: Tensor) -> float:
    """Mean structural similarity of clips (B, 3, T, H, W) in [-1, 1], per frame and channel (Wang et al. 2004: 11x11 Gaussian window,
    sigma 1.5, K1 0.01, K2 0.03)."""
    x, y = (t.clamp(-1, 1).add(1).div(2).double().transpose(1, 2).flatten(0, 2).unsqueeze(1) for t in (a, b))
    g = torch.exp(-(torch.arange(-5, 6, dtype=x.dtype, device=x.device) ** 2) / (2 * 1.5**2))
    window = torch.outer(g, g).div(g.sum() ** 2)[None, None]

    def mean(t: Tensor) -> Tensor:
        return F.conv2d(t, window)

    mx, my = mean(x), mean(y)
    vx, vy, cov = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    return (((2 * mx * my + c1) * (2 * cov + c2)) / ((mx * mx + my * my + c1) * (vx + vy + c2))).mean().item()
