"""What an attention call takes: the arguments are checked before any work."""

import math
import numbers

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_call(Q, K, V, q_start, window, scale, attn_mask, score_mod):
    """Raise ValueError or TypeError for what no attention call takes."""
    _check_tensors(Q, K, V, attn_mask)
    shapes = f"got Q {tuple(Q.shape)}, K {tuple(K.shape)}, V {tuple(V.shape)}"
    if Q.shape[-1] != K.shape[-1] or Q.shape[-1] == 0:
        raise ValueError(f"Q and K must have the same last dimension d >= 1, {shapes}")
    if K.shape[:-1] != V.shape[:-1]:
        raise ValueError(f"K and V must agree in all but the last dimension, {shapes}")
    grouped = (Q.dim() > 3 and Q.shape[:-3] == K.shape[:-3] and min(Q.shape[-3], K.shape[-3]) > 0
               and Q.shape[-3] % K.shape[-3] == 0)
    if Q.shape[:-2] != K.shape[:-2] and not grouped:
        raise ValueError("K must have Q's leading dimensions, or with [B, H, N, d] a number of "
                         f"heads that divides Q's, {shapes}")
    if q_start is not None and not _is_int(q_start):
        raise ValueError(f"q_start must be an int within 2^32 or None, got {q_start!r}")
    if window is not None and not (isinstance(window, (tuple, list)) and len(window) == 2
                                   and all(w is None or _is_int(w) and w >= 0 for w in window)):
        raise ValueError("window must be (left, right), each an int from 0 to 2^32 or None, "
                         f"got {window!r}")
    if scale is not None and not _is_finite(scale):
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a function or None, got {type(score_mod).__name__}")
    if score_mod is not None and Q.dim() > 4:
        raise ValueError(f"score_mod takes [B, H, N, d] or fewer dimensions, {shapes}")
    if attn_mask is not None:
        scores = (*Q.shape[:-1], K.shape[-2])
        if not broadcasts(attn_mask.shape, scores):
            raise ValueError(f"attn_mask must broadcast to the scores {scores}, "
                             f"got shape {tuple(attn_mask.shape)}")


def broadcasts(shape, scores):
    """Return whether a tensor of this shape broadcasts to the shape `scores`."""
    sides = zip(reversed(shape), reversed(scores))
    return len(shape) <= len(scores) and all(have in (1, want) for have, want in sides)


def _check_tensors(Q, K, V, attn_mask):
    for name, x in (("Q", Q), ("K", K), ("V", V), ("attn_mask", attn_mask)):
        is_mask = name == "attn_mask"
        if is_mask and x is None:
            continue
        dtype = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        if dtype not in DTYPES and not (is_mask and dtype == torch.bool):
            raise TypeError(f"{name} must be a {'bool, ' * is_mask}float16, bfloat16, float32 or "
                            f"float64 tensor, got {dtype}")
        if x.layout != torch.strided or x.is_nested:
            raise TypeError(f"{name} must be a dense tensor, got one of layout "
                            f"{'nested' if x.is_nested else x.layout}")
        if x.dim() < 2 and not is_mask:
            raise ValueError(f"{name} must be [..., N, d], got shape {tuple(x.shape)}")
        if dtype != Q.dtype and not is_mask:
            raise TypeError(f"{name} must have Q's dtype {Q.dtype}, got {dtype}")
        if x.device != Q.device:
            raise ValueError(f"{name} must be on Q's device {Q.device}, got {x.device}")


def check_backward(Q, V, attn_mask, mask_gradient, **given):
    """Raise ValueError or TypeError for what does not belong to a forward of Q and V.

    given: O and dO, [..., Nq, dv], and m, l and dL, [..., Nq]; None is taken for dL.
    """
    for name, x in given.items():
        wanted = (*Q.shape[:-1], V.shape[-1]) if name in ("dO", "O") else Q.shape[:-1]
        if x is not None and x.shape != wanted:
            raise ValueError(f"{name} must be {[*wanted]}, got shape {tuple(x.shape)}")
    if mask_gradient and (attn_mask is None or not attn_mask.is_floating_point()):
        raise TypeError("mask_gradient takes an attn_mask of floats, got "
                        f"{None if attn_mask is None else attn_mask.dtype}")


def check_dropout(dropout_p, seed):
    """Raise ValueError for a dropout_p or a seed that is none."""
    if not (_is_finite(dropout_p) and 0 <= dropout_p < 1):
        raise ValueError(f"dropout_p must be a number from 0 to below 1, got {dropout_p!r}")
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise ValueError(f"seed must be an int from 0 to 2^64 - 1, got {seed!r}")


def _is_finite(value):
    try:
        return isinstance(value, numbers.Real) and math.isfinite(float(value))
    except OverflowError:
        return False


def _is_int(value):
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and abs(int(value)) <= 2**32  # as positions they are added in int64
