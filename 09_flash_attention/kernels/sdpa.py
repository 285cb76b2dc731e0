"""torch's own kernel, as torch chooses it, and its plain one: no adapter is needed."""

import torch
import torch.nn.functional as F

try:
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:  # before torch 2.3
    SDPBackend = None

GROUPS = "enable_gqa" in F.scaled_dot_product_attention.__doc__  # torch 2.5


def fused(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    if enable_gqa and not GROUPS:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    groups = {"enable_gqa": enable_gqa} if GROUPS else {}
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, is_causal=is_causal, scale=scale, **groups)


def math(q, k, v, **options):
    """The plain formula of torch, its "math" backend, which each device has."""
    with sdpa_kernel(SDPBackend.MATH) if SDPBackend else torch.backends.cuda.sdp_kernel(
            enable_flash=False, enable_mem_efficient=False):
        return fused(q, k, v, **options)
