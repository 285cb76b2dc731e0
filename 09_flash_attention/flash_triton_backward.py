"""The backward in Triton: each tile of P is computed again, in on-chip memory.

    python flash_backward.py --mode verify      where Triton serves the device, it has rows there
    python flash_backward.py --mode speed
    TRITON_INTERPRET=1 python flash_backward.py --device cpu      checked on a CPU, slowly

After a launch for D one goes by query blocks and sums dQ, one by key blocks and sums dK and dV.
What is summed stays on chip and is written once, by one program, so equal input gives equal bits:
nothing is added to memory in an order that changes from run to run. The price is that S and dP are
computed twice. `gradient_step` is that of flash_backward.py, line by line; `flash_attention_triton`
of flash_triton.py trains through it. With a window, the Ascend compiler of CANN 8.5.0 crashes on
dQ_kernel in every tile; those of CANN 9.0.0 and later compile it (`bash scripts/compile.sh 910b`).
Source: FlashAttention-2 (arXiv 2307.08691), Algorithm 2.
"""

import sys
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab.triton_tools import (
    INTERPRETED, LN_2, check_served, check_tile, hide, launch, load_numbers, load_rows, store_rows,
    tiles_of)
from lab.visible import Visible

import torch
import triton
import triton.language as tl


@triton.jit
def gradient_step(S_block, Q_block, K_block, V_block, dO_block, m_block, l_block, D_block,
                  dQ_block, dK_block, dV_block, scale, KEYS: tl.constexpr):
    """Add what one tile gives to dQ, or with KEYS to dK and dV; dQ and dK still without the scale.

    S_block [Br, Bc]; m_block, l_block, D_block [Br, 1]. With KEYS the tile lies on its side,
    S_block [Bc, Br] and m_block [1, Br], so that P^T and dS^T are there as the products take them.
    In base 2: `scale` and m hold the factor log2(e).
    """
    P_block = tl.exp2(S_block * scale - m_block) * (1 / l_block)  # [Br, Bc]
    if KEYS:
        dV_block = tl.dot(P_block.to(dO_block.dtype), dO_block, dV_block,
                          input_precision="ieee")  # [Bc, dv], + P^T dO
        dP_block = tl.dot(V_block, tl.trans(dO_block), input_precision="ieee")  # [Bc, Br]
    else:
        dP_block = tl.dot(dO_block, tl.trans(V_block), input_precision="ieee")  # [Br, Bc], dO V^T
    dS_block = (P_block * (dP_block - D_block)).to(K_block.dtype)  # [Br, Bc]
    if KEYS:
        dK_block = tl.dot(dS_block, Q_block, dK_block, input_precision="ieee")  # [Bc, d], + dS^T Q
    else:
        dQ_block = tl.dot(dS_block, K_block, dQ_block, input_precision="ieee")  # [Br, d], + dS K
    return dQ_block, dK_block, dV_block


@triton.jit
def visit_keys(dQ_block, Q_block, dO_block, m_block, l_block, D_block, K, V, k_n, k_d, v_n, v_d,
               scale, first, start, stop, lower, upper, d: tl.constexpr, dv: tl.constexpr,
               D: tl.constexpr, DV: tl.constexpr, Bc: tl.constexpr, LOWER: tl.constexpr,
               UPPER: tl.constexpr, EDGE: tl.constexpr, NPU: tl.constexpr):
    """Take the keys from start to stop, tile by tile, for the rows from first on."""
    for j in range(start, stop, Bc):
        K_block = load_rows(K, j, stop, k_n, k_d, Bc, d, D, EDGE, NPU)  # [Bc, D]
        V_block = load_rows(V, j, stop, v_n, v_d, Bc, dv, DV, EDGE, NPU)  # [Bc, DV]
        S_block = tl.dot(Q_block, tl.trans(K_block), input_precision="ieee")  # [Br, Bc]
        if EDGE:
            S_block = hide(S_block, first, j, stop, lower, upper, LOWER, UPPER)
        dQ_block, _, _ = gradient_step(
            S_block, Q_block, K_block, V_block, dO_block, m_block[:, None], l_block[:, None],
            D_block[:, None], dQ_block, 0, 0, scale, False)
    return dQ_block


