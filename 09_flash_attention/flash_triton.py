"""FlashAttention as one fused kernel: the same five lines, with the tiles in on-chip memory.

    python flash_attention.py --mode verify      where Triton serves the device, it has rows there
    python flash_attention.py --mode speed
    TRITON_INTERPRET=1 python flash_attention.py --device cpu      checked on a CPU, slowly

One source for Triton 3.2 to 3.9 and triton-ascend 3.2.0: raw pointers, no option of one platform.
`online_softmax_step` below is that of flash_attention.py line by line, `flash_attention_kernel`
walks the tiles, and flash_triton_backward.py has the gradients. Which tile fits into which chip:
`chips/compile_kernel.py`.
Source: FlashAttention-2 (arXiv 2307.08691), Algorithm 1.
"""

import sys
from functools import partial
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import triton_tools
from lab.triton_tools import (  # noqa: F401  DTYPES, MOST_COLUMNS and unserved for others
    DTYPES, INTERPRETED, LN_2, LOWEST, MOST_COLUMNS, above_0, check_served, check_tile, hide,
    launch, load_rows, store_rows, tiles_of, unserved)
from lab.visible import Visible, refuse_transforms, wants_gradient
from flash_triton_backward import flash_attention_triton_backward

import torch
import triton
import triton.language as tl


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
def visit_tiles(m, l, O_block, Q_block, K, V, k_n, k_d, v_n, v_d, scale, first, start, stop, lower,
                upper, d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                Bc: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, EDGE: tl.constexpr,
                NPU: tl.constexpr):
    """Take the keys from start to stop, tile by tile; at the edge hide what a row does not see.

    first: the row that Q_block begins with. k_n, k_d, v_n, v_d: strides of rows and columns.
    """
    for j in range(start, stop, Bc):
        K_block = load_rows(K, j, stop, k_n, k_d, Bc, d, D, EDGE, NPU)  # [Bc, D]
        S_block = tl.dot(Q_block, tl.trans(K_block), input_precision="ieee")  # [Br, Bc]
        if EDGE:
            S_block = hide(S_block, first, j, stop, lower, upper, LOWER, UPPER)
        V_block = load_rows(V, j, stop, v_n, v_d, Bc, dv, DV, EDGE, NPU)  # [Bc, DV]
        m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block, scale)
    return m, l, O_block


@triton.jit(do_not_specialize=[  # one for all lengths
    "Nq", "Nk", "lower", "upper", "H", "G", "row_blocks", "blocks"])
def flash_attention_kernel(
        Q, K, V, O, m_all, l_all, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d,
        scale, Nq, Nk, lower, upper, H, G, row_blocks, blocks,
        d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, Br: tl.constexpr,
        Bc: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr, NPU: tl.constexpr):
    """Attend for the query blocks p, p + programs, ... of program p: m, l and O_block stay on chip.

    Q [B, H, Nq, d], K and V [B, H // G, Nk, d or dv] with the strides q_b, q_h, ...; O, m and l
    contiguous. D, DV: d and dv padded to a power of 2. lower, upper, LOWER, UPPER: see `tiles_of`.
    blocks: the number of query blocks of all heads, row_blocks each. A head's last one comes first:
    with causal it sees the most keys. NPU: programs take several blocks, and fill what is outside.
    """
    last, step = blocks, tl.num_programs(0)
    if not NPU:  # a program takes one block: as a loop it would take more registers
        last, step = tl.program_id(0) + 1, 1
    for block in range(tl.program_id(0), last, step):
        first = (row_blocks - 1 - block % row_blocks) * Br
        head = tl.cast(block // row_blocks, tl.int64)
        b, h = head // H, head % H
        Q_block = load_rows(Q + b * q_b + h * q_h, first, Nq, q_n, q_d, Br, d, D, True, NPU)
        K_head = K + b * k_b + h // G * k_h
        V_head = V + b * v_b + h // G * v_h

        start, whole, end, stop = tiles_of(
            first, tl.minimum(first + Br, Nq), Nk, lower, upper, Bc, LOWER, UPPER)
        m = tl.full([Br], LOWEST, tl.float32)
        l = tl.zeros([Br], tl.float32)
        O_block = tl.zeros([Br, DV], tl.float32)
        if LOWER:
            m, l, O_block = visit_tiles(
                m, l, O_block, Q_block, K_head, V_head, k_n, k_d, v_n, v_d, scale, first, start,
                whole, lower, upper, d, dv, D, DV, Bc, LOWER, UPPER, True, NPU)
        m, l, O_block = visit_tiles(
            m, l, O_block, Q_block, K_head, V_head, k_n, k_d, v_n, v_d, scale, first, whole,
            end, lower, upper, d, dv, D, DV, Bc, LOWER, UPPER, False, NPU)
        m, l, O_block = visit_tiles(
            m, l, O_block, Q_block, K_head, V_head, k_n, k_d, v_n, v_d, scale, first, end,
            stop, lower, upper, d, dv, D, DV, Bc, LOWER, UPPER, True, NPU)

        O_block = O_block / tl.where(l == 0, 1.0, l)[:, None]  # l = 0: the row saw no key
        store_rows(O + head * Nq * dv, first, Nq, O_block, Br, dv, DV)
        i = first + tl.arange(0, Br)
        tl.store(m_all + head * Nq + i, m, mask=i < Nq)
        tl.store(l_all + head * Nq + i, l, mask=i < Nq)


# `chips/compile_kernel.py` shows that those of Hopper spill nothing, and that those of Ascend,
# where warps and stages mean nothing, are the best that fit with the newest compiler.
ON_CUDA = {64: (32, 32, 8, 2), 128: (64, 32, 8, 2), 256: (32, 16, 8, 2)}
ON_NPU = {16: (128, 128), 32: (128, 64), 64: (256, 64), 128: (128, 128), 256: (32, 32)}
AT_EDGES = {16: (256, 64), 32: (256, 64), 64: (128, 128), 128: (128, 64), 256: (64, 64)}
TILES = {
    "hopper": {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 16, 8, 2)},
    "hopper float32": ON_CUDA,
    "cuda": {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (32, 32, 8, 2)},
    "cuda float32": ON_CUDA,
    "npu": ON_NPU,
    "npu edges": AT_EDGES,
    "npu float32": {**ON_NPU, 128: (64, 128)},
    "npu float32 edges": AT_EDGES,
}
tile_of = partial(triton_tools.tile_of, TILES)


