"""The platform's own fused kernel, which the tiled loop is compared with."""

from functools import cache

import torch
import torch.nn.functional as F

from common.device import torch_npu
from lab.visible import Visible, batched


def fused_attention(Q, K, V, *, causal=False, window=None, scale=None):
    """Return attention from npu_fusion_attention on an NPU, scaled_dot_product_attention elsewhere.

    Shapes, `causal`, `window`, `scale` and errors as in `flash_attention_forward`.
    """
    visible = Visible(Q, K, V, causal, None, window, scale)
    fused = _on_npu if Q.device.type == "npu" else _sdpa
    return fused(visible, *map(batched, (Q, K, V))).reshape(*Q.shape[:-1], V.shape[-1])


def _sdpa(visible, Q, K, V):
    options = {"scale": visible.scale}
    if visible.is_causal and visible.Nq == visible.Nk:
        options["is_causal"] = True  # its upper-left alignment is the lower-right one here
    elif visible.hides:
        i, j = (torch.arange(n, device=Q.device) for n in (visible.Nq, visible.Nk))
        offset = j - i[:, None] - visible.q_start  # [Nq, Nk]
        options["attn_mask"] = (offset <= visible.right) & (offset >= -visible.left)
    if visible.G > 1 and "enable_gqa" in F.scaled_dot_product_attention.__doc__:
        options["enable_gqa"] = True
    elif visible.G > 1:  # before torch 2.5
        K, V = (x.repeat_interleave(visible.G, dim=1) for x in (K, V))
    return F.scaled_dot_product_attention(Q, K, V, **options)


def _on_npu(visible, Q, K, V):
    options = {"scale": visible.scale}  # its own default is 1
    if visible.hides:
        # Mode 4 is a band aligned as here, lower-right; its mask is compressed, and True hides.
        # A row that sees no key is 0 with inner_precise=2 alone.
        options.update(atten_mask=_upper_triangle(Q.device), sparse_mode=4, inner_precise=2,
                       pre_tockens=visible.left, next_tockens=visible.right)
        if visible.is_causal:
            options.update(sparse_mode=3)
    return torch_npu.npu_fusion_attention(Q, K, V, Q.shape[1], "BNSD", **options)[0]


@cache
def _upper_triangle(device):
    return torch.ones(2048, 2048, dtype=torch.bool, device=device).triu(1)
