"""Safe softmax: no overflow, whatever the scores are.

    python exercises/02_safe_softmax.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/02_safe_softmax.md, 中文:
lesson/zh/02_safe_softmax.md. Solutions: solutions/.
"""

from check import Case, serve

import math

import torch


def safe_softmax(x):
    """Return the softmax over the last dimension, from exp and sum alone. x [..., N] -> [..., N].

    Without torch.softmax.
    """
    raise NotImplementedError


def largest_score(largest, N):
    """Return the largest x for which the sum of N equal exp(x) does not exceed `largest`.

    largest: the largest number of a format, 65504 for float16.
    """
    raise NotImplementedError


def log_sum_exp(x):
    """Return log(sum(exp(x))) over the last dimension, from exp, log and sum. x [..., N] -> [...].

    It has to be right for scores of 1000 and of -1000. Without torch.logsumexp.
    """
    raise NotImplementedError


# What is checked, and what usual mistakes give


def divided(x, sum_of=lambda e: e.sum(-1, keepdim=True)):
    return torch.exp(x) / sum_of(torch.exp(x))


SMALL = torch.tensor([[2.0, 1.0, 3.0], [0.0, 0.0, 0.0]])
LARGE = torch.tensor([1000.0, 999.0, 998.0])
DEEP = torch.tensor([-1000.0, -1001.0])
WIDE = torch.tensor([500.0, -500.0])
APART = torch.tensor([[1000.0, 999.0], [2.0, 1.0]])
SOFTMAX = {
    "exp overflows: take the maximum off first": divided,
    "each row needs a maximum of its own: amax(-1, keepdim=True)": lambda x: divided(x - x.max()),
    "each row has a sum of its own: sum(-1, keepdim=True)": lambda x: divided(
        x - x.amax(-1, keepdim=True), torch.sum),
    "divide by the sum of exp": lambda x: torch.exp(x - x.amax(-1, keepdim=True)),
}
FAR_BELOW = {"m is the largest score, not the largest absolute value": lambda x: divided(
    x - x.abs().amax(-1, keepdim=True))}
SPREAD = {"m is the largest score, not the smallest": lambda x: divided(
    x - x.amin(-1, keepdim=True))}
LARGEST = {
    "the sum of N of them has to fit, not one": lambda largest, N: math.log(largest),
    "divide `largest` by N before the logarithm, not after": lambda largest, N: (
        math.log(largest) / N),
    "the logarithm to the base e is asked for: math.log": lambda largest, N: (
        math.log10(largest / N)),
    "exp(x) may be `largest` / N; x is the logarithm of that": lambda largest, N: largest / N,
}
LSE = {
    "exp overflows or vanishes: take the maximum off first": lambda x: torch.log(
        torch.exp(x).sum(-1)),
    "m has to be added again: m + log(sum(exp(x - m)))": lambda x: torch.log(
        torch.exp(x - x.amax(-1, keepdim=True)).sum(-1)),
    "the row is summed before the logarithm, not after": lambda x: x.sum(-1),
    "that is the maximum; the logarithm of the sum is missing": lambda x: x.amax(-1),
}

CASES = [
    *(Case("safe_softmax", (x,), torch.softmax(x, -1), mistakes) for x, mistakes in (
        (SMALL, SOFTMAX), (LARGE, SOFTMAX), (APART, SOFTMAX), (DEEP, FAR_BELOW), (WIDE, SPREAD))),
    Case("largest_score", (65504.0, 1), math.log(65504), LARGEST),
    Case("largest_score", (65504.0, 1024), math.log(65504 / 1024), LARGEST),
    *(Case("log_sum_exp", (x,), torch.logsumexp(x, -1), LSE) for x in (SMALL, LARGE, DEEP, APART)),
]

if __name__ == "__main__":
    serve(globals())
