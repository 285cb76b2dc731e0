"""How large a tile is when the caller says 'auto': from the shape and the device."""

import math
import numbers
from itertools import product

import torch

AUTO = "auto"

SCORES_BYTES = 2 * 2**20  # suits a CPU's cache: `fast_tiles.py` draws the curve
LEAST = (256, 128)  # a smaller tile of many heads pays for calls: fewer heads at a time instead
TIMES_THE_RESULT = 4
LOG2_E = math.log2(math.e)


def choose_tile(Br, Bc, heads, Nq, Nk, dv, dtype, device_type):
    """Return (Br, Bc) as whole numbers, at most (Nq, Nk); what is 'auto' is chosen.

    The scores of a tile, heads * Br * Bc in float32 or wider, take at most 2 MiB. On CUDA and NPU
    they may take 4 times the result's bytes where that is more: there each tile is a dozen kernel
    launches, and fewer of them count for more than a cache. Either way the scratch is O(N). Br is
    about twice Bc, since K and V are read once for each query block.
    Raises ValueError for anything but 'auto' and a whole number of at least 1.
    """
    for name, size in (("Br", Br), ("Bc", Bc)):
        if isinstance(size, torch.Tensor):
            raise TypeError(f"{name} must be 'auto' or a whole number, got a tensor of shape "
                            f"{tuple(size.shape)}: a mask is given as attn_mask=")
        whole = isinstance(size, numbers.Integral) and not isinstance(size, bool) and size >= 1
        if not whole and not (isinstance(size, str) and size == AUTO):
            raise ValueError(f"{name} must be 'auto' or a whole number of at least 1, got {size!r}")
    Br, Bc = (size if size == AUTO else int(size) for size in (Br, Bc))
    budget = SCORES_BYTES
    if device_type != "cpu":
        budget = max(budget, TIMES_THE_RESULT * heads * Nq * dv * dtype.itemsize)
    scores = max(1, budget // max(dtype.itemsize, 4) // max(heads, 1))  # of one head
    if Br == AUTO:
        rows = scores // Bc if Bc != AUTO else 2 ** round(math.log2(2 * scores) / 2)
        Br = max(1, min(rows, Nq))
    if Bc == AUTO:
        Bc = max(1, min(scores // Br, Nk))
    return min(Br, max(Nq, 1)), min(Bc, max(Nk, 1))


def heads_at_once(Br, Bc, Q, K, device_type):
    """Return how many key/value heads to take at a time: all, but for 'auto' on a CPU.

    There their tiles, of 256 x 128 a head or what N leaves of it, take 2 MiB together.
    """
    heads = K.shape[:-2].numel()
    if not (isinstance(Br, str) and isinstance(Bc, str)) or device_type != "cpu":
        return heads
    rows, cols = min(Q.shape[-2], LEAST[0]), min(K.shape[-2], LEAST[1])
    group = Q.shape[:-2].numel() // max(heads, 1)
    scores = max(1, group * rows * cols) * max(Q.dtype.itemsize, 4)
    return min(heads, max(1, SCORES_BYTES // scores))


def head_parts(Q, K, at_once):
    """Yield (index into Q, index into K) of parts of at most `at_once` key/value heads: tuples of
    slices over the leading dimensions.
    """
    lead = K.shape[:-2]
    axis = next(a for a in range(len(lead)) if lead[a + 1 :].numel() <= at_once)
    step = max(1, at_once // max(1, lead[axis + 1 :].numel()))
    G = Q.shape[axis] // lead[axis]
    for *outer, start in product(*map(range, lead[:axis]), range(0, lead[axis], step)):
        whole = [slice(i, i + 1) for i in outer]
        stop = min(start + step, lead[axis])
        yield (*whole, slice(G * start, G * stop)), (*whole, slice(start, stop))


def exp_(x):
    """Return exp(x), in place. A CPU computes exp2 faster than exp; on an NPU exp2 is a power."""
    return x.mul_(LOG2_E).exp2_() if x.device.type == "cpu" else x.exp_()
