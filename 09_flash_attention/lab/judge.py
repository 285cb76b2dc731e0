"""When a result is right: its error against float64, and how large that may be.

FlashAttention's own rule compares with standard attention in the same dtype: the error may be twice
as large (three times for gradients). Standard attention may be right by luck, though: its error on
one key is 0. So to that comes what rounding costs anybody, `terms`: the sizes of what is summed.
"""

import torch
import torch.nn.functional as F


def exact(case, Q, K, V, dO=None):
    """Return [(O, terms)] in float64 on the CPU, or with dO [(dQ, terms), (dK, ...), (dV, ...)].

    By torch's own attention and autograd, with the masks of `case` made another way than in
    visible.py. terms are the sums in which nothing cancels: of absolute values, each weight P_ij
    taken 1 + t times, where t is as large as the terms of the scores that it rests on. Half an eps
    times terms is what one rounding of every term can cost.
    """
    wide = [x.detach().cpu().double() for x in (Q, K, V)]  # a card has no float64: first .cpu()
    leaves = [x.requires_grad_(dO is not None) for x in wide]
    G = Q.shape[1] // K.shape[1] if Q.dim() == 4 and K.shape[1] else 1
    Q, K, V = leaves[0], *(x.repeat_interleave(G, dim=1) if G > 1 else x for x in leaves[1:])
    keep = seen(case, Q.shape[-2], K.shape[-2])
    O = F.scaled_dot_product_attention(Q, K, V, attn_mask=keep)
    O = O.masked_fill(~keep.any(-1, keepdim=True), 0)  # some torch versions give NaN there
    if dO is None:
        return [(O, weights(Q, K, keep)[1] @ V.abs())]
    dO = dO.cpu().double()
    gradients = torch.autograd.grad(O, leaves, dO)
    with torch.no_grad():
        return list(zip(gradients, gradient_terms(Q, K, V, dO, keep, G)))


def seen(case, Nq, Nk):
    """Return which keys a query of the case sees, [Nq, Nk]."""
    left, right = case.window or (None, None)
    keep = torch.ones(Nq, Nk, dtype=torch.bool)
    if case.causal or right is not None:
        keep = keep.tril(Nk - Nq + (0 if case.causal else right))
    return keep if left is None else keep.triu(Nk - Nq - left)


def weights(Q, K, keep):
    """Return P, and P with each weight taken 1 + t times: see `exact`."""
    scale = Q.shape[-1] ** -0.5
    S = (Q @ K.mT * scale).masked_fill(~keep, -torch.inf)
    P = torch.softmax(S, dim=-1).masked_fill(~keep, 0)  # NaN where a row sees nothing
    t = Q.abs() @ K.abs().mT * scale
    return P, P * (1 + t + (P * t).sum(-1, keepdim=True))


def gradient_terms(Q, K, V, dO, keep, G):
    P, W = weights(Q, K, keep)
    dP = dO.abs() @ V.abs().mT
    dS = W * (dP + (P * dP).sum(-1, keepdim=True)) * Q.shape[-1] ** -0.5
    for terms in (dS @ K.abs(), dS.mT @ Q.abs(), W.mT @ dO.abs()):
        grouped = G > 1 and terms.shape[1] == Q.shape[1] and len(Q.shape) == 4
        yield terms.unflatten(1, (-1, G)).sum(2) if grouped else terms


def judge(found, standard, reference, terms, factor=2):
    """Return the largest |found - standard|, |found - reference|, |standard - reference|, and
    whether `found` passes.

    It passes where its error is at most `factor` times that of standard attention, and an eps of
    float32 (float64 for float64) of the terms, and for half types the result's own rounding.
    """
    wide = torch.promote_types(found.dtype, torch.float32)
    allowed = torch.finfo(wide).eps * largest(terms)
    if found.dtype != wide:
        allowed += torch.finfo(found.dtype).eps / 2 * largest(reference)
    found, standard = found.cpu().double(), standard.cpu().double()
    max_diff, error, error_standard = (
        largest(a - b)
        for a, b in ((found, standard), (found, reference), (standard, reference)))
    return max_diff, error, error_standard, error <= factor * error_standard + allowed


def largest(x):
    return x.abs().max().item() if x.numel() else 0.0


def assert_agree(name, found, standard):
    """Raise RuntimeError where `found` is not what standard attention gives.

    They may differ by 1e-3 of the largest entry, or 8 eps for half types: enough to tell another
    formula from a rounding.
    """
    allowed = max(1e-3, 8 * torch.finfo(found.dtype).eps) * max(1.0, largest(standard))
    difference = largest(found.float() - standard.float())
    if not difference <= allowed:
        raise RuntimeError(f"{name} differs from standard attention by {difference:.3g}, "
                           f"more than {allowed:.3g}")
