"""The platform's own fused kernel, which the tiled loop is compared with."""

from functools import cache

import torch
import torch.nn.functional as F

from common.device import torch_npu
from lab.visible import Visible, batched

NO_HALF_PRODUCT = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 2)  # on a CPU


def fused_attention(Q, K, V, *, causal=False, window=None, scale=None):
    """Return attention from npu_fusion_attention on an NPU, scaled_dot_product_attention elsewhere.

    Shapes, `causal`, `window`, `scale` and errors as in `flash_attention_forward`. Raises
    ValueError on an NPU where dv differs from d: older releases of its operator get that wrong.
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
    if Q.dtype == torch.float16 and Q.device.type == "cpu" and NO_HALF_PRODUCT:
        return F.scaled_dot_product_attention(*(x.float() for x in (Q, K, V)), **options).half()
    return F.scaled_dot_product_attention(Q, K, V, **options)


def _on_npu(visible, Q, K, V):
    if V.shape[-1] != Q.shape[-1]:
        raise ValueError(f"V must have Q's last dimension for the NPU's fused operator, got "
                         f"{V.shape[-1]} and {Q.shape[-1]}")
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
