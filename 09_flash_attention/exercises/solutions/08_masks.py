"""A solution of exercises/08_masks.py."""

import math

import torch


def causal_mask(Nq, Nk):
    i, j = torch.arange(Nq)[:, None], torch.arange(Nk)
    return j <= Nk - Nq + i


def visited(Nq, Nk, Br, Bc):
    total = 0
    for i in range(0, Nq, Br):
        last = min(i + Br, Nq) - 1  # the block's last query
        keys = max(0, Nk - Nq + last + 1)  # that it sees
        total += math.ceil(keys / Bc)
    return total


def masked_attention(Q, K, V, mask, Bc):
    m = torch.full_like(Q[:, :1], torch.finfo(Q.dtype).min)  # [Nq, 1]
    l, O = torch.zeros_like(m), Q.new_zeros(len(Q), V.shape[1])
    for K_block, V_block, seen in zip(K.split(Bc), V.split(Bc), mask.split(Bc, dim=1)):
        S_block = (Q @ K_block.T / Q.shape[1] ** 0.5).masked_fill(~seen, -math.inf)  # [Nq, Bc]
        V_block = V_block.masked_fill(~seen.any(0).unsqueeze(1), 0)  # 0 * NaN would be NaN
        m_new = torch.maximum(m, S_block.amax(1, keepdim=True))
        correction, P_block = torch.exp(m - m_new), torch.exp(S_block - m_new)
        l = correction * l + P_block.sum(1, keepdim=True)
        O = correction * O + P_block @ V_block
        m = m_new
    return O / l.masked_fill(l == 0, 1)
