"""FlashAttention as one fused kernel: the same five lines, with the tiles in on-chip memory.

    python flash_attention.py --mode verify      where Triton serves the device, it has rows there
    python flash_attention.py --mode speed
    TRITON_INTERPRET=1 python flash_attention.py --device cpu      checked on a CPU, slowly

One source for Triton 3.2 to 3.9 and triton-ascend 3.2.0: raw pointers, no option of one platform.
`online_softmax_step` below is that of flash_attention.py line by line; `flash_attention_kernel`
walks the tiles. Which tile fits into which chip: `chips/compile_kernel.py`.
Source: FlashAttention-2 (arXiv 2307.08691), Algorithm 1.
"""

import contextlib
import math
import sys
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab.visible import Visible, batched, refuse_gradients
from common.device import accelerator

import torch

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
def online_softmax_step(m, l, O_block, S_block, V_block, scale):
    """Take one more tile into the softmax. m, l [Br], O_block [Br, dv], S_block [Br, Bc].

    In base 2: `scale` holds the factor log2(e), so exp2 gives what exp gives elsewhere.
    """
    m_new = tl.maximum(m, tl.max(S_block, 1) * scale)  # [Br]
    correction = tl.exp2(m - m_new)  # [Br], at most 1
    P_block = tl.exp2(S_block * scale - m_new[:, None])  # [Br, Bc]
    l = l * correction + tl.sum(P_block, 1)  # [Br]
    O_block = tl.dot(P_block.to(V_block.dtype), V_block, O_block * correction[:, None],
                     input_precision="ieee")  # [Br, dv]
    return m_new, l, O_block


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
def visit_tiles(m, l, O_block, Q_block, K, V, k_n, k_d, v_n, v_d, scale, first, stop, diagonal,
                d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                Br: tl.constexpr, Bc: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr,
                FILL: tl.constexpr):
    """Take the keys from first to stop, tile by tile; at the edge hide what a row may not see.

    k_n, k_d, v_n, v_d: strides of rows and columns. D, DV: d and dv padded to a power of 2.
    """
    for start in range(first, stop, Bc):
        K_block = load_rows(K, start, stop, k_n, k_d, Bc, d, D, EDGE, FILL)  # [Bc, D]
        S_block = tl.dot(Q_block, tl.trans(K_block), input_precision="ieee")  # [Br, Bc]
        if EDGE:
            i, j = tl.arange(0, Br)[:, None], tl.arange(0, Bc)[None, :]
            # As floats: Ascend's vector units compare integers one by one, and its compiler crashed
            # on them in 15 of 1500 runs.
            if CAUSAL:
                seen = (j - i).to(tl.float32) <= tl.cast(diagonal - start, tl.float32)
            else:
                seen = j.to(tl.float32) < tl.cast(stop - start, tl.float32)
            S_block = tl.where(seen, S_block, float("-inf"))
        V_block = load_rows(V, start, stop, v_n, v_d, Bc, dv, DV, EDGE, FILL)  # [Bc, DV]
        m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block, scale)
    return m, l, O_block


