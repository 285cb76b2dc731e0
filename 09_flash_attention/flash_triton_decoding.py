"""Decoding as two Triton kernels: keys split over programs, read as they lie or through a table.

    python flash_decoding.py --mode speed      where Triton serves the device, it has rows there
    python flash_pages.py --mode verify
    TRITON_INTERPRET=1 python flash_pages.py --device cpu      checked on a CPU, slowly

One query of few heads has too few rows to fill a chip, so `split_kernel` gives each program a part
of the keys, and `merge_kernel` merges the parts of a row. The queries of the heads that share a
key/value head are rows of one tile: each key is read once for all of them.
A part has a fixed number of keys, and a row's parts are merged in their order. So a row has the
same bits in any batch, and with pages those that it has without.
Sources: FlashDecoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html), PagedAttention
(arXiv 2309.06180).
"""

import math
import sys
from functools import partial
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import triton_tools
from lab.caches import check_paged
from lab.triton_tools import (
    AS_NPU, INTERPRETED, LN_2, LOG2_E, LOWEST, above_0, adjacent, band, check_served, check_tile,
    current, launch_first_that_fits, load_numbers, load_rows, padded, platform_of, programs,
    tiles_from)
from lab.visible import Visible, batched, refuse_gradients
from flash_triton import online_softmax_step

import torch
import triton
import triton.language as tl


@triton.jit
def visit_keys(m, l, O_block, Q_block, i, K, V, table, page, k_b, k_n, k_d, v_b, v_n, v_d, scale,
               start, stop, lower, upper, d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr,
               DV: tl.constexpr, Bc: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
               PAGED: tl.constexpr, EDGE: tl.constexpr, NPU: tl.constexpr):
    """Take the keys from start to stop, tile by tile; at the edge hide what a row does not see.

    i [Br]: the query of each row; it sees the keys from i + lower to i + upper. PAGED: key j is row
    j % page of page table[j // page] of K and V; a tile lies on one page.
    """
    for j in range(start, stop, Bc):
        K_rows, V_rows, first = K, V, j
        if PAGED:
            at = tl.load(table + j // page).to(tl.int64)
            K_rows, V_rows, first = K + at * k_b, V + at * v_b, j % page
        last = first + stop - j
        K_block = load_rows(K_rows, first, last, k_n, k_d, Bc, d, D, EDGE, NPU)  # [Bc, D]
        S_block = tl.dot(Q_block, tl.trans(K_block), input_precision="ieee")  # [Br, Bc]
        V_block = load_rows(V_rows, first, last, v_n, v_d, Bc, dv, DV, EDGE, NPU)  # [Bc, DV]
        if EDGE:  # compared as floats, as in `hide`
            key = tl.arange(0, Bc).to(tl.float32)
            most = tl.cast(stop - j - 1, tl.float32)
            if UPPER:
                most = tl.minimum(most, i + tl.cast(upper - j, tl.float32))[:, None]
            seen = key[None, :] <= most
            if LOWER:
                least = tl.cast(lower - j, tl.float32)
                seen = seen & (key[None, :] >= (i + least)[:, None])
                V_block = tl.where(key[:, None] >= least, V_block, 0.0)  # 0 * NaN would be NaN
            S_block = tl.where(seen, S_block, float("-inf"))
        m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block, scale)
    return m, l, O_block


@triton.jit(do_not_specialize=[
    "page", "t_b", "Nq", "Nk", "lower", "upper", "Hkv", "rows", "row_blocks", "splits", "blocks"])
