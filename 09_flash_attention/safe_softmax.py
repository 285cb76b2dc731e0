"""Softmax in numbers that end: what overflows, what is lost, and why the maximum is taken off.

    python safe_softmax.py
"""

import math
import sys
from dataclasses import dataclass
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import print_table
from lab.cases import dtype_name
from lab.visible import DTYPES

import torch


def softmax(x, m=0.0):
    """Return exp(x - m) / sum(exp(x - m)) over the last dimension, as the formula stands.

    x [..., N], m a number or [..., 1]. On paper any m gives the same result.
    """
    numerators = torch.exp(x - m)  # [..., N]
    return numerators / numerators.sum(-1, keepdim=True)


def safe_softmax(x):
    """Return the same with the row's maximum as m: no exp is above 1, and the sum is at least 1."""
    return softmax(x, x.amax(-1, keepdim=True))


@dataclass
class ShiftRow:
    """The softmax of [2, 1, 3] with m taken off each score. l: the sum of exp."""

    m: float
    l: float
    weights: list


@dataclass
class LimitRow:
    """Where exp ends in a dtype: the last scores whose exp is finite, and whose exp is not 0."""

    dtype: str
    largest_number: float
    largest_score: float
    least_score: float


def shifts(device):
    """Return the ShiftRows, from an m far too small to one far too large, in float32."""
    x = torch.tensor([2.0, 1.0, 3.0], device=device)
    return [ShiftRow(m, torch.exp(x - m).sum().item(), softmax(x, m).tolist())
            for m in (-100.0, 0.0, 3.0, 105.0, 120.0)]


def limits(device):
    """Return a LimitRow a dtype, found by trying. The NPU has no float64 matmul: left out there."""
    return [LimitRow(dtype_name(dtype), torch.finfo(dtype).max,
                     last(lambda exp: exp < math.inf, 0.0, 1000.0, dtype, device),
                     last(lambda exp: exp > 0, 0.0, -1000.0, dtype, device))
            for dtype in DTYPES if (device.type, dtype) != ("npu", torch.float64)]


def last(holds, good, bad, dtype, device):
    """Return the last number of a dtype, from `good` towards `bad`, for whose exp it holds."""
    wide = torch.promote_types(dtype, torch.float32)  # exp of half types: computed in float32
    while True:
        x = torch.tensor((good + bad) / 2, dtype=torch.float64).to(dtype)
        if x.item() in (good, bad):
            return good
        if holds(torch.exp(x.to(device, wide)).to(dtype).item()):
            good = x.item()
        else:
            bad = x.item()


def show_overflow(device):
    """Print both softmaxes of three large scores, step by step."""
    x = torch.tensor([1000.0, 999.0, 998.0], device=device)
    columns = (x, torch.exp(x), softmax(x), x - x.max(), torch.exp(x - x.max()), safe_softmax(x))
    print_table("Three large scores in float32, without and with the maximum taken off",
                ["score", "exp(score)", "/ sum", "score - m", "exp(score - m)", "/ sum, safe"],
                [[f"{cell:.4g}" for cell in row] for row in zip(*(c.tolist() for c in columns))],
                left=0)


def main():
    options = lesson.parser(__doc__, "device", "json")
    args, device, _ = lesson.begin(options)
    show_overflow(device)
    moved, ends = shifts(device), limits(device)
    print_table("The softmax of [2, 1, 3] in float32, with m taken off",
                ["m", "sum of exp", "weights"],
                [(f"{r.m:g}", f"{r.l:.4g}", "  ".join(f"{w:.3f}" for w in r.weights))
                 for r in moved], left=0)
    print_table("Where exp ends",
                ["dtype", "largest number", "largest safe score", "least score whose exp is not 0"],
                [(r.dtype, f"{r.largest_number:.4g}", f"{r.largest_score:.6g}",
                  f"{r.least_score:.6g}") for r in ends])
    return lesson.finish(args, device, [("shifts", row) for row in moved]
                         + [("limits", row) for row in ends])


if __name__ == "__main__":
    cli.serve(main)
