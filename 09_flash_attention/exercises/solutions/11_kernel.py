"""A solution of exercises/11_kernel.py."""

import math

import torch

SIZES = 32, 64, 128, 256


def largest_tile(d, ub, l1, l0c):
    for Br in SIZES[::-1]:
        for Bc in SIZES[:0:-1]:  # down to 64
            in_ub = 4 * Br * Bc + 2 * Br * Bc + 4 * Br * d + 8 * Br
            in_l1 = 2 * (Br * d + 2 * Bc * d + Br * Bc)
            in_l0c = 4 * Br * max(Bc, d)
            if in_ub <= ub and in_l1 <= l1 and in_l0c <= l0c:
                return Br, Bc
    return None


def band(first, last, N, left, right):
    start, stop = max(0, first - left), min(N, last + right)
    whole, end = max(0, last - 1 - left), min(N, first + right + 1)
    return start, whole, max(whole, end), stop


def softmax_and_L(scores, scale):
    S = scores * (scale * math.log2(math.e))  # in powers of 2
    m = S.max()
    P = torch.exp2(S - m)
    l = P.sum()
    return P / l, (m + torch.log2(l)) * math.log(2)
