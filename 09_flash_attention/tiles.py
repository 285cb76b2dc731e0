"""How large a tile is: given by the caller, or chosen from the shapes, the dtype and the device."""

import math

AUTO = "auto"

# Scores of one tile, all heads together. More never pays: on a CPU they leave the cache (measured:
# README), elsewhere the scratch would outgrow the result.
CPU_CACHE_BYTES = 2 * 2**20
TIMES_THE_RESULT = 4
LEAST_BYTES = 256 * 2**10  # where the result itself is tiny: a single query, say


def choose_tile(Br, Bc, heads, Nq, Nk, dv, dtype, device_type):
    """Return (Br, Bc) as whole numbers, at most (Nq, Nk); 'auto' is chosen, the other one given.

    The scores of a tile, heads * Br * Bc in float32 or wider, take at most 4 times the result's
    bytes (256 KiB where that is more), and on a CPU at most 2 MiB, which suits its cache. On CUDA
    and NPU there is no other bound: there fewer tiles are fewer kernel launches. Br is twice Bc:
    K and V are read once for each query block.
    Raises ValueError for anything but 'auto' and a whole number of at least 1.
    """
    for name, size in (("Br", Br), ("Bc", Bc)):
        if size != AUTO and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{name} must be 'auto' or a whole number of at least 1, got {size!r}")
    budget = max(LEAST_BYTES, TIMES_THE_RESULT * heads * Nq * dv * dtype.itemsize)
    if device_type == "cpu":
        budget = min(budget, CPU_CACHE_BYTES)
    scores = max(1, budget // max(dtype.itemsize, 4) // max(heads, 1))  # of one head
    if Br == AUTO:
        rows = scores // Bc if Bc != AUTO else 2 ** round(math.log2(2 * scores) / 2)
        Br = max(1, min(rows, Nq))
    if Bc == AUTO:
        Bc = max(1, min(scores // Br, Nk))
    return min(Br, max(Nq, 1)), min(Bc, max(Nk, 1))