@triton.jit
def visit_queries(dK_block, dV_block, K_block, V_block, Q, dO, m, l, D_all, q_h, q_n, q_d, o_h, o_n,
                  o_d, scale, first, start, stop, Nq, G, lower, upper, d: tl.constexpr,
                  dv: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, Br: tl.constexpr,
                  LOWER: tl.constexpr, UPPER: tl.constexpr, EDGE: tl.constexpr, NPU: tl.constexpr):
    """Take the queries from start to stop of each head of the group, tile by tile, for the keys
    from first on. One loop for all heads: one loop in another takes registers.
    """
    tiles = tl.cdiv(tl.maximum(0, stop - start), Br)  # of a head
    for tile in range(0, G * tiles):
        g, i = tl.cast(tile // tiles, tl.int64), start + tile % tiles * Br
        Q_block = load_rows(Q + g * q_h, i, stop, q_n, q_d, Br, d, D, EDGE, NPU)  # [Br, D]
        dO_block = load_rows(dO + g * o_h, i, stop, o_n, o_d, Br, dv, DV, EDGE, NPU)  # [Br, DV]
        m_block = load_numbers(m + g * Nq, i, stop, Br, EDGE)
        l_block = load_numbers(l + g * Nq, i, stop, Br, EDGE)
        D_block = load_numbers(D_all + g * Nq, i, stop, Br, EDGE)
        S_block = tl.dot(K_block, tl.trans(Q_block), input_precision="ieee")  # [Bc, Br]
        if EDGE:
            S_block = hide(S_block, first, i, stop, -upper, -lower, UPPER, LOWER)
            l_block = tl.where(l_block == 0, 1.0, l_block)  # no queries: they divide 0
        _, dK_block, dV_block = gradient_step(
            S_block, Q_block, K_block, V_block, dO_block, m_block[None, :], l_block[None, :],
            D_block[None, :], 0, dK_block, dV_block, scale, True)
    return dK_block, dV_block


@triton.jit(do_not_specialize=["Nq", "Nk", "lower", "upper", "H", "G", "row_blocks", "blocks"])
def D_kernel(Q, K, V, dO, O, D_all, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, o_b,
             o_h, o_n, o_d, scale, Nq, Nk, lower, upper, H, G, row_blocks, blocks,
             d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
             Br: tl.constexpr, Bc: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
             NPU: tl.constexpr):
    """Add rowsum(dO * O) to D_all, which holds -dL. In dQ's kernel it would take the room of a
    larger tile. Its arguments are those of all kernels, of which it needs few.
    """
    last, step = blocks, tl.num_programs(0)
    if not NPU:
        last, step = tl.program_id(0) + 1, 1
    for block in range(tl.program_id(0), last, step):
        first, head = block % row_blocks * Br, tl.cast(block // row_blocks, tl.int64)
        dO_head = dO + head // H * o_b + head % H * o_h
        dO_block = load_rows(dO_head, first, Nq, o_n, o_d, Br, dv, DV, True, NPU).to(tl.float32)
        O_block = load_rows(O + head * Nq * dv, first, Nq, dv, 1, Br, dv, DV, True, NPU)
        D_block = load_numbers(D_all + head * Nq, first, Nq, Br, True)
        D_block += tl.sum(dO_block * O_block.to(tl.float32), 1)  # [Br]
        i = first + tl.arange(0, Br)
        tl.store(D_all + head * Nq + i, D_block, mask=i < Nq)


@triton.jit(do_not_specialize=["Nq", "Nk", "lower", "upper", "H", "G", "row_blocks", "blocks"])
def dQ_kernel(Q, K, V, dO, m, l, D_all, dQ, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h,
              v_n, v_d, o_b, o_h, o_n, o_d, scale, Nq, Nk, lower, upper, H, G, row_blocks, blocks,
              d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
              Br: tl.constexpr, Bc: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
              NPU: tl.constexpr):
    """Sum dQ for the query blocks p, p + programs, ... of program p, as the forward walks them.

    Its arguments, and those of `dK_dV_kernel`, are the forward's, and dO [B, H, Nq, dv] with the
    strides o_b, o_h, ...; m (in base 2), l, D_all and the gradients contiguous.
    """
    last, step = blocks, tl.num_programs(0)
    if not NPU:  # a program takes one block: as a loop it would take more registers
        last, step = tl.program_id(0) + 1, 1
    for block in range(tl.program_id(0), last, step):
        first = (row_blocks - 1 - block % row_blocks) * Br
        head = tl.cast(block // row_blocks, tl.int64)
        b, h = head // H, head % H
        Q_block = load_rows(Q + b * q_b + h * q_h, first, Nq, q_n, q_d, Br, d, D, True, NPU)
        dO_block = load_rows(dO + b * o_b + h * o_h, first, Nq, o_n, o_d, Br, dv, DV, True, NPU)
        m_block = load_numbers(m + head * Nq, first, Nq, Br, True)
        l_block = load_numbers(l + head * Nq, first, Nq, Br, True)
        blind = l_block == 0  # the row saw no key
        l_block = tl.where(blind, 1.0, l_block)
        D_block = load_numbers(D_all + head * Nq, first, Nq, Br, True)

        K_head = K + b * k_b + h // G * k_h
        V_head = V + b * v_b + h // G * v_h
        start, whole, end, stop = tiles_of(first, tl.minimum(first + Br, Nq), Nk, lower, upper, Bc,
                                           LOWER, UPPER)
        dQ_block = tl.zeros([Br, D], tl.float32)
        if LOWER:
            dQ_block = visit_keys(
                dQ_block, Q_block, dO_block, m_block, l_block, D_block, K_head, V_head, k_n, k_d,
                v_n, v_d, scale, first, start, whole, lower, upper, d, dv, D, DV, Bc, LOWER, UPPER,
                True, NPU)
        dQ_block = visit_keys(
            dQ_block, Q_block, dO_block, m_block, l_block, D_block, K_head, V_head, k_n, k_d,
            v_n, v_d, scale, first, whole, end, lower, upper, d, dv, D, DV, Bc, LOWER, UPPER,
            False, NPU)
        dQ_block = visit_keys(
            dQ_block, Q_block, dO_block, m_block, l_block, D_block, K_head, V_head, k_n, k_d,
            v_n, v_d, scale, first, end, stop, lower, upper, d, dv, D, DV, Bc, LOWER, UPPER,
            True, NPU)
        dQ_block = tl.where(blind[:, None], 0.0, dQ_block * (scale * LN_2))
        store_rows(dQ + head * Nq * d, first, Nq, dQ_block, Br, d, D)


@triton.jit(do_not_specialize=["Nq", "Nk", "lower", "upper", "H", "G", "key_blocks", "blocks"])
def dK_dV_kernel(Q, K, V, dO, m, l, D_all, dK, dV, q_b, q_h, q_n, q_d, k_b, k_h, k_n, k_d, v_b, v_h,
                 v_n, v_d, o_b, o_h, o_n, o_d, scale, Nq, Nk, lower, upper, H, G, key_blocks,
                 blocks, d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
                 Br: tl.constexpr, Bc: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
                 NPU: tl.constexpr):
    """Sum dK and dV for the key blocks p, p + programs, ... of program p.

    blocks: of all B * H // G heads, key_blocks each. The query heads of a group are taken in turn.
    """
    last, step = blocks, tl.num_programs(0)
    if not NPU:  # a program takes one block: as a loop it would take more registers
        last, step = tl.program_id(0) + 1, 1
    for block in range(tl.program_id(0), last, step):
        first = block % key_blocks * Bc
        head = tl.cast(block // key_blocks, tl.int64)
        b, h = head // (H // G), head % (H // G)
        K_block = load_rows(K + b * k_b + h * k_h, first, Nk, k_n, k_d, Bc, d, D, True, NPU)
        seen = Nk  # of a V that no query sees, NaN may not reach dK: its P is 0, and 0 * NaN is NaN
        if UPPER:
            seen = tl.minimum(Nk, tl.maximum(first, Nq + upper))
        V_block = load_rows(V + b * v_b + h * v_h, first, seen, v_n, v_d, Bc, dv, DV, True, NPU)
        if LOWER:
            j = tl.arange(0, Bc).to(tl.float32)  # as floats: see `hide`
            V_block = tl.where((j >= tl.cast(lower - first, tl.float32))[:, None], V_block, 0.0)
        start, whole, end, stop = tiles_of(first, tl.minimum(first + Bc, Nk), Nq, -upper, -lower,
                                           Br, UPPER, LOWER)
        dK_block = tl.zeros([Bc, D], tl.float32)
        dV_block = tl.zeros([Bc, DV], tl.float32)
        Q_head, dO_head, at = Q + b * q_b + h * G * q_h, dO + b * o_b + h * G * o_h, head * G * Nq
        if UPPER:
            dK_block, dV_block = visit_queries(
                dK_block, dV_block, K_block, V_block, Q_head, dO_head, m + at, l + at, D_all + at,
                q_h, q_n, q_d, o_h, o_n, o_d, scale, first, start, whole, Nq, G, lower, upper, d,
                dv, D, DV, Br, LOWER, UPPER, True, NPU)
        dK_block, dV_block = visit_queries(
            dK_block, dV_block, K_block, V_block, Q_head, dO_head, m + at, l + at, D_all + at,
            q_h, q_n, q_d, o_h, o_n, o_d, scale, first, whole, end, Nq, G, lower, upper, d,
            dv, D, DV, Br, LOWER, UPPER, False, NPU)
        dK_block, dV_block = visit_queries(
            dK_block, dV_block, K_block, V_block, Q_head, dO_head, m + at, l + at, D_all + at,
            q_h, q_n, q_d, o_h, o_n, o_d, scale, first, end, stop, Nq, G, lower, upper, d,
            dv, D, DV, Br, LOWER, UPPER, True, NPU)
        store_rows(dK + head * Nk * d, first, Nk, dK_block * (scale * LN_2), Bc, d, D)
        store_rows(dV + head * Nk * dv, first, Nk, dV_block, Bc, dv, DV)


# As in flash_triton.py. What runs on chip beside each other is more than there.
DQ_ON_CUDA = {64: (32, 32, 8, 2), 128: (16, 16, 8, 1), 256: (16, 16, 8, 1)}
DQ_TILES = {
    "hopper": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (32, 32, 8, 1)},
    "hopper float32": DQ_ON_CUDA,
    "cuda": {64: (64, 64, 8, 2), 128: (64, 32, 8, 2), 256: (32, 16, 8, 1)},
    "cuda float32": DQ_ON_CUDA,
    "npu": {64: (256, 64), 128: (128, 64), 256: (64, 32)},
    "npu edges": {64: (128, 128), 128: (128, 64), 256: (64, 32)},
    "npu window": {64: (128, 64), 128: (128, 64), 256: (64, 32)},
}
DK_DV_ON_CUDA = {64: (32, 32, 8, 2), 128: (16, 32, 8, 1), 256: (16, 16, 8, 1)}
DK_DV_TILES = {
    "hopper": {64: (64, 128, 8, 2), 128: (32, 64, 8, 2), 256: (32, 32, 8, 2)},
    "hopper float32": DK_DV_ON_CUDA,
    "cuda": {64: (64, 64, 8, 2), 128: (32, 64, 8, 2), 256: (16, 32, 8, 1)},
    "cuda float32": DK_DV_ON_CUDA,
    "npu": {64: (128, 128), 128: (64, 64), 256: (32, 32)},
    "npu window": {64: (64, 128), 128: (64, 64), 256: (32, 32)},
}


@torch.no_grad()
def flash_attention_triton_backward(dO, Q, K, V, O, m, l, *, dL=None, tiles=(None, None),
                                    **options):
    """Return dQ, dK, dV: the gradients of a loss whose gradient with respect to O is dO.

    dO [..., Nq, dv], with any strides; dL [..., Nq] of L, or None. O, m (in base 2) and l are what
    the forward kernel gave for Q, K, V and the same options: causal, q_start, window, scale. The
    derivation stands in flash_backward.py. tiles: those of dQ's kernel and of dK and dV's, (Br, Bc,
    num_warps, num_stages) or None. Sums are float32. A row that saw no key passes 0 on.
    """
    visible = Visible(Q, K, V, **options)
    if visible.scale <= 0:
        raise ValueError(f"scale must be above 0 for the kernels, got {visible.scale}")
    check_served(Q, V)
    for tile in tiles:
        check_tile(tile)
    if INTERPRETED and Q.dtype == torch.bfloat16:  # its products of bfloat16 are wrong
        wide = flash_attention_triton_backward(*(x.float() for x in (dO, Q, K, V, O)), m, l, dL=dL,
                                               tiles=tiles, **options)
        return tuple(x.to(Q.dtype) for x in wide)
    D = torch.zeros_like(m) if dL is None else -dL.float()
    dQ, dK, dV = (x.new_zeros(x.shape) for x in (Q, K, V))
    if m.numel() and visible.Nk:
        O, m, l, D = (x.contiguous() for x in (O, m, l, D))
        strided = Q, K, V, dO
        launch(D_kernel, {}, visible, strided, (O, D), (16, 16, 4, 1))
        launch(dQ_kernel, DQ_TILES, visible, strided, (m, l, D, dQ), tiles[0])
        launch(dK_dV_kernel, DK_DV_TILES, visible, strided, (m, l, D, dK, dV), tiles[1],
               by_keys=True)
    return dQ, dK, dV