@triton.jit(do_not_specialize=["Nq", "Nk", "H", "G", "row_blocks", "blocks"])  # one for all lengths
def flash_attention_kernel(
        Q, K, V, O, L, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
        scale, Nq, Nk, H, G, row_blocks, blocks,
        d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
        Br: tl.constexpr, Bc: tl.constexpr, CAUSAL: tl.constexpr, FILL: tl.constexpr):
    """Attend for the query blocks p, p + programs, ... of program p: m, l and O_block stay on chip.

    Q [B, H, Nq, d], K and V [B, H // G, Nk, d or dv] with the strides q_b, q_h, ...; O and L
    contiguous. D, DV: d and dv padded to a power of 2. blocks: the number of query blocks of all
    heads, row_blocks each. A head's last one comes first: with causal it sees the most keys.
    """
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        first = (row_blocks - 1 - block % row_blocks) * Br
        head = tl.cast(block // row_blocks, tl.int64)
        b, h = head // H, head % H
        Q_block = load_rows(Q + b * q_b + h * q_h, first, Nq, q_n, q_d, Br, d, D, True, FILL)
        K_head = K + b * k_b + h // G * k_h
        V_head = V + b * v_b + h // G * v_h

        diagonal = Nk - Nq + first  # the key that stands on the diagonal beside row 0 of the block
        stop = Nk
        whole = Nk  # rows see all keys before it
        if CAUSAL:
            stop = tl.minimum(Nk, diagonal + Br)
            whole = tl.maximum(0, diagonal + 1)
        whole = whole // Bc * Bc
        m = tl.full([Br], LOWEST, tl.float32)
        l = tl.zeros([Br], tl.float32)
        O_block = tl.zeros([Br, DV], tl.float32)
        m, l, O_block = visit_tiles(m, l, O_block, Q_block, K_head, V_head, k_n, k_d, v_n, v_d,
                                    scale, 0, whole, diagonal, d, dv, D, DV, Br, Bc, CAUSAL,
                                    False, FILL)
        m, l, O_block = visit_tiles(m, l, O_block, Q_block, K_head, V_head, k_n, k_d, v_n, v_d,
                                    scale, whole, stop, diagonal, d, dv, D, DV, Br, Bc, CAUSAL,
                                    True, FILL)

        blind = l == 0  # the row saw no key
        l = tl.where(blind, 1.0, l)
        O_block = O_block / l[:, None]
        i, column = first + tl.arange(0, Br), tl.arange(0, DV)[None, :]
        at = (head * Nq + i)[:, None] * dv + column
        tl.store(O + at, O_block.to(O.dtype.element_ty), mask=(i[:, None] < Nq) & (column < dv))
        L_block = tl.where(blind, float("-inf"), m * LN_2 + tl.log(l))
        tl.store(L + head * Nq + i, L_block, mask=i < Nq)


INTERPRETED = not isinstance(flash_attention_kernel, triton.runtime.JITFunction)

# (Br, Bc, num_warps, num_stages) by the larger of D and DV, for half types by platform and for
# float32. `chips/compile_kernel.py` shows that those of Hopper spill nothing, and that those of
# Ascend, where warps and stages mean nothing, are the best that fit with the newest compiler. Where
# one does not fit, as with older compilers, the SMALLER ones are tried in turn.
HALF = {
    "hopper": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 16, 8, 2)},
    "cuda": {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 2)},
}
FLOAT32 = {64: (32, 32, 8, 2), 128: (64, 32, 8, 2), 256: (32, 16, 8, 2)}
ASCEND = {16: (128, 128), 32: (128, 64), 64: (256, 64), 128: (128, 128), 256: (32, 32)}
ASCEND_FLOAT32 = {**ASCEND, 128: (64, 128)}
ASCEND_CAUSAL = {16: (256, 64), 32: (256, 64), 64: (128, 128), 128: (128, 64), 256: (64, 64)}
SMALLER = ((64, 64, 4, 1), (32, 64, 4, 1), (32, 32, 4, 1))
FILLED = ("npu", "interpreter")  # where what lies outside of Q, K and V is set to 0
fitting = {}  # (platform, dtype, D, DV, causal): the tile that fitted


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


def tile_of(platform, dtype, d, dv, causal):
    """Return (Br, Bc, num_warps, num_stages) for 'npu', 'hopper', 'cuda' or 'interpreter'."""
    if platform == "interpreter":
        return 64, 64, 4, 1
    columns = max(padded(d), padded(dv))
    if platform == "npu":
        full = ASCEND_FLOAT32 if dtype == torch.float32 else ASCEND
        return *(ASCEND_CAUSAL if causal else full)[columns], 4, 1
    return (FLOAT32 if dtype == torch.float32 else HALF[platform])[max(64, columns)]


