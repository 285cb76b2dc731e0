"""The same meaning as PyTorch's attention and ONNX's operator: alignment, heads, masks, softcap."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flash_attention import flash_attention_forward, standard_attention

BOTH = pytest.mark.parametrize("attend", [standard_attention, flash_attention_forward])
LENGTHS = pytest.mark.parametrize("Nq, Nk", [(5, 5), (3, 8), (8, 3), (1, 6)])
ENABLE_GQA = pytest.mark.skipif(
    "enable_gqa" not in (F.scaled_dot_product_attention.__doc__ or ""), reason="needs torch 2.5"
)


def inputs(Nq, Nk, H=4, Hkv=4, d=8):
    generator = torch.Generator().manual_seed(Nq * 100 + Nk)
    shapes = (2, H, Nq, d), (2, Hkv, Nk, d), (2, Hkv, Nk, 6)
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def random_mask(Nq, Nk, dtype=torch.bool):
    generator = torch.Generator().manual_seed(Nk)
    keep = torch.rand(2, 1, Nq, Nk, generator=generator) < 0.7
    if dtype == torch.bool:
        return keep
    bias = torch.randn(2, 1, Nq, Nk, generator=generator, dtype=dtype)
    return bias.masked_fill(~keep, -math.inf)


def close(actual, expected):
    """In float64, rounding of sums of unit-size terms stays below 1e-12."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


# F.scaled_dot_product_attention


@BOTH
@LENGTHS
def test_sdpa_is_causal_is_q_start_0(attend, Nq, Nk):
    Q, K, V = inputs(Nq, Nk)
    expected = F.scaled_dot_product_attention(Q, K, V, is_causal=True)
    close(attend(Q, K, V, causal=True, q_start=0), expected)
    if Nq < Nk:  # it is not the default, the alignment that decoding needs
        assert (attend(Q, K, V, causal=True) - expected).abs().max() > 1e-3


@BOTH
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_sdpa_attn_mask_and_scale_mean_the_same(attend, dtype):
    Q, K, V = inputs(7, 9)
    mask = random_mask(7, 9, dtype)
    mask[..., 0] = (
        True if dtype == torch.bool else 1.0
    )  # some torch versions give NaN for a dead row
    for scale in (None, 0.3):
        expected = F.scaled_dot_product_attention(Q, K, V, attn_mask=mask, scale=scale)
        close(attend(Q, K, V, attn_mask=mask, scale=scale), expected)


@BOTH
@ENABLE_GQA
@pytest.mark.parametrize("Hkv", [1, 2, 4])
def test_sdpa_enable_gqa_is_what_fewer_heads_of_k_and_v_mean(attend, Hkv):
    Q, K, V = inputs(5, 7, Hkv=Hkv)
    close(attend(Q, K, V), F.scaled_dot_product_attention(Q, K, V, enable_gqa=True))


@BOTH
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("Nq, Nk", [(5, 5), (3, 8), (1, 6)])
def test_causal_lower_right_is_the_default_alignment(attend, Nq, Nk):
    bias = pytest.importorskip("torch.nn.attention.bias")  # torch 2.3
    Q, K, V = inputs(Nq, Nk)
    mask = bias.causal_lower_right(Nq, Nk)
    close(attend(Q, K, V, causal=True), F.scaled_dot_product_attention(Q, K, V, attn_mask=mask))
    dense = bias.causal_lower_right(
        5, 3
    )._materialize()  # rows without a key: only the mask is said
    seen = attend(*inputs(5, 3)[:2], torch.eye(3).double().expand(2, 4, 3, 3), causal=True) > 0
    assert torch.equal(seen, dense.expand_as(seen))


# The ONNX operator Attention, opset 23 and 24, from its definition


def onnx_attention(Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None,
                   is_causal=False, scale=None, softcap=0.0, left=-1, right=-1):
    """The operator in numpy, for 4-D inputs [B, H, N, d].

    softmax(softcap(Q K^T * scale) + bias) V, a fully masked row 0. Query i of the call stands at
    p = offset + i: offset is the length of past_key, or nonpad_kv_seqlen - Nq where the cache is
    outside, or 0. is_causal keeps keys j <= p. left and right are opset 25's left_window_size and
    right_window_size: keys from p - left to p + right, -1 is unbounded.
    """
    if past_key is not None:
        K, V = np.concatenate([past_key, K], axis=2), np.concatenate([past_value, V], axis=2)
    B, H, Nq, d = Q.shape
    Nk, group = K.shape[2], H // K.shape[1]
    K, V = np.repeat(K, group, axis=1), np.repeat(V, group, axis=1)
    root = np.sqrt(1 / np.sqrt(d) if scale is None else scale)  # on Q and on K, before the product
    S = (Q * root) @ (K * root).swapaxes(-2, -1)
    S = softcap * np.tanh(S / softcap) if softcap else S
    keep = np.ones((B, 1, Nq, Nk), dtype=bool)
    if attn_mask is not None:
        if attn_mask.shape[-1] < Nk:  # a short mask hides the keys behind its end
            fill = False if attn_mask.dtype == bool else -np.inf
            short = [(0, 0)] * (attn_mask.ndim - 1) + [(0, Nk - attn_mask.shape[-1])]
            attn_mask = np.pad(attn_mask, short, constant_values=fill)
        if attn_mask.dtype == bool:
            keep = keep & attn_mask
        else:
            S = S + attn_mask
    offset = np.full(B, 0 if past_key is None else past_key.shape[2])
    if nonpad_kv_seqlen is not None:
        keep = keep & (np.arange(Nk) < nonpad_kv_seqlen[:, None, None, None])
        offset = nonpad_kv_seqlen - Nq
    p = offset[:, None, None, None] + np.arange(Nq)[:, None]  # [B, 1, Nq, 1]
    j = np.arange(Nk)
    if is_causal:
        keep = keep & (j <= p)
    if left >= 0:
        keep = keep & (j >= p - left)
    if right >= 0:
        keep = keep & (j <= p + right)
    S = np.where(keep, S, -np.inf)
    highest = S.max(-1, keepdims=True)
    P = np.exp(S - np.where(highest == -np.inf, 0, highest))
    total = P.sum(-1, keepdims=True)
    return (P / np.where(total == 0, 1, total)) @ V


