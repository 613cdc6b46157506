"""The numbers that queries and keys are multiplied in, as a float32 PyTorch definition.

half   16 bits, as they come
int8   -127..127 times a float32 scale, the largest |value| / 127 of what shares it: a key, or all queries of a group
fp8    e4m3 times such scales, the largest |value| / 448

A logit is a product of codes times both scales; one scale for a whole group can be multiplied into those of the keys, once for all queries.
Keys are smoothed before: less the mean of a sample of them, which changes every logit of a query by the same and so no weight of its
softmax. Scales are 1 where all is 0, and NaN where there is NaN or infinity, so that a logit is then NaN where in half precision it may
also be infinite: one such number in a query makes its whole group NaN. Weights and values keep 16 bits.

Error of the attention over all keys, ||O - O'|| / ||O||, head dim 128, 2000 tokens, float32 weights and values (kernels/testing.py);
groups are of queries that follow each other:

          random   clustered   outliers
half      0.25 %   1.2 %       0.6 %       bfloat16 queries and keys
int8      1.2 %    3.0 %       2.9 %       a scale per query: 0.94, 2.9 and 2.2 %; one for all keys of a head: 1.4, 3.9 and 3.0 %
fp8       3.9 %    16 %        6.7 %       a scale per query: 3.8, 16 and 6.3 %; one for all keys of a head: 3.9, 19 and 9.3 %

e4m3 rounds to 4 digits, int8 to as many as 8: fp8 is for cards whose int8 products are slow.

All queries here are about as long as each other, as models that normalise them have it. One query of a group that is 3 (10) times as long
as the others makes their error in int8 3.6 % (11 %) where it was 1.7 %.

Why values and weights are left alone: over the heaviest 15 % of 16384 random or clustered keys, values in e4m3 with a scale per channel
cost 2.6 % by themselves, weights in e4m3 too 3.4 to 3.6 %; values in int8 0.8 %, with weights in 8 bits 0.9 to 1.9 %. But products of 8-bit
values need them transposed in shared memory, which neither cp.async nor the copy engine does (whole cells could be laid out so), and of
a large weight beside many small ones, steps of 1/255 of it leave nothing of these.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .shapes import ceil_div

PRECISIONS = ("half", "int8", "fp8")
LARGEST = {"int8": 127.0, "fp8": 448.0}
# Keys of a head that their mean is taken of, at most. A sample is enough: int8 over 16384 keys, clustered and outliers, errs by 2.9 and
# 3.0 % with it, by 2.9 and 2.8 % with the mean of all (6 seeds).
SAMPLED = 1024


def key_mean(k: Tensor) -> Tensor:
    """Mean of every n-th of keys (..., S, D) in float32, (..., D), n = ceil(S / SAMPLED) or one more: odd.

    An even n may be a multiple of a token grid's width: the sample would be one column, whose keys share their position's rotation. NaN
    and infinities count as 0, so that they spoil no other key.
    """
    some = k[..., :: ceil_div(k.shape[-2], SAMPLED) | 1, :]
    return torch.where(some.isfinite(), some, 0).mean(-2, dtype=torch.float32)


def quantised(x: Tensor, precision: str, over: tuple[int, ...] = (-1,)) -> tuple[Tensor, Tensor]:
    """Codes of x, int8 or float8_e4m3fn, to nearest, half to even, and float32 scales, shaped like x but 1 in the dims in `over`.

    What differs in the dims of `over` alone shares a scale: (-1,) for keys (..., S, D), (-2, -1) for queries in groups (..., G, C, D).
    Codes whose scale is NaN are without meaning.
    """
    most, x = LARGEST[precision], x.float()
    reach = x.abs().amax(over, keepdim=True)
    reach = torch.where(reach.isfinite(), reach, torch.nan)
    empty = reach == 0
    per_unit = reach.new_full((), most) / reach  # a number over a tensor would be the tensor's reciprocal, rounded, times the number
    per_unit = per_unit.clamp_max(torch.finfo(torch.float32).max)  # of numbers near the smallest
    x = (x * torch.where(empty, 1.0, per_unit)).nan_to_num(0.0).clamp(-most, most)
    codes = x.round().to(torch.int8) if precision == "int8" else x.to(torch.float8_e4m3fn)
    return codes, torch.where(empty, 1.0, reach / most)


def rounded(x: Tensor, precision: str, over: tuple[int, ...] = (-1,)) -> Tensor:
    """x in float32 as `precision` knows it, a scale over the dims `over`; half: as it is."""
    if precision == "half":
        return x.float()
    codes, scale = quantised(x, precision, over)
    return codes.float() * scale
