"""The bytes that each way to compute attention has to hold at its highest moment.

`bench.profile` measures the same, so that formula and measurement stand beside each other.
"""

import math
from dataclasses import replace


def sizes(case):
    """Return heads, key/value heads, Nq, Nk, d, dv, the dtype's bytes, and those of the scores."""
    (*lead, Nq, d), (*_, Nk, _), (*kv_lead, _, dv) = case.shapes
    width = case.dtype.itemsize
    return math.prod(lead), math.prod(kv_lead), Nq, Nk, d, dv, width, max(width, 4)


def taken(heads, kv_heads, at_once):
    """Return how many heads and key/value heads a tile takes."""
    return (heads * at_once // kv_heads, at_once) if at_once else (heads, kv_heads)


def masks(case):
    """Return how many bool masks the band of causal and window takes in a tile that it cuts."""
    window = case.window or (None, None)
    return (case.causal or window[1] is not None) + (window[0] is not None)


def forward_bytes(name, case, Br=1, Bc=1, at_once=None):
    """Return the peak of a forward, the result included; at_once: key/value heads, None is all.

    standard: S and P. flash: a tile each of S_block and O_block; Q_block too where the heads of a
    group become rows of one tile; and what is largest of five columns (m, m_new, correction, l, row
    sums), of two and the masks of a tile that causal or window cut, and for half types of two and
    the next K_block and V_block in float32; half types hold those of this tile and Q_block besides.
    fused: L. triton: m and l.
    """
    heads, kv_heads, Nq, Nk, d, dv, width, wide = sizes(case)
    half, grouped = width < wide, heads > kv_heads and Br < Nq
    result, L = heads * Nq * dv * width, heads * Nq * 4
    N_by_N = heads * Nq * Nk
    heads, kv_heads = taken(heads, kv_heads, at_once)
    column, kv_blocks = wide * heads * Br, wide * kv_heads * Bc * (d + dv) * half
    moment = max(5 * column, 2 * column + Br * Bc * masks(case),
                 2 * column + kv_blocks * (Nk > Bc)) + kv_blocks
    tiles = heads * Br * (Bc + dv + d * (half or grouped))
    beside = {
        "standard": N_by_N * (2 * wide + (width if half else 0)),
        "flash": wide * tiles + moment,
        "fused": L,
        "triton": 2 * L,
    }
    return result + beside[name]


def backward_bytes(name, case, Br=1, Bc=1, at_once=None, extra=None):
    """Return the peak of a forward and a backward, beside Q, K, V and dO.

    standard, in the softmax's backward: P, dP, dS, O and dV, and where causal or window hide keys
    the mask and a masked dS; for half types also what the forward kept in another dtype, Q, K and
    V, and not what a CPU adds that multiplies them in float32.
    triton: O, m, l, D, dQ, dK, dV.
    flash: O, m, l, dQ, dK, dV; two tiles of Br x Bc and their masks, dQ_block or dO * O, and D;
    where the heads of a group become rows of one tile or half types are widened, Q_block, dO_block,
    O_block, m and l too. Half types sum dK and dV in float32, and hold tiles of K and V beside
    those of the rows or, at the end, beside dK and dV: for them this is a bound.
    extra: see lab/extras.py. flash holds L, and for half types dL in float32; or two int64 numbers
    an entry of a tile, where dropout hashes, and one a row and a column. With a mask that learns or
    a score_mod this is a bound: the mask's gradient, copies of the rows and of a tile of K and V,
    in which rows and keys that see nothing are 0, and one tile, or eight for a score_mod of a few
    operators and its derivative. Of standard it is what stands without an extra.
    """
    heads, kv_heads, Nq, Nk, d, dv, width, wide = sizes(case)
    half = width < wide
    O, dQ, dK, dV = heads * Nq * dv, heads * Nq * d, kv_heads * Nk * d, kv_heads * Nk * dv
    if name == "standard":
        kept = wide * (dQ + dK) + width * dV if half else 0
        masked = Nq * Nk * (1 + wide * heads) if case.hides else 0
        return 3 * wide * heads * Nq * Nk + masked + width * (O + dV) + kept
    if name == "triton":
        return width * (O + dQ + dK + dV) + 3 * 4 * heads * Nq
    copied = half or heads > kv_heads and Br < Nq
    rows = max(d + 3 * dv, 2 * d + dv) + 3 if copied else max(d, dv) + 1
    held = width * (O + dQ) + wide * 2 * heads * Nq
    heads, kv_heads = taken(heads, kv_heads, at_once)
    held += wide * 2 * heads * Br * Bc + Br * Bc * masks(case)
    held += extra_bytes(case, extra, heads, kv_heads, Br, Bc)
    if not half:
        return held + width * (dK + dV) + wide * heads * Br * rows
    held += wide * (dK + dV + kv_heads * Bc * (d + dv))
    return held + max(width * (dK + dV), wide * (heads * Br * rows + kv_heads * Bc * (2 * d + dv)))


def extra_bytes(case, extra, heads, kv_heads, Br, Bc):
    """Return the bytes of `backward_bytes` that an extra adds to flash; heads: those of a tile."""
    all_heads, _, Nq, Nk, d, dv, width, wide = sizes(case)
    zeroed = wide * (heads * Br * (d + dv + max(d, dv) + 3) + kv_heads * Bc * (d + dv))
    return {
        None: 0,
        "L": wide * all_heads * Nq * (1 + (width < wide)),
        "dropout": 16 * heads * Br * Bc + 8 * (heads * Br + Br + Bc),
        "mask": wide * Nk + zeroed + wide * heads * Br * Bc,
        "softcap": zeroed + 8 * wide * heads * Br * Bc,
        "slopes": zeroed + 8 * wide * heads * Br * Bc,
    }[extra]


def split_bytes(case, splits, Br, Bc):
    """Return the peak of a split: flash's with a head a part, their m and l, and a Q for each.

    Beside them stand copies of a tile of K and V where `split_kv_attention` makes them.
    """
    heads, _, Nq, Nk, d, _, width, wide = sizes(case)
    more = {"heads": case.heads * splits, "kv_heads": (case.kv_heads or case.heads) * splits}
    parts = replace(case, Nk=max(1, Nk // splits), **more)
    Q_parts, m_l = heads * splits * Nq * d * width, 2 * heads * splits * Nq * wide
    return forward_bytes("flash", parts, Br, min(Bc, parts.Nk)) + Q_parts + m_l
