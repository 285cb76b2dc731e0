"""What the Triton lessons share: how rows are loaded and stored, where Triton runs, in which tile.

Importing it raises ImportError, with the cure, where Triton is missing or older than 3.2.
One source for Triton 3.2 to 3.9 and triton-ascend 3.2.0: raw pointers, no option of one platform.
"""

import contextlib
import math

import torch

from common.device import accelerator
from lab.visible import batched

# triton-ascend's wheel names no requirement, yet it needs these two.
INSTALL = ("pip install triton, or on Ascend, with CANN 8.5.0 and torch_npu 2.7.1, pip uninstall "
           "triton, pip install triton-ascend==3.2.0 pybind11, and a C++ compiler (apt-get install "
           "g++, or yum install gcc-c++)")

try:
    import triton
    import triton.language as tl

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 2):
        raise ImportError(f"found {triton.__version__}")
except ImportError as missing:
    raise ImportError(f"it needs Triton 3.2 or newer ({missing}): {INSTALL}") from missing

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_COLUMNS = 256  # of d and dv
LOG2_E = math.log2(math.e)
LN_2 = tl.constexpr(math.log(2))
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
OUTSIDE = tl.constexpr(0.0)  # what a masked load is asked for


@triton.jit
def load_rows(X, first, stop, row_stride, column_stride, rows: tl.constexpr, width: tl.constexpr,
              columns: tl.constexpr, EDGE: tl.constexpr, FILL: tl.constexpr):
    """Load rows first, first + 1, ... of X [stop, width] as [rows, columns], 0 outside of X.

    Only at the edge are rows compared with stop. In int64: a row can begin beyond 2^31 elements.
    FILL: a chip may give anything outside, and 0 * NaN would reach a product, so 0 is set. CUDA
    keeps its word, and there this would take registers.
    """
    i = tl.arange(0, rows)[:, None].to(tl.int64)
    column = tl.arange(0, columns)[None, :].to(tl.int64)
    at = X + tl.cast(first, tl.int64) * row_stride + (i * row_stride + column * column_stride)
    if EDGE or width < columns:
        inside = (i < stop - first) & (column < width) if EDGE else column < width
        block = tl.load(at, mask=inside, other=OUTSIDE)
        if FILL:
            block = tl.where(inside, block, 0.0)
    else:
        block = tl.load(at)
    return block


@triton.jit
def load_numbers(X, first, stop, rows: tl.constexpr, EDGE: tl.constexpr):
    """Load numbers first, first + 1, ... of X [stop], adjacent, as [rows], 0 outside of X."""
    i = tl.arange(0, rows)
    if EDGE:
        inside = i < stop - first
        block = tl.where(inside, tl.load(X + first + i, mask=inside, other=OUTSIDE), 0.0)
    else:
        block = tl.load(X + first + i)
    return block


@triton.jit
def store_rows(X, first, stop, block, rows: tl.constexpr, width: tl.constexpr,
               columns: tl.constexpr):
    """Store block [rows, columns] as rows first, first + 1, ... of X [stop, width], contiguous."""
    i = tl.arange(0, rows)[:, None]
    column = tl.arange(0, columns)[None, :]
    at = X + tl.cast(first, tl.int64) * width + (i * width + column)
    tl.store(at, block.to(X.dtype.element_ty), mask=(i < stop - first) & (column < width))


@triton.jit
def tiles_of(first, last, N, lower, upper, size: tl.constexpr, LOWER: tl.constexpr,
             UPPER: tl.constexpr):
    """Return start, whole, end, stop: which of N keys the rows first ... last - 1 meet.

    Row i sees the keys from i + lower to i + upper; LOWER, UPPER: whether that bound hides any.
    Each row sees all keys of the tiles of `size` keys from whole to end; those from start to whole
    and from end to stop are on the edge. Seen from the keys it is the same: key j is seen by the
    rows from j - upper to j - lower.
    """
    start, whole, end, stop = 0, 0, N, N
    if UPPER:
        end = tl.minimum(N, first + upper + 1)
        stop = tl.minimum(N, last + upper)
    if LOWER:
        start = tl.maximum(0, first + lower)
        whole = start + tl.cdiv(tl.maximum(0, last - 1 + lower) - start, size) * size
        whole = tl.minimum(whole, stop)
    end = whole + tl.maximum(0, end - whole) // size * size
    return start, whole, end, stop


