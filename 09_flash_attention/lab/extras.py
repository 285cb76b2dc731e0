"""What a call that trains may have besides: a score_mod, a mask that learns, L, dropout; and the
float64 gradients that its own are compared with.
"""

from dataclasses import dataclass, field

import torch

from lab.dropout import Dropout
from lab.judge import floor, gradient_sums, seen

CAP, DROPOUT = 5.0, 0.1


@dataclass
class Extra:
    """Options of a call, and the tensors whose gradients are wanted beside those of Q, K and V."""

    options: dict
    learned: list = field(default_factory=list)


def extras(case, device, dtype=None):
    """Return {name: Extra} for a case, what is learned in its dtype or another."""
    place = {"dtype": dtype or case.dtype, "device": device}
    slopes = torch.linspace(0.01, 0.1, case.heads or 1, **place).requires_grad_()
    bias = torch.linspace(-1, 1, case.Nk or case.Nq, **place).requires_grad_()

    def softcap(score, b, h, q_idx, kv_idx):
        return CAP * torch.tanh(score / CAP)

    def alibi(score, b, h, q_idx, kv_idx):
        return score - slopes.take(h) * (q_idx - kv_idx).abs()

    return {
        "softcap": Extra({"score_mod": softcap}),
        "slopes": Extra({"score_mod": alibi}, [slopes]),
        "mask": Extra({"attn_mask": bias}, [bias]),
        "L": Extra({"return_lse": True}),
        "dropout": Extra({"dropout_p": DROPOUT}),
    }


def exact_with(case, Q, K, V, dO, name):
    """Return [(gradient, floor)] of Q, K, V and what is learned, in float64 on the CPU.

    By the formula, on whole matrices. For the floors see judge.py: an extra adds to the size of a
    score what it changes it by. Its derivative in the score is at most 1 here, and that in what it
    learns is of one sign, so the gradient of the terms is the sum of the terms of the gradient.
    """
    extra = extras(case, "cpu", torch.float64)[name]
    leaves = [x.detach().cpu().double().requires_grad_() for x in (Q, K, V)]
    dO, G = dO.cpu().double(), (case.heads or 1) // (case.kv_heads or case.heads or 1)
    Q, K, V = leaves[0], *(x.repeat_interleave(G, dim=1) if G > 1 else x for x in leaves[1:])
    keep = seen(case, Q.shape[-2], K.shape[-2])
    blind = ~keep.any(-1, keepdim=True)
    S = raw = Q @ K.mT * case.d**-0.5  # [..., Nq, Nk]
    if "score_mod" in extra.options:
        i, j = (torch.arange(n) for n in S.shape[-2:])
        h = torch.arange(case.heads or 1).view(-1, 1, 1)
        S = extra.options["score_mod"](raw, 0, h, i[:, None], j)
    S = S + extra.options.get("attn_mask", 0)
    hidden = S.masked_fill(~keep & ~blind, -torch.inf)
    P, Z, dL = torch.softmax(hidden, -1).masked_fill(blind, 0), torch.ones(()), torch.zeros(1)
    if name == "dropout":
        dropped = Dropout(DROPOUT, 0, Q).dropped(*(slice(0, n) for n in S.shape[-2:]))
        Z = (~dropped).double() / (1 - DROPOUT)
    if name == "L":
        dL = dO[..., :1].masked_fill(blind, 0)
    O, L = P * Z @ V, torch.logsumexp(hidden, -1, keepdim=True)
    wanted = [*leaves, *extra.learned]
    results = torch.autograd.grad((O * dO).sum() + (L * dL).sum(), wanted, retain_graph=True)
    *sums, dS = gradient_sums(Q, K, V, O, dO, keep, G, S, Z, dL)
    for x in extra.learned:
        sums.append([torch.autograd.grad(S, x, d.expand_as(S), retain_graph=True)[0] for d in dS])
    return [(x, floor(case.dtype, terms.detach(), rounded.detach() + x.abs()))
            for x, (terms, rounded) in zip(results, sums)]
