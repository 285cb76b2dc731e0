"""What exercises/13_fp8.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import math
from functools import partial

import torch


def to_format(x, mantissa, lowest, largest, *, hidden=1, floor=True, towards=torch.round,
              saturate=True):
    """Return `rounded` with a usual mistake."""
    e = torch.frexp(x).exponent - hidden
    step = torch.exp2((e.clamp(min=lowest) if floor else e).to(x.dtype) - mantissa)
    found = towards(x / step) * step
    return found.clamp(-largest, largest) if saturate else found


def by_log2(x, mantissa, lowest, largest):
    step = torch.exp2(torch.log2(x).floor().clamp(min=lowest) - mantissa)
    return (torch.round(x / step) * step).clamp(-largest, largest)


def in_blocks(x, rows, *, top=127, signed=False, back=True, one=False):
    """Return `int8` with a usual mistake."""
    found = []
    for block in x.split(len(x) if one else rows):
        largest = (block if signed else block.abs()).max()
        scale = largest / top if largest else torch.ones(())
        found.append(torch.round(block / scale) * (scale if back else 1))
    return torch.cat(found)


def by_column(x, rows):
    return torch.cat([torch.cat([in_blocks(column, rows) for column in block.split(1, dim=1)], 1)
                      for block in x.split(rows)])


def scaled_by_zero(x, rows):
    return torch.cat([torch.round(b / (b.abs().max() / 127)) * (b.abs().max() / 127)
                      for b in x.split(rows)])


E4M3, E5M2, HALF = (3, -6, 448.0), (2, -14, 57344.0), (10, -14, 65504.0)
NUMBERS = torch.tensor([0.0, 1.0, 1.06, 1.07, -13.6, 300.0, 0.02, 0.003])
ROUNDED = torch.tensor([0.0, 1.0, 1.0, 1.125, -14.0, 288.0, 0.01953125, 0.00390625])
FORMAT_MISTAKES = {
    "frexp counts from 0.5 to 1: e is its exponent - 1": partial(to_format, hidden=0),
    "log2 of a negative number is NaN: take torch.frexp, or the absolute value first":
        by_log2,
    "below 2^lowest the distance stays 2^(lowest - mantissa)": partial(to_format, floor=False),
    "round to the nearest number, not down": partial(to_format, towards=torch.floor),
    "beyond the largest number it saturates": partial(to_format, saturate=False),
}
BLOCK = torch.tensor([[1.0, -0.5], [0.25, 0.1], [100.0, -127.0], [3.0, 0.2]])
INT8_MISTAKES = {
    "each block of rows has a scale of its own": partial(in_blocks, one=True),
    "one scale serves all rows of a block, not one each": lambda x, rows: in_blocks(x, 1),
    "one scale serves a block, not one for each column": by_column,
    "the largest whole number is 127": partial(in_blocks, top=128),
    "take the largest absolute value": partial(in_blocks, signed=True),
    "multiply by the scale again": partial(in_blocks, back=False),
    "a block of zeros has no scale, don't divide by it": scaled_by_zero,
}
TAU_MISTAKES = {
    "P * 2^offset is at most 2^(offset + tau), not 2^tau": lambda o, largest: math.log2(largest),
    "tau need not be a whole number: don't round": lambda o, largest: (
        math.floor(math.log2(largest) - o)),
    "tau is an exponent: take the logarithm": lambda o, largest: largest / 2**o,
    "powers of two: take log2": lambda o, largest: math.log(largest) - o,
    "with more offset there is less room for tau": lambda o, largest: math.log2(largest) + o,
}


def like_torch(dtype, layout):
    """A case whose numbers torch rounds itself."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 10
    return Case("rounded", (x, *layout), x.to(dtype).float(), FORMAT_MISTAKES,
                said=f"64 numbers, {', '.join(map(str, layout))}")


CASES = [
    Case("rounded", (NUMBERS, *E4M3), ROUNDED, FORMAT_MISTAKES),
    Case("rounded", (torch.tensor([440.0, -470.0, 1e6]), *E4M3),
         torch.tensor([448.0, -448.0, 448.0]), FORMAT_MISTAKES),
    like_torch(torch.float8_e5m2, E5M2),
    like_torch(torch.float16, HALF),
    Case("int8", (BLOCK[2:], 2), torch.tensor([[100.0, -127.0], [3.0, 0.0]]), INT8_MISTAKES,
         said="[[100, -127], [3, 0.2]], rows=2"),
    Case("int8", (BLOCK, 2), torch.cat([torch.round(BLOCK[:2] * 127) / 127,
                                        torch.round(BLOCK[2:])]), INT8_MISTAKES,
         said="[[1, -0.5], [0.25, 0.1], [100, -127], [3, 0.2]], rows=2"),
    Case("int8", (torch.zeros(2, 3), 1), torch.zeros(2, 3), INT8_MISTAKES, said="zeros, rows=1"),
    Case("largest_tau", (0, 448.0), math.log2(448), TAU_MISTAKES),
    Case("largest_tau", (8, 448.0), math.log2(448) - 8, TAU_MISTAKES),
    Case("largest_tau", (4, 57344.0), math.log2(57344) - 4, TAU_MISTAKES),
]