@triton.jit
def hide(S_block, first, start, stop, lower, upper, LOWER: tl.constexpr, UPPER: tl.constexpr):
    """Set to -inf what a tile's rows first, first + 1, ... do not see of its keys from start on.

    S_block [rows, keys]; row i sees the keys from i + lower to i + upper that are before stop.
    Compared as floats: Ascend's vector units compare integers one by one, and its compiler crashed
    on them in 15 of 1500 runs.
    """
    i = tl.arange(0, S_block.shape[0])[:, None].to(tl.float32)
    j = tl.arange(0, S_block.shape[1])[None, :].to(tl.float32)
    most = tl.cast(stop - start - 1, tl.float32)
    if UPPER:
        most = tl.minimum(most, i + tl.cast(first + upper - start, tl.float32))
    seen = j <= most
    if LOWER:
        seen = seen & (j >= i + tl.cast(first + lower - start, tl.float32))
    return tl.where(seen, S_block, float("-inf"))


INTERPRETED = not isinstance(load_rows, triton.runtime.JITFunction)
AS_NPU = ("npu", "interpreter")  # few programs; what lies outside of an array is set to 0
SMALLER = [(Br, Bc, 4, 1) for Br, Bc in (
    (128, 64), (64, 64), (32, 64), (32, 32), (16, 32), (16, 16))]
fitting = {}  # {what is launched: the tile that fitted}


def padded(d):
    """Return the power of 2, 16 at least, that a head size is padded to on the chip."""
    return max(16, triton.next_power_of_2(d))


def platform_of(device):
    """Return 'npu', 'hopper' for CUDA with as much shared memory as Hopper has, 'cuda' for less."""
    if INTERPRETED:
        return "interpreter"
    if device.type == "npu":
        return "npu"
    return "hopper" if properties(device)["max_shared_mem"] >= 200 * 1024 else "cuda"


def properties(device):
    """Return what Triton's driver says of `device`."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)


def programs(device):
    """Return how many programs run at most: the cube cores of an NPU, where each program has a
    workspace; on CUDA one for each block.
    """
    if INTERPRETED:
        return 4
    if device.type == "npu":
        return properties(device)["num_aicore"]
    return 2**31 - 1


def current(device):
    """Make `device` the one that Triton launches on."""
    return contextlib.nullcontext() if device.type == "cpu" else (
        accelerator(device.type).device(device))


def adjacent(x, platform):
    """View x [..., N, d] as [B, H, N, d]. On an NPU other columns than adjacent ones are copied:
    they take more of a core's memory than a tile leaves.
    """
    x = batched(x)
    return x if platform != "npu" or x.stride(-1) == 1 else x.new_empty(x.shape).copy_(x)


def band(visible):
    """Return lower, upper, LOWER, UPPER: query i sees the keys from i + lower to i + upper, and
    whether that bound hides any key at all.
    """
    Nq, Nk, q_start = visible.Nq, visible.Nk, visible.q_start
    lower, upper = (max(-Nq, min(bound, Nk))  # beyond that they mean the same, and int32 holds them
                    for bound in (q_start - visible.left, q_start + visible.right))
    return lower, upper, lower > 1 - Nq, upper < Nk - 1


def unserved(device):
    """Return in one line why Triton can't run on `device`, or None where it can."""
    if INTERPRETED:
        return None if device.type == "cpu" else "TRITON_INTERPRET runs it on a CPU alone, unset it"
    if device.type == "cpu":
        return "a CPU needs Triton's interpreter, set TRITON_INTERPRET=1 before Python starts"
    backends = {"cuda": {"nvidia", "amd"}, "npu": {"ascend"}}.get(device.type, set())
    if backends & set(triton.backends.backends):
        return None
    return f"the Triton that is installed does not serve it: {INSTALL}"


def check_served(Q, V):
    """Raise TypeError for a dtype, ValueError for a device or head size that Triton can't serve."""
    if Q.dtype not in DTYPES:
        raise TypeError(f"Q must be float16, bfloat16 or float32 for Triton, got {Q.dtype}")
    if max(Q.shape[-1], V.shape[-1]) > MOST_COLUMNS:
        raise ValueError(f"d and dv must be at most {MOST_COLUMNS}, "
                         f"got {Q.shape[-1]} and {V.shape[-1]}")
    why_not = unserved(Q.device)
    if why_not:
        raise ValueError(f"Q is on {Q.device}: {why_not}")