def flash_attention_triton(Q, K, V, *, causal=False, q_start=None, window=None, scale=None,
                           return_lse=False, tile=None):
    """Return exact attention from one kernel launch, to train with: what stands until the backward
    is Q, K, V, O and two numbers a row.

    Q [..., Nq, d], K [..., Nk, d], V [..., Nk, dv] -> O [..., Nq, dv] in Q's dtype: float16,
    bfloat16 or float32; d and dv at most 256. Shapes, strides, grouped heads, causal, q_start,
    window, scale, return_lse and errors as in `flash_attention_forward`. Half types multiply P in
    V's dtype; float32 stays float32, without tf32. NaN or inf in V reaches each query of a tile in
    which some query sees that key. Equal input gives equal bits, the gradients' too. tile: (Br, Bc,
    num_warps, num_stages) of the three kernels; None: the first of the launcher's that fits each.
    Raises ValueError also for a device that Triton can't serve, TypeError for float64, RuntimeError
    for a second derivative.
    """
    refuse_transforms(Q, K, V)
    options = {"causal": causal, "q_start": q_start, "window": window, "scale": scale}
    scale = Visible(Q, K, V, **options).scale
    check_served(Q, V)
    check_tile(tile)
    Q, options["scale"] = above_0(Q, scale)
    if wants_gradient(Q, K, V):
        return _FlashAttention.apply(Q, K, V, options, return_lse, tile)
    O, m, l = forward(Q, K, V, options, tile)
    return (O, log_sum_exp(m, l)) if return_lse else O


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Q, K, V, options, return_lse, tile):
        O, m, l = forward(Q, K, V, options, tile)
        ctx.save_for_backward(Q, K, V, O, m, l)
        ctx.call = {**options, "tiles": (tile, tile)}
        return (O, log_sum_exp(m, l)) if return_lse else O

    @staticmethod
    def backward(ctx, dO, dL=None):
        if torch.is_grad_enabled():  # create_graph=True alone runs a backward so
            raise RuntimeError("flash_attention_triton has no second derivative: create_graph=True "
                               "is not supported, take standard_attention for it")
        gradients = flash_attention_triton_backward(dO, *ctx.saved_tensors, dL=dL, **ctx.call)
        return *gradients, None, None, None


def log_sum_exp(m, l):
    """Return L of m in base 2 and l."""
    return m * LN_2.value + l.log()


def forward(Q, K, V, options, tile=None):
    """Return O, and m in base 2 and l, [..., Nq] both, in float32."""
    if INTERPRETED and Q.dtype == torch.bfloat16:  # its products of bfloat16 are wrong
        O, m, l = forward(Q.float(), K.float(), V.float(), options, tile)
        return O.to(Q.dtype), m, l
    O = Q.new_empty(*Q.shape[:-1], V.shape[-1])
    m, l = (Q.new_empty(Q.shape[:-1], dtype=torch.float32) for _ in range(2))
    if m.numel():
        launch(flash_attention_kernel, TILES, Visible(Q, K, V, **options), (Q, K, V), (O, m, l),
               tile)
    return O, m, l
