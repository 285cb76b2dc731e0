"""A solution of exercises/09_decoding.py."""

import torch


def cache_bytes(layers, Hkv, d, tokens, bytes_each):
    return 2 * layers * Hkv * d * tokens * bytes_each


def merge(O_parts, m_parts, l_parts):
    m_parts = m_parts.masked_fill(l_parts == 0, torch.finfo(m_parts.dtype).min)
    m = m_parts.max()
    weight = torch.exp(m_parts - m) * l_parts  # [P]
    l = weight.sum()
    return weight / l.masked_fill(l == 0, 1) @ O_parts, m, l


def paged_attention(q, K_pages, V_pages, table, length):
    page, d = K_pages.shape[1:]
    m, l, O = torch.tensor(-torch.inf), 0.0, 0.0
    for j in range(0, length, page):
        rows = slice(0, min(page, length - j))
        K_block, V_block = (pages[table[j // page], rows] for pages in (K_pages, V_pages))
        S_block = K_block @ q / d**0.5  # [Bc]
        m_new = torch.maximum(m, S_block.max())
        correction, P_block = torch.exp(m - m_new), torch.exp(S_block - m_new)
        l = correction * l + P_block.sum()
        O = correction * O + P_block @ V_block  # [dv]
        m = m_new
    return O / l
