"""One kernel, on the chip: which tile fits, which keys a block meets, and exp2 in place of exp.

    python exercises/11_kernel.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/11_kernel.md, 中文: lesson/zh/11_kernel.md.
Solutions: solutions/.
"""

from check import Case, serve

import math
from functools import partial
from unittest import mock

import torch

SIZES = 32, 64, 128, 256  # of Br; Bc is one of them from 64 on


def largest_tile(d, ub, l1, l0c):
    """Return (Br, Bc), the best tile that fits, or None where none does.

    ub, l1, l0c: bytes of a core's memories. They hold at the same time, float32 with 4 bytes a
    number and float16 with 2:

        UB   float32: S_block [Br, Bc], O_block [Br, d], m and l [Br]; float16: P_block [Br, Bc]
        L1   float16: Q_block [Br, d], K_block and V_block [Bc, d], P_block
        L0C  float32: S_block, and after it has left, P_block V_block [Br, d]

    Best: the largest Br of SIZES; then the largest Bc of SIZES, but at least 64.
    """
    raise NotImplementedError


def band(first, last, N, left, right):
    """Return (start, whole, end, stop) for the queries first ... last - 1.

    There are N keys, and query i sees those from i - left to i + right. At least one query of the
    block sees each key from start to stop - 1. All of them see each key from whole to end - 1; if
    there is no such key, end is whole.
    """
    raise NotImplementedError


def softmax_and_L(scores, scale):
    """Return softmax(scale * scores) and L, its log-sum-exp, without any exp.

    scores [N] -> weights [N] and L, a number. Take `torch.exp2`, and fold log2(e) into the scale as
    the kernel does. L stays a natural logarithm.
    """
    raise NotImplementedError


# What is checked, and what usual mistakes give

KIB, LN_2 = 1024, math.log(2)


def tile_by(d, ub, l1, l0c, *, S_bytes=4, O_stays=True, together=False, P_in_l1=True, by_Bc=False):
    """Return a largest tile under other rules than those above."""
    fitting = [
        (Br, Bc) for Br in SIZES for Bc in SIZES[1:]
        if Br * (Bc * (S_bytes + 2) + 4 * d * O_stays + 8) <= ub
        and 2 * (Br * d + 2 * Bc * d + Br * Bc * P_in_l1) <= l1
        and 4 * Br * (Bc + d if together else max(Bc, d)) <= l0c]
    return max(fitting, key=lambda tile: tile[::-1] if by_Bc else tile, default=None)


def without_exp(function, scores, scale):
    """Call the reader's function where exp and softmax are missing."""
    def missing(*args, **options):
        raise RuntimeError("no exp and no softmax is allowed here: take torch.exp2")

    taken = [mock.patch.object(where, name, missing)
             for where in (torch, torch.Tensor) for name in ("exp", "softmax", "logsumexp")]
    for each in taken:
        each.start()
    try:
        return function(scores, scale)
    finally:
        for each in taken:
            each.stop()


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

SCORES = torch.tensor([2.0, 1.0, 3.0, -4.0])


def softmax_case(scores, scale):
    expected = torch.softmax(scores * scale, 0), torch.logsumexp(scores * scale, 0)
    return Case("softmax_and_L", (scores, scale), expected, BASE_MISTAKES, call=without_exp)


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

if __name__ == "__main__":
    serve(globals())