def split_kernel(
        Q, K, V, table, lengths, O_parts, m_parts, l_parts,
        k_b, k_h, k_n, k_d, v_b, v_h, v_n, v_d, t_b, page,
        scale, Nq, Nk, lower, upper, Hkv, rows, row_blocks, splits, blocks,
        d: tl.constexpr, dv: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, Br: tl.constexpr,
        Bc: tl.constexpr, SPLIT: tl.constexpr, LOWER: tl.constexpr, UPPER: tl.constexpr,
        PAGED: tl.constexpr, NPU: tl.constexpr):
    """Attend to one part of the keys: O, not yet divided by l, m and l of a block of rows.

    Q [B, Hkv, rows, d], contiguous: row g * Nq + i is query i of head g of the group. K, V: without
    PAGED [B, Hkv, Nk, d or dv], with it [P, Hkv, page, d or dv] and table [B, pages], lengths [B].
    O_parts [B, Hkv, rows, splits, dv] and m_parts, l_parts [B, Hkv, rows, splits] float32,
    contiguous. Query i sees the keys from i + lower to i + upper, both counted from key Nk.
    """
    last, step = blocks, tl.num_programs(0)
    if not NPU:  # a program takes one block: as a loop it would take more registers
        last, step = tl.program_id(0) + 1, 1
    for block in range(tl.program_id(0), last, step):
        split = block % splits
        first = block // splits % row_blocks * Br
        head = tl.cast(block // splits // row_blocks, tl.int64)
        b, h = head // Hkv, head % Hkv
        N, table_b, K_head, V_head = Nk, table, K + h * k_h, V + h * v_h
        if PAGED:
            N, table_b = tl.load(lengths + b).to(tl.int32), table + b * t_b
        else:
            K_head, V_head = K_head + b * k_b, V_head + b * v_b
        low, up = N + lower, N + upper  # the keys that query 0 sees
        start = split * SPLIT
        if LOWER:  # the first part is the one with the first key that is seen
            start += tl.maximum(0, low) // SPLIT * SPLIT
        stop = tl.minimum(N, start + SPLIT)
        whole, end = start, stop  # each row sees all keys of the tiles from whole to end
        if UPPER:
            end, stop = tl.minimum(stop, up + 1), tl.minimum(stop, up + Nq)
        if LOWER:
            start = tl.maximum(start, tl.maximum(0, low) // Bc * Bc)
            whole = tl.maximum(start, tl.cdiv(tl.maximum(0, low + Nq - 1), Bc) * Bc)
        end = whole + tl.maximum(0, end - whole) // Bc * Bc

        i = ((first + tl.arange(0, Br)) % Nq).to(tl.float32)
        Q_block = load_rows(Q + head * rows * d, first, rows, d, 1, Br, d, D, True, NPU)  # [Br, D]
        m = tl.full([Br], LOWEST, tl.float32)
        l = tl.zeros([Br], tl.float32)
        O_block = tl.zeros([Br, DV], tl.float32)
        if LOWER:
            m, l, O_block = visit_keys(
                m, l, O_block, Q_block, i, K_head, V_head, table_b, page, k_b, k_n, k_d, v_b, v_n,
                v_d, scale, start, tl.minimum(whole, stop), low, up, d, dv, D, DV, Bc, LOWER, UPPER,
                PAGED, True, NPU)
        m, l, O_block = visit_keys(
            m, l, O_block, Q_block, i, K_head, V_head, table_b, page, k_b, k_n, k_d, v_b, v_n, v_d,
            scale, whole, end, low, up, d, dv, D, DV, Bc, LOWER, UPPER, PAGED, False, NPU)
        m, l, O_block = visit_keys(
            m, l, O_block, Q_block, i, K_head, V_head, table_b, page, k_b, k_n, k_d, v_b, v_n, v_d,
            scale, end, stop, low, up, d, dv, D, DV, Bc, LOWER, UPPER, PAGED, True, NPU)

        r = first + tl.arange(0, Br)
        part = (head * rows + r) * splits + split  # [Br]
        column = tl.arange(0, DV)[None, :]
        tl.store(m_parts + part, m, mask=r < rows)
        tl.store(l_parts + part, l, mask=r < rows)
        tl.store(O_parts + (part[:, None] * dv + column), O_block,
                 mask=(r < rows)[:, None] & (column < dv))


@triton.jit(do_not_specialize=["rows", "splits"])
def merge_kernel(O_parts, m_parts, l_parts, O, L, rows, splits, dv: tl.constexpr,
                 DV: tl.constexpr, PARTS: tl.constexpr, NPU: tl.constexpr):
    """Merge the parts of one row after the other: the online softmax, whose tile is PARTS parts.

    O_parts [rows, splits, dv], m_parts and l_parts [rows, splits], O [rows, dv] and L [rows], all
    contiguous. A part that saw no key, l = 0, changes no bit.
    """
    last, step = rows, tl.num_programs(0)
    if not NPU:
        last, step = tl.program_id(0) + 1, 1
    for number in range(tl.program_id(0), last, step):
        row = tl.cast(number, tl.int64)
        m = tl.full([1], LOWEST, tl.float32)
        l = tl.zeros([1], tl.float32)
        O_row = tl.zeros([DV], tl.float32)
        for p in range(0, splits, PARTS):
            l_part = load_numbers(l_parts + row * splits, p, splits, PARTS, True)
            m_part = load_numbers(m_parts + row * splits, p, splits, PARTS, True)
            m_part = tl.where(l_part == 0, LOWEST, m_part)
            O_part = load_rows(O_parts + row * splits * dv, p, splits, dv, 1, PARTS, dv, DV, True,
                               NPU)  # [PARTS, DV]
            m_new = tl.maximum(m, tl.max(m_part, 0))
            correction = tl.exp2(m - m_new)
            weight = tl.exp2(m_part - m_new)  # [PARTS]
            l = l * correction + tl.sum(weight * l_part, 0)
            O_row = O_row * correction + tl.sum(weight[:, None] * O_part, 0)  # [DV]
            m = m_new
        blind, divisor = l == 0, tl.where(l == 0, 1.0, l)  # blind: the row saw no key
        column = tl.arange(0, DV)
        tl.store(O + (row * dv + column), (O_row / divisor).to(O.dtype.element_ty),
                 mask=column < dv)
        tl.store(L + row + tl.arange(0, 1),
                 tl.where(blind, float("-inf"), m * LN_2 + tl.log(divisor)))


SPLIT_KEYS, PARTS = 256, 16  # keys of a part; parts that are merged at a time
ON_CUDA = {64: (32, 32, 4, 2), 128: (32, 32, 8, 2), 256: (16, 16, 4, 2)}
TILES = {
    "hopper": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (32, 32, 4, 2)},
    "hopper float32": ON_CUDA,
    "cuda": {64: (64, 64, 4, 2), 128: (32, 64, 4, 2), 256: (16, 32, 4, 2)},
    "cuda float32": ON_CUDA,
    "npu": {64: (64, 128), 128: (64, 128), 256: (32, 64)},
    "npu float32": {64: (64, 128), 128: (64, 64), 256: (32, 32)},
}
tile_of = partial(triton_tools.tile_of, TILES)


def split_kv_attention_triton(Q, K, V, *, causal=False, q_start=None, window=None, scale=None,
                              return_lse=False, split=SPLIT_KEYS, tile=None):
    """Return attention of a few queries to many keys, split over programs and merged.

    Q [..., Nq, d], K [..., Nk, d], V [..., Nk, dv] -> O [..., Nq, dv] in Q's dtype: float16,
    bfloat16 or float32; d and dv at most 256. K and V may be views of longer buffers. Shapes, heads
    in groups, causal, q_start, window, scale, return_lse and errors as in
    `flash_attention_forward`. The parts are float32, and stand beside the result: O, m and l of
    each row, once for every `split` keys.

    split: the keys of a part, a power of 2 from 128 to 4096. A row's bits depend on it, on Bc and
    on the row's own keys, not on what else is in the batch. tile: (Br, Bc, num_warps, num_stages),
    where Bc is at most split; None: the first of the launcher's that fits.
    Raises ValueError also for a device that Triton can't serve and for an input that wants a
    gradient, TypeError for float64.
    """
    visible = Visible(Q, K, V, causal, q_start, window, scale)
    refuse_gradients(Q=Q, K=K, V=V)
    lower, upper, LOWER, UPPER = band(visible)
    O, L = attend(batched(Q), batched(K), batched(V), visible.Nk, lower - visible.Nk,
                  upper - visible.Nk, LOWER, UPPER, visible.scale, split, tile)
    O, L = O.view(*Q.shape[:-1], V.shape[-1]), L.view(Q.shape[:-1])
    return (O, L) if return_lse else O


def paged_attention_triton(Q, K_pages, V_pages, block_table, lengths, *, window=None, scale=None,
                           return_lse=False, split=SPLIT_KEYS, tile=None):
    """Return causal attention of each sequence's last tokens to all its tokens, from pages.

    Arguments, result and errors are those of `paged_attention` of flash_pages.py; dtypes, d, dv,
    split and tile those of `split_kv_attention_triton`. A page holds a multiple of 16 keys, and Bc
    is the largest power of 2 up to the tile's that divides it: where Bc is the same, so are the
    bits. The table and the lengths are read to the host and checked, and the call waits for that.
    """
    lengths_read = check_paged(Q, K_pages, V_pages, block_table, lengths, window, scale)[1]
    refuse_gradients(Q=Q, K_pages=K_pages, V_pages=V_pages)
    page, Nq = K_pages.shape[1], Q.shape[2]
    if page % 16:
        raise ValueError(f"K_pages must have a multiple of 16 keys a page, got {page}")
    left = window[0] if window else None
    LOWER, left = left is not None, min(left or 0, 2**30)  # int32 holds it
    scale = 1 / math.sqrt(Q.shape[-1]) if scale is None else float(scale)
    K, V = (x.transpose(1, 2) for x in (K_pages, V_pages))  # [P, Hkv, page, d or dv]
    O, L = attend(Q, K, V, max(lengths_read, default=0), -Nq - left, -Nq, LOWER, Nq > 1, scale,
                  split, tile, block_table.contiguous(), lengths.contiguous())
    return (O, L) if return_lse else O


def held_bytes(case):
    """Return the peak of a split of all keys, the result included: O, L, and O, m, l of a part."""
    (*lead, Nq, _), (*_, Nk, _), (*_, dv) = case.shapes
    rows, splits = math.prod(lead) * Nq, triton.cdiv(Nk, SPLIT_KEYS)
    return rows * (dv * case.dtype.itemsize + 4 + 4 * splits * (dv + 2))


def check_split(split, tile):
    """Raise ValueError for keys of a part that are not taken, or a tile that has more."""
    if type(split) is not int or not 128 <= split <= 4096 or split & (split - 1):
        raise ValueError(f"split must be a power of 2 from 128 to 4096, got {split!r}")
    if tile and tile[1] > split:
        raise ValueError(f"tile must have Bc of at most split, {split}, got {tile!r}")


def attend(Q, K, V, Nk, lower, upper, LOWER, UPPER, scale, split, tile, table=None, lengths=None):
    """Return O [B, H, Nq, dv] and L [B, H, Nq] by both kernels; the arguments are theirs.

    Nk: with a table the length of the longest sequence.
    """
    check_served(Q, V)
    check_tile(tile)
    check_split(split, tile)
    if INTERPRETED and Q.dtype == torch.bfloat16:  # its products of bfloat16 are wrong
        O, L = attend(Q.float(), K.float(), V.float(), Nk, lower, upper, LOWER, UPPER, scale, split,
                      tile, table, lengths)
        return O.to(Q.dtype), L
    Q, scale = above_0(Q, scale)
    (B, H, Nq, d), (_, Hkv, page, _), dv = Q.shape, K.shape, V.shape[-1]
    splits = triton.cdiv(Nk, split)
    if LOWER:  # so many parts hold all keys that some query sees
        splits = min(splits, triton.cdiv(upper - lower + Nq - 1, split) + 1)
    number = partial(Q.new_empty, dtype=torch.float32)
    O, L = Q.new_empty(B, H, Nq, dv), number(B, H, Nq)
    if not L.numel():
        return O, L
    parts = number(B, H, Nq, splits, dv), number(B, H, Nq, splits), number(B, H, Nq, splits)
    platform, rows = platform_of(Q.device), H // Hkv * Nq
    Q, K, V = Q.contiguous(), adjacent(K, platform), adjacent(V, platform)
    t_b, NPU = (0 if table is None else table.stride(0)), platform in AS_NPU

    def launch_in(tile):
        Br, Bc, num_warps, num_stages = tile
        Br = min(Br, padded(rows))
        if table is not None:
            Bc = min(Bc, page & -page)
        row_blocks = triton.cdiv(rows, Br)
        blocks = B * Hkv * row_blocks * splits
        split_kernel[(min(blocks, programs(Q.device)),)](
            Q, K, V, table, lengths, *parts, *K.stride(), *V.stride(), t_b, page, scale * LOG2_E,
            Nq, Nk, lower, upper, Hkv, rows, row_blocks, splits, blocks, d, dv, padded(d),
            padded(dv), Br, Bc, split, LOWER, UPPER, table is not None, NPU, num_warps=num_warps,
            num_stages=num_stages)

    with current(Q.device):
        if splits and tile:
            launch_in(tile)
        elif splits:
            first = tile_of(platform, Q.dtype, d, dv, LOWER or UPPER)
            launch_first_that_fits(launch_in, tiles_from(first), (
                split_kernel, platform, Q.dtype, padded(d), padded(dv), LOWER, UPPER,
                padded(rows), page, table is None))
        merge_kernel[(min(B * H * Nq, programs(Q.device)),)](
            *parts, O, L, B * H * Nq, splits, dv, padded(dv), PARTS, NPU, num_warps=4, num_stages=1)
    return O, L
