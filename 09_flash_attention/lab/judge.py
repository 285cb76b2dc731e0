"""When a result is right: its error against float64, and how large that may be.

FlashAttention's own rule compares with standard attention in the same dtype: the error may be twice
as large (three times for gradients). Standard attention may be right by luck, though: its error on
one key is 0. So to that comes `floor`, what rounding costs anybody.
"""

import torch
import torch.nn.functional as F


def exact(case, Q, K, V, dO=None):
    """Return [(O, floor)] in float64 on the CPU, or with dO [(dQ, floor), (dK, ...), (dV, ...)].

    By torch's own attention and autograd, with the masks of `case` made another way than in
    visible.py.
    """
    wide = [x.detach().cpu().double() for x in (Q, K, V)]  # a card has no float64: first .cpu()
    leaves = [x.requires_grad_(dO is not None) for x in wide]
    G = Q.shape[1] // K.shape[1] if Q.dim() == 4 and K.shape[1] else 1
    Q, K, V = leaves[0], *(x.repeat_interleave(G, dim=1) if G > 1 else x for x in leaves[1:])
    keep = seen(case, Q.shape[-2], K.shape[-2])
    blind = ~keep.any(-1, keepdim=True)  # torch before 2.5 gives NaN there, and as a gradient
    O = F.scaled_dot_product_attention(Q, K, V, attn_mask=keep | blind).masked_fill(blind, 0)
    if dO is None:
        P, W = weights(Q, K, keep)
        return [(O, floor(case.dtype, W @ V.abs(), P @ V.abs() + O.abs()))]
    dO = dO.cpu().double()
    results = torch.autograd.grad(O, leaves, dO)
    with torch.no_grad():
        sums = gradient_sums(Q, K, V, O, dO, keep, G)
    return [(x, floor(case.dtype, terms, rounded + x.abs()))
            for x, (terms, rounded) in zip(results, sums)]


def floor(dtype, terms, rounded):
    """Return the error that rounding may cause in a result that is computed as it should be.

    Half an eps is what one rounding costs, relative to what is rounded. A sum of n terms is rounded
    n times, up as often as down: together they stay near one rounding of every term, all in one
    direction. That is half an eps of `terms`, the sum of the absolute values, in which nothing
    cancels; flash rounds twice, in a tile and from tile to tile: an eps of float32, or of float64
    for float64. A weight P_ij rests on a score, itself such a sum, of size t_ij: an error e there
    is a share e of the weight, so it counts 1 + t_ij + sum_k P_ik t_ik times, the last for the
    softmax's divisor.

    Half types add half their eps of what is `rounded` to them: the result; P where it meets V or
    dO, or the O of a part of the keys, of which a split makes O; and O again in D = rowsum(dO * O).
    """
    wide = torch.promote_types(dtype, torch.float32)
    error = torch.finfo(wide).eps * largest(terms)
    return error if dtype == wide else error + torch.finfo(dtype).eps / 2 * largest(rounded)


def seen(case, Nq, Nk):
    """Return which keys a query of the case sees, [Nq, Nk]."""
    left, right = case.window or (None, None)
    keep = torch.ones(Nq, Nk, dtype=torch.bool)
    if case.causal or right is not None:
        keep = keep.tril(Nk - Nq + (0 if case.causal else right))
    return keep if left is None else keep.triu(Nk - Nq - left)


def weights(Q, K, keep, S=None):
    """Return P, and P with each weight as many times as its error counts: see `floor`.

    S: the scores, where they are not Q K^T * scale alone.
    """
    scale = Q.shape[-1] ** -0.5
    raw = Q @ K.mT * scale
    S = raw if S is None else S
    P = torch.softmax(S.masked_fill(~keep, -torch.inf), dim=-1)
    P = P.masked_fill(~keep, 0)  # NaN where a row sees nothing
    t = Q.abs() @ K.abs().mT * scale + (S - raw).abs()
    return P, P * (1 + t + (P * t).sum(-1, keepdim=True))


def gradient_sums(Q, K, V, O, dO, keep, G, S=None, Z=1.0, dL=0.0):
    """Return (terms, rounded but for the result) of dQ, dK, dV and dS.

    S: the scores, where they are not Q K^T * scale alone; Z: what dropout multiplies P by; dL: of
    L, a column.
    """
    P, W = weights(Q, K, keep, S)
    dP = dO.abs() @ V.abs().mT * Z
    scores = W * (dP + (P * dP).sum(-1, keepdim=True) + abs(dL)), (  # what D gives to dS:
        P * (dO * O).abs().sum(-1, keepdim=True))
    dS, D = (x * Q.shape[-1] ** -0.5 for x in scores)

    def of_group(x):
        return x.unflatten(1, (-1, G)).sum(2) if G > 1 else x

    return ((dS @ K.abs(), D @ K.abs()),
            (of_group(dS.mT @ Q.abs()), of_group(D.mT @ Q.abs())),
            (of_group((W * Z).mT @ dO.abs()), of_group((P * Z).mT @ dO.abs())),
            scores)


def judge(found, standard, reference, floor, factor=2):
    """Return the largest |found - standard|, |found - reference|, |standard - reference|, and
    whether `found` passes.

    Its error is at most `factor` times that of standard attention, and the floor. That of standard
    attention is at most `factor` floors: more is a fault, and one in what the two share, such as a
    mask, would not show beside it.
    """
    found, standard = found.cpu().double(), standard.cpu().double()
    max_diff, error, error_standard = (
        largest(a - b)
        for a, b in ((found, standard), (found, reference), (standard, reference)))
    passed = error <= factor * error_standard + floor and error_standard <= factor * floor
    return max_diff, error, error_standard, passed


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
