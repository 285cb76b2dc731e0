"""What exercises/11_kernel.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import math
from functools import partial

import torch
from watch import SOFTMAX, without

SIZES = 32, 64, 128, 256
KIB, LN_2 = 1024, math.log(2)


def tile_by(d, ub, l1, l0c, *, S_bytes=4, O_stays=True, together=False, P_in_l1=True, by_Bc=False):
    """Return a largest tile under other rules than those above."""
    fitting = [
        (Br, Bc) for Br in SIZES for Bc in SIZES[1:]
        if Br * (Bc * (S_bytes + 2) + 4 * d * O_stays + 8) <= ub
        and 2 * (Br * d + 2 * Bc * d + Br * Bc * P_in_l1) <= l1
        and 4 * Br * (Bc + d if together else max(Bc, d)) <= l0c]
    return max(fitting, key=lambda tile: tile[::-1] if by_Bc else tile, default=None)


def powers_of_2(scores, scale, fold=1 / LN_2, back=LN_2, below=True):
    """Return softmax_and_L with another base folded in or back."""
    S = scores * (scale * fold)
    m = S.max() if below else S.new_zeros(())
    P = torch.exp2(S - m)
    return P / P.sum(), (m + torch.log2(P.sum())) * back


def edges(first, last, N, left, right, *, swapped=False, own=False, inside=True):
    """Return the band's four numbers under a usual mistake."""
    one, other = (last - 1, first) if swapped else (first, last - 1)
    start, whole = one - left, other - left
    end, stop = one + right + (not own), other + right + (not own)
    if inside:
        start, whole, end, stop = max(0, start), max(0, whole), min(N, end), min(N, stop)
    return start, whole, max(whole, end), stop


A_910B = 192 * KIB, 512 * KIB, 128 * KIB
TILE_MISTAKES = {
    "the largest Br first, then the largest Bc": partial(tile_by, by_Bc=True),
    "S_block is float32 in UB: 4 bytes a score, beside P_block's 2": partial(tile_by, S_bytes=2),
    "O_block lies in UB too": partial(tile_by, O_stays=False),
    "L0C holds S_block or P_block V_block, one at a time: the larger has to fit":
        partial(tile_by, together=True),
    "P_block lies in L1 too, where the cube unit takes it from": partial(tile_by, P_in_l1=False),
}
BAND_MISTAKES = {
    "the first query of the block sees the lowest key, the last one the highest":
        partial(edges, swapped=True),
    "query i sees key i + right too: end and stop are one behind it": partial(edges, own=True),
    "there is no key below 0, and none from N on": partial(edges, inside=False),
    "where no key is seen by all, end is whole": lambda first, last, N, left, right: (
        max(0, first - left), max(0, last - 1 - left), min(N, first + right + 1),
        min(N, last + right)),
}
BASE_MISTAKES = {
    "2^x is not e^x: multiply the scale by log2(e)": partial(powers_of_2, fold=1.0, back=1.0),
    "log2(e) is 1 / ln(2): multiply by it, don't divide": partial(powers_of_2, fold=LN_2),
    "m and log2(l) are powers of 2: L is (m + log2(l)) * ln(2)": partial(powers_of_2, back=1.0),
    "take the maximum off before exp2": partial(powers_of_2, below=False),
}

WITHOUT_EXP = without(("exp", *SOFTMAX), "take torch.exp2")
SCORES = torch.tensor([2.0, 1.0, 3.0, -4.0])


def softmax_case(scores, scale):
    expected = torch.softmax(scores * scale, 0), torch.logsumexp(scores * scale, 0)
    return Case("softmax_and_L", (scores, scale), expected, BASE_MISTAKES, call=WITHOUT_EXP)


CASES = [
    Case("largest_tile", (64, *A_910B), (256, 64), TILE_MISTAKES),
    Case("largest_tile", (128, *A_910B), (128, 128), TILE_MISTAKES),
    Case("largest_tile", (256, *A_910B), (128, 64), TILE_MISTAKES),
    Case("largest_tile", (64, 64 * KIB, 512 * KIB, 128 * KIB), (64, 64), TILE_MISTAKES),
    Case("largest_tile", (64, 192 * KIB, 512 * KIB, 64 * KIB), (256, 64), TILE_MISTAKES),
    Case("largest_tile", (64, 192 * KIB, 64 * KIB, 128 * KIB), (128, 64), TILE_MISTAKES),
    Case("largest_tile", (256, 32 * KIB, 512 * KIB, 128 * KIB), None, TILE_MISTAKES),
    Case("band", (0, 64, 256, 256, 0), (0, 0, 1, 64), BAND_MISTAKES),
    Case("band", (128, 192, 256, 256, 0), (0, 0, 129, 192), BAND_MISTAKES),
    Case("band", (128, 192, 256, 100, 0), (28, 91, 129, 192), BAND_MISTAKES),
    Case("band", (128, 192, 256, 20, 0), (108, 171, 171, 192), BAND_MISTAKES),
    Case("band", (192, 256, 256, 100, 30), (92, 155, 223, 256), BAND_MISTAKES),
    softmax_case(SCORES, 1.0),
    softmax_case(SCORES, 0.125),
    softmax_case(SCORES * 1000, 1.0),
]