def flash_attention_triton(Q, K, V, *, causal=False, scale=None, return_lse=False, tile=None):
    """Return exact attention from one kernel launch.

    Q [..., Nq, d], K [..., Nk, d], V [..., Nk, dv] -> O [..., Nq, dv] in Q's dtype: float16,
    bfloat16 or float32; d and dv at most 256. Shapes, strides, grouped heads, causal, scale,
    return_lse and errors as in `flash_attention_forward`. Half types multiply P in V's dtype;
    float32 stays float32, without tf32. NaN or inf in V reaches each query of a tile in which some
    query sees that key. tile: (Br, Bc, num_warps, num_stages); None: the first of the launcher's
    that fits.
    Raises ValueError also for a device that Triton can't serve, TypeError for float64.
    """
    visible = Visible(Q, K, V, causal, scale=scale)
    refuse_gradients(Q=Q, K=K, V=V)
    (d, dv), dtype = (Q.shape[-1], V.shape[-1]), Q.dtype
    if dtype not in DTYPES:
        raise TypeError(f"Q must be float16, bfloat16 or float32 for Triton, got {dtype}")
    if max(d, dv) > MOST_COLUMNS:
        raise ValueError(f"d and dv must be at most {MOST_COLUMNS}, got {d} and {dv}")
    why_not = unserved(Q.device)
    if why_not:
        raise ValueError(f"Q is on {Q.device}: {why_not}")
    if tile is not None:
        _check_tile(tile)
    if INTERPRETED and dtype == torch.bfloat16:  # its products of bfloat16 are wrong
        O, L = flash_attention_triton(Q.float(), K.float(), V.float(), causal=causal, scale=scale,
                                      return_lse=True, tile=tile)
        return (O.to(dtype), L) if return_lse else O.to(dtype)
    scale = visible.scale * LOG2_E
    if scale < 1e-37:  # the kernel takes the maximum before it scales: that needs a positive scale
        Q, scale = (-Q, -scale) if scale < -1e-37 else (Q * 0, 1.0)
    O = Q.new_empty(*Q.shape[:-1], dv)
    L = Q.new_empty(Q.shape[:-1], dtype=torch.float32)
    if L.numel():
        launch(visible, Q, K, V, O, L, scale, bool(causal), tile)
    return (O, L) if return_lse else O


def launch(visible, Q, K, V, O, L, scale, causal, tile):
    """Launch the kernel in `tile`, or in the first that fits of those that the launcher knows.

    scale holds the factor log2(e). Raises what the compiler or Triton raises where none fits.
    """
    (d, dv), platform = (Q.shape[-1], V.shape[-1]), platform_of(Q.device)
    heads = [batched(x) for x in (Q, K, V)]  # [B, H, N, d]
    if platform == "npu":  # other columns than adjacent ones take more of UB than the tile leaves
        heads = [x if x.stride(-1) == 1 else x.new_empty(x.shape).copy_(x) for x in heads]
    key = platform, Q.dtype, padded(d), padded(dv), causal
    first = fitting.get(key) or tile_of(platform, Q.dtype, d, dv, causal)
    tiles = [tile] if tile else list(dict.fromkeys((first, *SMALLER)))
    for Br, Bc, num_warps, num_stages in tiles:
        row_blocks = triton.cdiv(visible.Nq, Br)
        blocks = row_blocks * L.shape[:-1].numel()
        try:
            with current(Q.device):
                flash_attention_kernel[(min(blocks, programs(Q.device)),)](
                    *heads, O, L, *(stride for x in heads for stride in x.stride()),
                    scale, visible.Nq, visible.Nk, heads[0].shape[1], visible.G, row_blocks, blocks,
                    d, dv, padded(d), padded(dv), Br, Bc, causal, platform in FILLED,
                    num_warps=num_warps, num_stages=num_stages)
        except Exception as refusal:
            if not is_too_large(refusal) or (Br, Bc) == tiles[-1][:2]:
                raise
            continue
        if not tile:
            fitting[key] = Br, Bc, num_warps, num_stages
        return


def is_too_large(refusal):
    """Whether a chip's compiler says that the tile takes more memory than a core has."""
    return "overflow" in str(refusal) or type(refusal).__name__ == "OutOfResources"


def _check_tile(tile):
    whole = (isinstance(tile, (tuple, list)) and len(tile) == 4
             and all(type(size) is int and 1 <= size <= 1024 for size in tile))
    if not whole or any(size & (size - 1) for size in tile[:3]) or min(tile[:2]) < 16:
        raise ValueError("tile must be None or (Br, Bc, num_warps, num_stages), whole numbers up "
                         "to 1024, the first three powers of 2, Br and Bc at least 16, "
                         f"got {tile!r}")


def unserved(device):
    """Return in one line why the kernel can't run on `device`, or None where it can."""
    if INTERPRETED:
        return None if device.type == "cpu" else "TRITON_INTERPRET runs it on a CPU alone, unset it"
    if device.type == "cpu":
        return "a CPU needs Triton's interpreter, set TRITON_INTERPRET=1 before Python starts"
    backends = {"cuda": {"nvidia", "amd"}, "npu": {"ascend"}}.get(device.type, set())
    if backends & set(triton.backends.backends):
        return None
    return f"the Triton that is installed does not serve it: {INSTALL}"


def programs(device):
    """Return how many programs run at most: the cube cores of an NPU, where each program has a
    workspace; on CUDA one for each query block.
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