def onnx(Q, K, V, *rest, **options):
    arrays = {k: x.numpy() if isinstance(x, torch.Tensor) else x for k, x in options.items()}
    return torch.from_numpy(onnx_attention(Q.numpy(), K.numpy(), V.numpy(), *rest, **arrays))


@BOTH
@LENGTHS
def test_onnx_without_a_cache_is_causal_from_the_first_key(attend, Nq, Nk):
    Q, K, V = inputs(Nq, Nk, Hkv=2)
    # ONNX differs: without past_key or nonpad_kv_seqlen its offset is 0, so where Nq != Nk it is
    # q_start=0 here and not the default.
    close(attend(Q, K, V, causal=True, q_start=0), onnx(Q, K, V, is_causal=True))


@BOTH
def test_onnx_with_a_past_is_the_default_alignment(attend):
    Q, K, V = inputs(3, 8, Hkv=2)
    past = {"past_key": K[:, :, :5], "past_value": V[:, :, :5]}
    expected = onnx(Q, K[:, :, 5:], V[:, :, 5:], is_causal=True, **past)
    close(attend(Q, K, V, causal=True), expected)


@BOTH
def test_onnx_with_a_cache_outside_is_the_default_alignment_of_each_length(attend):
    Q, K, V = inputs(3, 8, Hkv=2)
    lengths = [8, 4]
    expected = onnx(Q, K, V, nonpad_kv_seqlen=torch.tensor(lengths), is_causal=True)
    # ONNX differs: a length for each element of the batch, where q_start here is one for all.
    for b, n in enumerate(lengths):
        O = attend(Q[b : b + 1], K[b : b + 1, :, :n], V[b : b + 1, :, :n], causal=True)
        close(O, expected[b : b + 1])
    mask = torch.arange(8) <= torch.tensor(lengths).view(2, 1, 1, 1) - 3 + torch.arange(3)[:, None]
    close(attend(Q, K, V, attn_mask=mask), expected)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_onnx_masks_come_after_scale_and_softcap_and_join_is_causal(attend, dtype):
    Q, K, V = inputs(6, 6)
    mask = random_mask(6, 6, dtype)
    # The text of opset 23 first had the mask before the softcap, which turns -inf into -softcap;
    # its erratum, and this reference, have softcap before the mask.
    options = {"attn_mask": mask, "scale": 0.4}
    expected = onnx(Q, K, V, is_causal=True, softcap=0.7, **options)

    def softcap(score, b, h, q_idx, kv_idx):
        return 0.7 * torch.tanh(score / 0.7)

    close(attend(Q, K, V, causal=True, score_mod=softcap, **options), expected)


@BOTH
def test_onnx_fully_masked_rows_are_zero(attend):
    Q, K, V = inputs(5, 5)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[1:3, :2] = False  # with is_causal, row 1 sees no key, and row 2 sees key 2
    expected = onnx(Q, K, V, attn_mask=mask, is_causal=True)
    assert not expected[:, :, 1].any() and expected[:, :, 2].any()
    close(attend(Q, K, V, attn_mask=mask, causal=True), expected)


@BOTH
def test_onnx_takes_a_mask_shorter_than_the_keys_which_here_is_refused(attend):
    Q, K, V = inputs(4, 7)
    mask = random_mask(4, 5)
    expected = onnx(Q, K, V, attn_mask=mask)
    # ONNX differs: it hides the keys behind the mask's end. Here the caller says so.
    with pytest.raises(ValueError, match="attn_mask"):
        attend(Q, K, V, attn_mask=mask)
    close(attend(Q, K, V, attn_mask=F.pad(mask, (0, 2))), expected)


@BOTH
@pytest.mark.parametrize("window", [(2, 0), (0, 3), (None, 1), (2, None), (0, 0)])
def test_onnx_windows_mean_the_same_and_minus_one_is_none(attend, window):
    Q, K, V = inputs(6, 9)
    sides = {k: -1 if w is None else w for k, w in zip(("left", "right"), window)}
    past = {"past_key": K[:, :, :3], "past_value": V[:, :, :3]}
    for causal in (False, True):
        expected = onnx(Q, K[:, :, 3:], V[:, :, 3:], is_causal=causal, **sides, **past)
        close(attend(Q, K, V, window=window, causal=causal), expected)
