"""What exercises/02_safe_softmax.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import math

import torch
from watch import SOFTMAX, without


def divided(x, sum_of=lambda e: e.sum(-1, keepdim=True)):
    return torch.exp(x) / sum_of(torch.exp(x))


def log_of_sum(x, m, log=torch.log):
    """The log-sum-exp with any m, [..., 1]."""
    return m.squeeze(-1) + log(torch.exp(x - m).sum(-1))


def amax(x):
    return x.amax(-1, keepdim=True)


SMALL = torch.tensor([[2.0, 1.0, 3.0], [0.0, 0.0, 0.0]])
LARGE = torch.tensor([1000.0, 999.0, 998.0])
DEEP = torch.tensor([-1000.0, -1001.0])
WIDE = torch.tensor([500.0, -500.0])
APART = torch.tensor([[1000.0, 999.0], [2.0, 1.0]])
WEIGHTS = {
    "exp overflows: take the maximum off first": divided,
    "each row has to meet its own maximum and its own sum, [..., 1]: take them with keepdim=True":
        lambda x: divided(x - x.amax(-1)),
    "each row needs a maximum of its own: amax(-1, keepdim=True)": lambda x: divided(x - x.max()),
    "each row has a sum of its own: sum(-1, keepdim=True)": lambda x: divided(
        x - amax(x), torch.sum),
    "divide by the sum of exp": lambda x: torch.exp(x - amax(x)),
}
FAR_BELOW = {"m is the largest score, not the largest absolute value": lambda x: divided(
    x - x.abs().amax(-1, keepdim=True)), **WEIGHTS}
SPREAD = {"m is the largest score, not the smallest": lambda x: divided(
    x - x.amin(-1, keepdim=True))}
LARGEST = {
    "the sum of N of them has to fit, not one": lambda largest, N: math.log(largest),
    "divide `largest` by N before the logarithm, not after": lambda largest, N: (
        math.log(largest) / N),
    "the logarithm to the base e is asked for: math.log": lambda largest, N: (
        math.log10(largest / N)),
    "the logarithm to the base e is asked for, not to the base 2": lambda largest, N: (
        math.log2(largest / N)),
    "exp(x) may be `largest` / N; x is the logarithm of that": lambda largest, N: largest / N,
}
LSE = {
    "exp overflows or vanishes: take the maximum off first": lambda x: torch.log(
        torch.exp(x).sum(-1)),
    "m has to be added again: m + log(sum(exp(x - m)))": lambda x: torch.log(
        torch.exp(x - amax(x)).sum(-1)),
    "the row is summed before the logarithm, not after": lambda x: x.sum(-1),
    "that is the maximum; the logarithm of the sum is missing": lambda x: x.amax(-1),
    "each row needs a maximum of its own; here exp(x - m) vanishes in a row far below the others":
        lambda x: log_of_sum(x, x.max().expand(*x.shape[:-1], 1)),
    "the natural logarithm is asked for, torch.log": lambda x: log_of_sum(x, amax(x), torch.log2),
    "the sum has the shape [...] and m has [..., 1]: take the 1 away before you add":
        lambda x: amax(x) + torch.log(torch.exp(x - amax(x)).sum(-1)),
    "the result has the shape [...], without the 1 of keepdim":
        lambda x: log_of_sum(x, amax(x)).unsqueeze(-1),
    "x - m needs m with its dimension, [..., 1]: amax(-1, keepdim=True)":
        lambda x: x.amax(-1) + torch.log(torch.exp(x - x.amax(-1)).sum(-1)),
}
BY_HAND = without(SOFTMAX, "take exp, sum and the maximum")

CASES = [
    *(Case("safe_softmax", (x,), torch.softmax(x, -1), mistakes, BY_HAND) for x, mistakes in (
        (SMALL, WEIGHTS), (LARGE, WEIGHTS), (APART, WEIGHTS), (DEEP, FAR_BELOW), (WIDE, SPREAD))),
    Case("largest_score", (65504.0, 1), math.log(65504), LARGEST),
    Case("largest_score", (65504.0, 1024), math.log(65504 / 1024), LARGEST),
    *(Case("log_sum_exp", (x,), torch.logsumexp(x, -1), LSE, BY_HAND)
      for x in (SMALL, LARGE, DEEP, APART)),
]
