"""FlexAttention, which compiles a score_mod and a mask into a fused kernel: torch 2.6 and later;
and what else is fused, to compare with.
"""

from functools import partial

import torch

from lab.fused import fused_attention
from lab.visible import Visible, batched

flex_attention = None
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6):  # 2.5: one shape alone
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def flex(Q, K, V, causal=False, window=None):
    """Return attention from FlexAttention, to be compiled: else it is standard attention.

    Shapes, `causal`, `window` and errors as in `flash_attention_forward`.
    """
    visible = Visible(Q, K, V, causal, window=window)

    def sees(b, h, q_idx, kv_idx):
        offset = kv_idx - q_idx - visible.q_start
        return (offset <= visible.right) & (offset >= -visible.left)

    mask = create_block_mask(sees, None, None, visible.Nq, visible.Nk, device=Q.device.type)
    O = flex_attention(*map(batched, (Q, K, V)), block_mask=mask, scale=visible.scale,
                       enable_gqa=visible.G > 1)
    return O.reshape(*Q.shape[:-1], V.shape[-1])


def fused_calls(case, device):
    """Return {name: call of Q, K, V} of what can train beside flash: the fused operator, and on
    CUDA FlexAttention, compiled.
    """
    calls = {} if device.type == "npu" else {"fused": partial(fused_attention, **case.masks)}
    if device.type == "cuda" and flex_attention is not None:
        calls["flex"] = partial(torch.compile(flex), **case.masks)
    return calls
