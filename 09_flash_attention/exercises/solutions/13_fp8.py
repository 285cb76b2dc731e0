"""A solution of exercises/13_fp8.py."""

import math

import torch


def rounded(x, mantissa, lowest, largest):
    e = (torch.frexp(x).exponent - 1).clamp(min=lowest)
    step = torch.exp2(e.to(x.dtype) - mantissa)  # the distance of two numbers
    return (torch.round(x / step) * step).clamp(-largest, largest)


def int8(x, rows):
    found = []
    for block in x.split(rows):  # [rows, d]
        largest = block.abs().max()
        scale = largest / 127 if largest > 0 else torch.ones_like(largest)
        found.append(torch.round(block / scale) * scale)
    return torch.cat(found)


def largest_tau(offset, largest):
    return math.log2(largest) - offset
