"""Where a card's numbers are not the CPU's: casts to float64, hf32, saturation."""

import os
import sys
from functools import cache
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_leaves

MATMUL_OPS = {"mm", "addmm", "addmv", "mv", "dot"}  # MatMulV3
BATCHED_OPS = {"bmm", "addbmm", "baddbmm"}  # BatchMatMulV3

matmul = SimpleNamespace(allow_hf32=False)  # torch.npu.matmul


def is_on(switch):
    """Whether an environment variable is 1."""
    return os.environ.get(switch) == "1"


@cache
def warn_once(place, message):
    """Write a warning as the wheels' C++ does: to stderr, past Python's warnings."""
    print(f"[W {place}] Warning: {message} (function operator())", file=sys.stderr)


def without_float64(name, args, kwargs):
    """The arguments of a cast by dtype alone: it makes float32 where float64 is asked for."""
    if name != "_to_copy" or kwargs.get("device") or kwargs.get("layout"):
        return kwargs
    if kwargs.get("dtype") != torch.float64 or args[0].dtype == torch.float64:
        return kwargs
    warn_once(
        "ToKernelNpu.cpp:164",
        "Device do not support double dtype now, dtype cast replace with float.",
    )
    return {**kwargs, "dtype": torch.float32}


def as_hf32(name, args):
    """The arguments of an operator, a matrix product's float32 factors rounded where hf32 is on."""
    if not matmul.allow_hf32 or name not in MATMUL_OPS | BATCHED_OPS:
        return args
    first = "add" in name  # what the product is added to stands before its factors
    return [*args[:first], *map(_rounded, args[first : first + 2]), *args[first + 2 :]]


def _rounded(x):
    """x with 11 bits of mantissa behind the leading one."""
    if x.dtype != torch.float32:
        return x
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**12).round(), exponent - 12)


def saturate(result):
    """In saturation mode an operator gives the largest number for inf and 0 for NaN."""
    if is_on("INF_NAN_MODE_FORCE_DISABLE"):
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.nan_to_num_()
