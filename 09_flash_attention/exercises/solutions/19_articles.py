"""A solution of exercises/19_articles.py."""

import math

import torch


def moved(n, d, heads=1):
    scores, columns = heads * n * n, n * d  # of one N x N array and of one of Q, K, V, O
    elements = (2 * columns + scores) + 2 * scores + (scores + 2 * columns)
    return 2 * elements


def saving(N, d, Br, Bc):
    standard = 2 * N * N + N * d
    flash = N * d + Br * Bc + Br * d + 5 * Br
    return standard / flash


def update(m, d, O, S_j, V_j):
    m_j = S_j.max().item()
    P_j = torch.exp(S_j - m_j)  # [Bc], not yet divided
    m_new = max(m, m_j)
    old, new = math.exp(m - m_new) * d, math.exp(m_j - m_new)
    d_new = old + new * P_j.sum().item()
    return m_new, d_new, (old * O + new * (P_j @ V_j)) / d_new