def check_tile(tile):
    """Raise ValueError for a tile that is neither None nor (Br, Bc, num_warps, num_stages)."""
    if tile is None:
        return
    whole = (isinstance(tile, (tuple, list)) and len(tile) == 4
             and all(type(size) is int and 1 <= size <= 1024 for size in tile))
    if not whole or any(size & (size - 1) for size in tile[:3]) or min(tile[:2]) < 16:
        raise ValueError("tile must be None or (Br, Bc, num_warps, num_stages), whole numbers up "
                         "to 1024, the first three powers of 2, Br and Bc at least 16, "
                         f"got {tile!r}")


def above_0(Q, scale):
    """Return Q and scale with the same product, scale above 0: the kernels hide a score by -inf
    before they scale it.
    """
    if scale >= 1e-37:
        return Q, scale
    return (-Q, -scale) if scale < -1e-37 else (Q * 0, 1.0)


def tile_of(tiles, platform, dtype, d, dv, edges, window=False):
    """Return (Br, Bc, num_warps, num_stages) for a platform of `platform_of`.

    tiles: {platform, then ' float32' and ' edges' or ' window' where it has some of its own: {the
    larger of D and DV: tile}}. edges: whether causal or a window hides keys; window: on the left.
    """
    if platform == "interpreter":
        return 64, 64, 4, 1
    columns, wide = max(padded(d), padded(dv)), platform + " float32" * (dtype == torch.float32)
    kinds = [" window"] * window + [" edges"] * edges + [""]
    for name in (name + kind for name in (wide, platform) for kind in kinds):
        if name in tiles:
            of_columns = tiles[name]
            return (*of_columns[min(c for c in of_columns if c >= columns)], 4, 1)[:4]


def launch(kernel, tiles, visible, strided, contiguous, tile=None, *, by_keys=False):
    """Launch a kernel whose programs take a block of queries each, or with by_keys one of keys.

    It is called with `strided` [B, H, N, d or dv] (Q, K, V, ...), `contiguous`, the strides, scale
    with the factor log2(e), Nq, Nk, lower, upper, H, G, the number of blocks of a head and of all,
    d, dv, D, DV, Br, Bc, LOWER, UPPER and NPU. tile: (Br, Bc, num_warps, num_stages); None: the
    first that fits of `tiles_from` that of `tile_of`.
    Raises what the compiler or Triton raises where none fits.
    """
    (Q, K, V), device = strided[:3], strided[0].device
    (d, dv), platform = (Q.shape[-1], V.shape[-1]), platform_of(device)
    heads = [adjacent(x, platform) for x in strided]
    lower, upper, LOWER, UPPER = band(visible)

    def launch_in(tile):
        Br, Bc, num_warps, num_stages = tile
        per_head = triton.cdiv(visible.Nk, Bc) if by_keys else triton.cdiv(visible.Nq, Br)
        blocks = per_head * (K if by_keys else Q).shape[:-2].numel()
        with current(device):
            kernel[(min(blocks, programs(device)),)](
                *heads, *contiguous, *(stride for x in heads for stride in x.stride()),
                visible.scale * LOG2_E, visible.Nq, visible.Nk, lower, upper, heads[0].shape[1],
                visible.G, per_head, blocks, d, dv, padded(d), padded(dv), Br, Bc, LOWER, UPPER,
                platform in AS_NPU, num_warps=num_warps, num_stages=num_stages)

    if tile:
        return launch_in(tile)
    first = tile_of(tiles, platform, Q.dtype, d, dv, LOWER or UPPER, LOWER)
    launch_first_that_fits(launch_in, tiles_from(first), (
        kernel, platform, Q.dtype, padded(d), padded(dv), LOWER, UPPER))


def tiles_from(first):
    """Return the tiles that a launcher tries, in this order: `first`, and SMALLER within it."""
    Br, Bc, *_ = first
    return list(dict.fromkeys([first, *((min(Br, tile[0]), min(Bc, tile[1]), *tile[2:])
                                        for tile in SMALLER)]))


def launch_first_that_fits(launch, tiles, key):
    """Call launch(tile) with the first of `tiles` that fits the chip, and remember it by `key`.

    Raises what the compiler or Triton raises where none fits.
    """
    for tile in tiles[tiles.index(fitting.get(key, tiles[0])):]:
        try:
            launch(tile)
        except Exception as refusal:
            if not is_too_large(refusal) or tile == tiles[-1]:
                raise
            continue
        fitting[key] = tile
        return


def is_too_large(refusal):
    """Whether a chip's compiler says that the tile takes more memory than a core has."""
    return "overflow, requires" in str(refusal) or type(refusal).__name__ == "OutOfResources"
