"""The platform's own fused kernel, behind one name: what the tiled loop is compared with."""

import torch
import torch.nn.functional as F

from common.device import torch_npu
from visible import Visible


def fused_attention(Q, K, V, *, causal=False, window=None, scale=None):
    """Return attention from npu_fusion_attention on an NPU, scaled_dot_product_attention elsewhere.

    Shapes, `causal`, `window`, `scale` and errors as in `flash_attention_forward`. Grouped heads
    need torch 2.5 off the NPU.
    """
    visible = Visible(Q, K, V, causal, None, window, scale)
    heads = [x if x.dim() == 4 else x.reshape(1, -1, *x.shape[-2:]) for x in (Q, K, V)]
    options = {"scale": visible.scale}  # npu_fusion_attention's own default is 1
    if Q.device.type == "npu":
        if visible.hides:  # True hides; a row that sees no key is 0 with inner_precise=2 alone
            options.update(atten_mask=_hidden(visible), sparse_mode=1, inner_precise=2)
        O = torch_npu.npu_fusion_attention(*heads, heads[0].shape[1], "BNSD", **options)[0]
    else:
        if causal and window is None and visible.Nq == visible.Nk:
            options["is_causal"] = True  # its upper-left alignment is the lower-right one here
        elif visible.hides:
            options["attn_mask"] = ~_hidden(visible)
        if visible.G > 1:
            options["enable_gqa"] = True
        O = F.scaled_dot_product_attention(*heads, **options)
    return O.reshape(*Q.shape[:-1], V.shape[-1])


def _hidden(visible):
    i, j = (torch.arange(n, device=visible.Q.device) for n in (visible.Nq, visible.Nk))
    offset = j - i[:, None] - visible.q_start  # [Nq, Nk]
    return (offset > visible.right) | (offset < -visible.left)
