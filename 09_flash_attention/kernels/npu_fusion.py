"""torch_npu.npu_fusion_attention behind SDPA's signature.

Its traps: the scale is 1 unless given, True in a mask hides, a mask has each of its dimensions but
the heads, and a row that sees no key is 0 with inner_precise=2 alone.
"""

from functools import cache

import torch

from common.cli import Refused
from common.device import torch_npu


def attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if q.device.type != "npu":
        raise Refused(f"npu_fusion_attention needs torch_npu and a card, got {q.device}")
    if v.shape[-1] != q.shape[-1]:
        raise NotImplementedError("dv other than d: older releases get it wrong")
    options = {"scale": q.shape[-1] ** -0.5 if scale is None else scale, "inner_precise": 2}
    if is_causal:
        options.update(atten_mask=upper_triangle(q.device), sparse_mode=2)  # upper-left
    elif attn_mask is not None:
        options.update(mask_options(attn_mask, q.shape[-2], k.shape[-2], len(q), q.shape[1]))
    return torch_npu.npu_fusion_attention(q, k, v, q.shape[1], "BNSD", **options)[0]


def mask_options(mask, Nq, Nk, B, H):
    """Return sparse_mode 3 for the lower-right corner, 4 for a band, else 1 with the whole mask."""
    if mask.dtype != torch.bool:
        if not ((mask == 0) | (mask == -torch.inf)).all():
            raise NotImplementedError("float masks other than 0 and -inf")
        mask = mask == 0
    mask = mask.expand(*mask.shape[:-2], Nq, Nk)
    band = band_of(mask.cpu()) if mask.dim() == 2 else None
    if band:
        left, right = band
        corner = right == 0 and left >= Nk
        return {"atten_mask": upper_triangle(mask.device), "sparse_mode": 3 if corner else 4,
                "pre_tockens": left, "next_tockens": right}
    if mask.dim() == 4:
        mask = mask.expand(B, H if mask.shape[1] > 1 else 1, Nq, Nk)
    return {"atten_mask": ~mask.contiguous(), "sparse_mode": 1}


def band_of(mask):
    """Return (left, right) where mask [Nq, Nk] keeps the keys from i - left to i + right of query
    i, with the last query at the last key; else None. What it doesn't bound is Nq + Nk.
    """
    Nq, Nk = mask.shape
    offset = torch.arange(Nk) - torch.arange(Nq)[:, None] - (Nk - Nq)  # [Nq, Nk]
    if not mask.any():
        return None
    left, right = -offset[mask].min().item(), offset[mask].max().item()
    if left < 0 or right < 0 or not mask.equal((offset >= -left) & (offset <= right)):
        return None
    unbounded = Nq + Nk
    return (unbounded if left >= Nk - 1 else left), right


@cache
def upper_triangle(device):
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
