"""The numbers that queries and keys are multiplied in, as a float32 PyTorch definition.

half   16 bits, as they come
int8   -127..127 times one float32 scale per query and per key, its largest |value| / 127
fp8    e4m3 times such scales, the largest |value| / 448

Keys are smoothed before: less their mean over the head, which changes every logit of a query by the same and so no weight of its softmax.
Scales are 1 for rows of zeros, and NaN for rows that hold NaN or infinities, so that a logit is then NaN where in half precision it may
also be infinite. Weights and values keep 16 bits.

Error of the attention over all keys, ||O - O'|| / ||O||, head dim 128, 2000 tokens, float32 weights and values (kernels/testing.py):

          random   clustered   outliers
half      0.25 %   1.2 %       0.6 %       bfloat16 queries and keys
int8      0.95 %   2.7 %       2.0 %       a scale per head instead of one per key: 1.3, 3.9 and 2.5 %
fp8       3.8 %    17 %        5.8 %       a scale per head instead of one per key: 3.9, 19 and 10 %

e4m3 rounds to 4 digits, int8 to as many as 8: fp8 is for cards whose int8 products are slow.

Why values and weights are left alone: over the heaviest 15 % of 16384 random or clustered keys, values in e4m3 with a scale per channel
cost 2.6 % by themselves, weights in e4m3 too 3.4 to 3.6 %; values in int8 0.8 %, with weights in 8 bits 0.9 to 1.9 %. But products of 8-bit
values need them transposed in shared memory, which neither cp.async nor the copy engine does.
"""
from __future__ import annotations

import torch
from torch import Tensor

PRECISIONS = ("half", "int8", "fp8")
LARGEST = {"int8": 127.0, "fp8": 448.0}


def key_mean(k: Tensor) -> Tensor:
    """Mean of keys (..., S, D) over S in float32, (..., D); NaN and infinities count as 0, so that they spoil no other key."""
    return torch.where(k.isfinite(), k, 0).mean(-2, dtype=torch.float32)


def quantised(x: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Codes (..., n, D), int8 or float8_e4m3fn, and scales (..., n, 1) float32 of rows x (..., n, D), to nearest, half to even.

    Codes of a row whose scale is NaN are without meaning.
    """
    most, x = LARGEST[precision], x.float()
    reach = x.abs().amax(-1, keepdim=True)
    reach = torch.where(reach.isfinite(), reach, torch.nan)
    empty = reach == 0
    per_unit = reach.new_full((), most) / reach  # a number over a tensor would be the tensor's reciprocal, rounded, times the number
    per_unit = per_unit.clamp_max(torch.finfo(torch.float32).max)  # of numbers near the smallest
    over = (x * torch.where(empty, 1.0, per_unit)).nan_to_num(0.0).clamp(-most, most)
    codes = over.round().to(torch.int8) if precision == "int8" else over.to(torch.float8_e4m3fn)
    return codes, torch.where(empty, 1.0, reach / most)


def rounded(x: Tensor, precision: str) -> Tensor:
    """Rows x (..., n, D) in float32 as `precision` knows them; half: as they are."""
    if precision == "half":
        return x.float()
    codes, scale = quantised(x, precision)
    return codes.float() * scale
