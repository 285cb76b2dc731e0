"""How a result is judged: its error against float64, and FlashAttention's rule for how large."""

import torch
import torch.nn.functional as F


def exact(Q, K, V, case):
    """Return torch's own attention in float64 on the CPU, masked another way than by Visible.

    The masks are those of `case`. Autograd goes through it.
    """
    Q, K, V = (x.double().cpu() for x in (Q, K, V))
    if Q.dim() == 4:
        K, V = (x.repeat_interleave(Q.shape[1] // x.shape[1], dim=1) for x in (K, V))
    Nq, Nk = Q.shape[-2], K.shape[-2]
    left, right = case.window or (None, None)
    keep = torch.ones(Nq, Nk, dtype=torch.bool)
    if case.causal or right is not None:
        keep = keep.tril(Nk - Nq + (0 if case.causal else right))
    if left is not None:
        keep = keep.triu(Nk - Nq - left)
    O = F.scaled_dot_product_attention(Q, K, V, attn_mask=keep)
    return O.masked_fill(~keep.any(-1, keepdim=True), 0)  # some torch versions give NaN there


def judge(found, standard, reference, factor=2):
    """Return the largest |found - standard|, |found - reference|, |standard - reference|, and
    whether `found` passes.

    It passes where its error is at most `factor` times that of standard attention in the same
    dtype: FlashAttention's own rule, with 2 for results and 3 for gradients. float32 and float64
    are allowed 2 eps of the largest entry more, for on a small case standard's error may be next to
    nothing. reference: float64 on the CPU.
    """
    eps, half = torch.finfo(found.dtype).eps, found.dtype.itemsize < 4
    found, standard = found.double().cpu(), standard.double().cpu()
    max_diff, error, error_standard = (
        (a - b).abs().max().item()
        for a, b in ((found, standard), (found, reference), (standard, reference)))
    slack = 0 if half else 2 * eps * reference.abs().max().item()
    return max_diff, error, error_standard, error <= factor * error_standard + slack


def assert_agree(name, found, standard):
    """Raise RuntimeError where `found` is not what standard attention gives.

    They may differ by 1e-3 of the largest entry, or 8 eps for half types: enough to tell another
    formula from a rounding.
    """
    allowed = max(1e-3, 8 * torch.finfo(found.dtype).eps) * max(1.0, standard.abs().max().item())
    difference = (found.float() - standard.float()).abs().max().item()
    if not difference <= allowed:
        raise RuntimeError(f"{name} differs from standard attention by {difference:.3g}, "
                           f"more than {allowed:.3g}")
