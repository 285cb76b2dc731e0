"""How large a tile is when the caller says 'auto': from the shape and the device."""

import math
import numbers
from itertools import product

import torch

AUTO = "auto"

SCORES_BYTES = 2 * 2**20  # suits a CPU's cache: `fast_tiles.py` draws the curve
LEAST = (256, 128)  # smaller tiles of many heads pay for calls
TIMES_THE_RESULT = 4
LOG2_E = math.log2(math.e)


def choose_tile(Br, Bc, Q, K, dv, device_type):
    """Return Br, Bc and how many key/value heads to take at a time; what is 'auto' is chosen.

    Br and Bc are whole numbers, at most Nq and Nk. The scores of the heads' tiles, in float32 or
    wider, take 2 MiB at most. On a CPU, where both are 'auto', a part of the heads is taken at a
    time if the tile of one would be smaller than 256 x 128. On CUDA and NPU the scores may take 4
    times the result's bytes where that is more: there each tile is a dozen kernel launches, and
    fewer of them count for more than a cache. Either way the scratch is O(N). Br is about twice
    Bc, since K and V are read once for each query block.
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
    (heads, Nq), (kv_heads, Nk) = ((x.shape[:-2].numel(), x.shape[-2]) for x in (Q, K))
    G, wide = heads // max(kv_heads, 1), max(Q.dtype.itemsize, 4)
    at_once, budget = kv_heads, SCORES_BYTES
    if device_type != "cpu":
        budget = max(budget, TIMES_THE_RESULT * heads * Nq * dv * Q.dtype.itemsize)
    elif Br == Bc == AUTO:
        least = max(1, G * min(Nq, LEAST[0]) * min(Nk, LEAST[1])) * wide
        at_once = min(kv_heads, max(1, budget // least))
    scores = max(1, budget // wide // max(G * at_once, 1))  # of one head
    if Br == AUTO:
        rows = scores // Bc if Bc != AUTO else 2 ** round(math.log2(2 * scores) / 2)
        Br = max(1, min(rows, Nq))
    if Bc == AUTO:
        Bc = max(1, min(scores // Br, Nk))
    return min(Br, max(Nq, 1)), min(Bc, max(Nk, 1)), at_once


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
