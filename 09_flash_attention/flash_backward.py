"""FlashAttention, backward: training in O(N) memory, by computing each tile of P a second time.

python flash_backward.py --mode verify      are the gradients those of autograd?
python flash_backward.py --mode memory      what does a forward and a backward hold?
python flash_backward.py --mode speed       what do they cost?

Autograd through standard attention keeps P, N x N, from the forward to the backward. Here the forward
keeps O and L, and `gradient_step` has P again from L, a tile at a time. The derivation is in
`flash_attention_backward`. Sources: FlashAttention-2 (arXiv 2307.08691), Algorithm 2; FlashAttention
(2205.14135), appendix B.2.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from flash_attention import (  # first: finds `common`
    MemoryRow,
    SpeedRow,
    _assert_agree,
    _oracle,
    cli,
    exp_,
    flash_attention_forward,
    score_blocks,
    standard_attention,
)
from cases import VERIFY_CASES, cases_of, dtype_name, parser, verify_cases
from common.device import choose, describe, free_bytes
from common.memory import measure_peak
from common.report import console, mib, plot_curves, print_table, progress, write_json
from common.timing import count_launches, median_ratio, time_in_turn
from visible import Visible

import torch

# ---- The algorithm


def gradient_step(
    S_block, Q_block, K_block, V_block, dO_block, L_block, D_block, dQ_block, dK_block, dV_block
):
    """Add what one tile gives to dQ, dK and dV, the first two without their factor `scale`.

    S_block [X, Br, Bc]: the tile's scores, overwritten. Q_block, dQ_block [X, Br, d]. K_block,
    dK_block [X, Bc, d]. V_block, dV_block [X, Bc, dv]. dO_block [X, Br, dv]. L_block, D_block
    [X, Br, 1]. Source: FlashAttention-2, Algorithm 2, lines 11 to 16.
    """
    P_block = exp_(S_block.sub_(L_block))  # [X, Br, Bc]
    dV_block.baddbmm_(P_block.transpose(1, 2), dO_block)  # [X, Bc, dv] += P^T dO
    dS_block = P_block.mul_((dO_block @ V_block.transpose(1, 2)).sub_(D_block))  # P * (dO V^T - D)
    dQ_block.baddbmm_(dS_block, K_block)  # [X, Br, d] += dS K
    dK_block.baddbmm_(dS_block.transpose(1, 2), Q_block)  # [X, Bc, d] += dS^T Q


def flash_attention_backward(
    dO,
    Q,
    K,
    V,
    O,
    L,
    Br=64,
    Bc=64,
    *,
    causal=False,
    q_start=None,
    window=None,
    scale=None,
    attn_mask=None,
):
    """Return dQ, dK, dV from dO: the gradients of sum(dO * O) with respect to Q, K and V.

    With S = Q K^T * scale, P = softmax(S) and O = P V, each row of which is on its own:

        dV = P^T dO             O is linear in V
        dP = dO V^T             and in P
        dS = P * (dP - D)       softmax: dS_ij = P_ij (dP_ij - sum_k P_ik dP_ik), and the sum, over
        D  = rowsum(dO * O)     all keys, is sum_k P_ik (dO_i . V_k) = dO_i . O_i: one number a row
        dQ = dS K * scale       S is linear in Q
        dK = dS^T Q * scale     and in K

    P of any tile is exp(S - L), for L is the log of the sum that softmax divides by: no tile waits
    for another, and none is kept. D has length N; where the paper's Algorithm 2 says d, it slips.

    dO [..., Nq, dv] with any strides; O and L from `flash_attention_forward(return_lse=True)`, with
    the same further arguments. The gradients have the shapes and dtypes of Q, K and V. float16 and
    bfloat16 are summed in float32, also over the query heads that read one key/value head. A row
    that saw no key passes on 0. Equal input gives equal bits. The tiles are walked as in the
    forward, keys inside; the paper has queries inside, so that dK and dV stay on chip.
    """
    visible = Visible(
        Q, K, V, causal=causal, q_start=q_start, window=window, scale=scale, attn_mask=attn_mask
    )
    dQ = Q.new_empty(Q.shape)
    dK, dV = (
        x.new_zeros(visible.X, visible.Nk, x.shape[-1], dtype=visible.dtype) for x in (K, V)
    )  # [X, Nk, d], [X, Nk, dv]
    scratch = Q.new_empty(
        Q.shape[:-2].numel() * min(Br, visible.Nq) * min(Bc, visible.Nk), dtype=visible.dtype
    )
    for rows in visible.query_blocks(Br):
        Q_block = visible.query_block(rows)  # [X, G*Br, d]
        L_block = _row_block(visible, L.unsqueeze(-1), rows)  # [X, G*Br, 1]
        dead = L_block == -math.inf  # with L at +inf, P is 0
        L_block = L_block.masked_fill(dead, math.inf)
        dO_block = _row_block(visible, dO, rows).masked_fill(dead, 0)  # [X, G*Br, dv]
        D_block = (dO_block * _row_block(visible, O, rows)).sum(-1, keepdim=True)  # [X, G*Br, 1]
        dQ_block = torch.zeros_like(Q_block, memory_format=torch.contiguous_format)
        for cols, S_block, V_block in score_blocks(visible, K, V, rows, Bc, scratch):
            K_block = visible.key_block(K, cols)  # [X, Bc, d]
            if attn_mask is not None:  # a NaN in a key that no query sees: 0 * NaN is NaN
                unseen = (S_block == -math.inf).all(-2)  # [X, Bc]
                K_block = K_block.masked_fill(unseen.unsqueeze(-1), 0)
            gradient_step(
                S_block, Q_block, K_block, V_block, dO_block, L_block, D_block,
                dQ_block, dK[:, cols], dV[:, cols],
            )  # fmt: skip
        visible.store(dQ, rows, dQ_block.mul_(visible.scale))
    dK.mul_(visible.scale)
    return dQ, dK.to(K.dtype).view(K.shape), dV.to(V.dtype).view(V.shape)


def _row_block(visible, x, rows):
    """Return rows of x [..., Nq, ?] in the dtype of the scores, [X, G*Br, ?], as `query_block` of Q."""
    block = visible.grouped(x)[..., rows, :].to(visible.dtype)
    return block.reshape(visible.X, visible.G * (rows.stop - rows.start), x.shape[-1])
