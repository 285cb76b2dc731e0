"""npu_fusion_attention, with its defaults and its traps: see `attention`."""

from types import SimpleNamespace

import torch

from torch_npu.arithmetic import is_on
from torch_npu.simulation import CUBE_DTYPES, NPUTensor, kernels, launches

_library = torch.library.Library("npu", "DEF")
_library.define(
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., "
    "float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
    "int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, "
    "int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    "bool sync=False) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
npu_fusion_attention = torch.ops.npu.npu_fusion_attention
DEFAULTS = {a.name: a.default_value for a in npu_fusion_attention.default._schema.arguments}

# From each layout to B N S D with n heads, and back.
TO_HEADS = {
    "BNSD": lambda x, n: x,
    "BSND": lambda x, n: x.transpose(1, 2),
    "BSH": lambda x, n: x.unflatten(-1, (n, -1)).transpose(1, 2),
    "SBH": lambda x, n: x.unflatten(-1, (n, -1)).permute(1, 2, 0, 3),
}
FROM_HEADS = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
}


def attention(*args, **kwargs):
    """Return out, the maximum and the sum of softmax [B, N, S, 8], an unused tensor, three numbers.

    The traps: the scale is 1 unless given. True in atten_mask hides, and without a mask
    sparse_mode, pre_tockens and next_tockens do nothing. Modes 2 to 4 take the compressed mask. A
    row that sees no key is NaN here and any number on the card, unless inner_precise is 2 (or mode
    3 has more queries than keys): then it is 0.
    """
    o = SimpleNamespace(**{**DEFAULTS, **dict(zip(DEFAULTS, args)), **kwargs})
    extras = (o.pse, o.padding_mask, o.prefix, o.actual_seq_qlen, o.actual_seq_kvlen)
    layout = o.input_layout
    if layout not in TO_HEADS or o.keep_prob != 1 or any(x is not None for x in extras):
        raise NotImplementedError("layout TND, dropout, pse and prefix are not simulated")
    dtypes = {x.dtype for x in (o.query, o.key, o.value)}
    taken = CUBE_DTYPES - {torch.float32} if is_on("SIMULATED_NPU_OLD_CANN") else CUBE_DTYPES
    if len(dtypes) > 1 or not dtypes <= taken:
        raise RuntimeError(f"npu_fusion_attention takes one of {taken}, got {dtypes}")
    head_dim = o.query.shape[-1] // (o.head_num if layout in ("BSH", "SBH") else 1)
    q = TO_HEADS[layout](o.query, o.head_num)
    k, v = (TO_HEADS[layout](x, o.key.shape[-1] // head_dim) for x in (o.key, o.value))
    group, rest = divmod(q.shape[1], k.shape[1])
    fits = q.shape[-1] == k.shape[-1] >= v.shape[-1] and k.shape[:3] == v.shape[:3]
    if q.shape[1] != o.head_num or rest or not fits:
        raise RuntimeError("npu_fusion_attention: query, key, value and head_num do not fit")
    if o.head_num > 256 or q.shape[-1] > 768:
        raise RuntimeError("npu_fusion_attention takes at most 256 heads and 768 dimensions")
    q, k, v = q.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
    S = q @ k.transpose(-2, -1) * o.scale
    if o.atten_mask is not None:
        S = S.masked_fill(_hidden(S, o), -torch.inf)
    largest = S.amax(-1, keepdim=True)
    P = (S - largest).exp()
    total = P.sum(-1, keepdim=True)
    out = P @ v / total
    if o.inner_precise == 2 or (o.sparse_mode == 3 and S.shape[-2] > S.shape[-1]):
        out = out.masked_fill(largest == -torch.inf, 0)
    out = FROM_HEADS[layout](out.to(o.query.dtype)).contiguous()
    if is_on("SIMULATED_NPU_OLD_FUSION"):  # V's rows, one after the other, where Q's have room
        rest = o.query.numel() - out.numel()
        out = torch.nn.functional.pad(out.flatten(), (0, rest)).view(o.query.shape)
    statistics = (x.repeat(1, 1, 1, 8) for x in (largest, total))
    return (out, *statistics, o.query.new_empty(0), 0, 0, 0)


def _hidden(S, o):
    """What the mask and the mode hide of the scores S [B, N, Sq, Sk]. o: the operator's options."""
    mask, mode = o.atten_mask, o.sparse_mode
    if mask.dtype not in (torch.bool, torch.uint8) or mode not in range(5):
        raise RuntimeError(f"a mask of {mask.dtype} in sparse_mode {mode} is not simulated")
    B, N, Sq, Sk = S.shape
    whole = mode in (0, 1)
    shapes = [(Sq, Sk), (1, 1, Sq, Sk), (B, 1, Sq, Sk), (B, N, Sq, Sk)] if whole else [(2048, 2048)]
    if mask.shape not in shapes:
        raise RuntimeError(f"sparse_mode {mode} takes a mask of {shapes}, got {mask.shape}")
    mask = mask.bool()
    if not whole and not mask.equal(torch.ones_like(mask).triu(1)):
        raise RuntimeError(f"sparse_mode {mode} takes the upper triangle as its mask")
    offset = torch.arange(Sk) - torch.arange(Sq)[:, None] - (Sk - Sq if mode in (3, 4) else 0)
    if mode in (2, 3):
        return offset > 0
    band = (offset > o.next_tockens) | (offset < -o.pre_tockens)
    return mask if mode == 1 else mask | band if mode == 0 else band


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.rest = [x.inner if isinstance(x, NPUTensor) else x for x in inputs[3:]]


def _backward(ctx, grad, *_):
    leaves = [x.inner.detach().requires_grad_() for x in ctx.saved_tensors]
    with torch.enable_grad():
        out = attention(*leaves, *ctx.rest)[0]
    grads = torch.autograd.grad(out, leaves, grad.inner)
    index = grad.device.index
    launches.append(("npu::npu_fusion_attention_grad", index))
    return (*(NPUTensor(g, index) for g in grads), *[None] * len(ctx.rest))


kernels[npu_fusion_attention.default] = attention
torch.library.register_autograd(
    "npu::npu_fusion_attention", _backward, setup_context=_save, lib=_library
)
