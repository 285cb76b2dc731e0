"""A solution of exercises/04_tiling.py."""

import math

import torch


def tiles(Nq, Nk, Br, Bc):
    Tr, Tc = math.ceil(Nq / Br), math.ceil(Nk / Bc)
    return Tr, Tc, Tr * Tc


def flash_attention(Q, K, V, Br, Bc):
    O = []
    for Q_block in Q.split(Br):  # [Br, d]
        m = torch.full_like(Q_block[:, :1], -torch.inf)  # [Br, 1]
        l = O_block = 0  # [Br, 1], [Br, dv]
        for K_block, V_block in zip(K.split(Bc), V.split(Bc)):  # [Bc, d], [Bc, dv]
            m, l, O_block = step(m, l, O_block, Q_block, K_block, V_block)
        O.append(O_block / l)
    return torch.cat(O)


def keys_outside(Q, K, V, Br, Bc):
    m = Q.new_full((len(Q), 1), -torch.inf)
    l, O = torch.zeros_like(m), Q.new_zeros(len(Q), V.shape[1])
    for K_block, V_block in zip(K.split(Bc), V.split(Bc)):
        for i in range(0, len(Q), Br):
            rows = slice(i, i + Br)
            m[rows], l[rows], O[rows] = step(m[rows], l[rows], O[rows], Q[rows], K_block, V_block)
    return O / l


def step(m, l, O_block, Q_block, K_block, V_block):
    S_block = Q_block @ K_block.T / Q_block.shape[1] ** 0.5  # [Br, Bc]
    m_new = torch.maximum(m, S_block.amax(dim=1, keepdim=True))  # [Br, 1]
    correction = torch.exp(m - m_new)  # [Br, 1]
    P_block = torch.exp(S_block - m_new)  # [Br, Bc]
    l = correction * l + P_block.sum(dim=1, keepdim=True)
    return m_new, l, correction * O_block + P_block @ V_block
