"""Is your kernel right? Three kernels are wrong: find the inputs that show it.

    python exercises/15_judge.py

Write the four functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/15_judge.md, 中文:
lesson/zh/15_judge.md. Solutions: solutions/.

The kernels below can be judged as well, once you have found their faults:

    python judge_kernel.py --kernel exercises/15_judge.py:kernel_A --quick --dtype float32
"""

from check import serve

import torch
import torch.nn.functional as F


def passes(found, standard, exact, floor):
    """Return whether a kernel's output `found` is right: True or False.

    Its largest error from `exact` may be twice that of `standard`, and `floor` more. NaN is wrong.
    """
    raise NotImplementedError


def input_A():
    """Return (q, k, v) on which kernel_A is wrong. As few scores as possible."""
    raise NotImplementedError


def input_B():
    """Return (q, k, v) on which kernel_B is wrong. As few scores as possible."""
    raise NotImplementedError


def input_C():
    """Return (q, k, v, mask) on which kernel_C is wrong. As few scores as possible."""
    raise NotImplementedError


# The kernels, with SDPA's signature: q [B, H, Nq, d], k [B, Hkv, Nk, d], v [B, Hkv, Nk, dv]


def chapter_kernel(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """The chapter's example."""
    if is_causal:
        Nq, Nk = q.shape[-2], k.shape[-2]
        attn_mask = torch.ones(Nq, Nk, dtype=torch.bool, device=q.device).tril(Nk - Nq)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale,
                                          enable_gqa=enable_gqa)


def kernel_A(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Walks over the keys in tiles of 64."""
    if attn_mask is not None or is_causal or enable_gqa or scale is not None:
        raise NotImplementedError("q, k and v alone")
    tiles = max(1, k.shape[-2] // 64)
    m, l, O = torch.full_like(q[..., :1], -torch.inf), 0, 0
    for j in range(tiles):
        keys = slice(64 * j, 64 * (j + 1))
        S = q @ k[..., keys, :].mT / q.shape[-1] ** 0.5
        m_new = torch.maximum(m, S.amax(-1, keepdim=True))
        P, correction = torch.exp(S - m_new), torch.exp(m - m_new)
        l = correction * l + P.sum(-1, keepdim=True)
        O = correction * O + P @ v[..., keys, :]
        m = m_new
    return O / l


def kernel_B(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Gives each query head a key/value head."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat(1, groups, 1, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal,
                                          scale=scale)


def kernel_C(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """Adds the mask to the scores."""
    if is_causal or enable_gqa:
        raise NotImplementedError("no causal corner, no groups")
    S = q @ k.mT
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        S = S.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        S = S + attn_mask
    P = torch.softmax(S * (q.shape[-1] ** -0.5 if scale is None else scale), -1)
    return P.nan_to_num(0) @ v  # 0 in rows that see no key


if __name__ == "__main__":
    serve(globals())
