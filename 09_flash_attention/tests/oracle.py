"""Attention written another way: float64, one query row at a time, its mask a list of keys."""

import itertools
import math

import torch


def oracle(Q, K, V, *, causal=False, q_start=None, window=None, scale=None, attn_mask=None,
           score_mod=None):
    """Return O and L in float64 for any [..., N, d]. Keys that a row may not see are not read."""
    Q, K, V = (x.detach().cpu().double() for x in (Q, K, V))
    Nq, Nk, dv = Q.shape[-2], K.shape[-2], V.shape[-1]
    scale = Q.shape[-1] ** -0.5 if scale is None else scale
    q_start = Nk - Nq if q_start is None else q_start
    lead = tuple(Q.shape[:-2])
    mask = None if attn_mask is None else attn_mask.cpu().expand(*lead, Nq, Nk)
    O = torch.zeros(*lead, Nq, dv, dtype=torch.float64)
    L = torch.full((*lead, Nq), -math.inf, dtype=torch.float64)
    for *where, i in itertools.product(*map(range, (*lead, Nq))):
        source = list(where)
        if len(where) >= 2:
            source[-1] = where[-1] * K.shape[-3] // Q.shape[-3]
        keys = [j for j in range(Nk) if _kept(j, q_start + i, causal, window)]
        if mask is not None:
            row = mask[(*where, i)]
            keys = [j for j in keys if (row[j] if row.dtype == torch.bool else row[j] > -math.inf)]
        if not keys:
            continue
        keys = torch.tensor(keys)
        scores = (K[tuple(source)][keys] @ Q[(*where, i)]) * scale
        if score_mod is not None:
            b, h = (where + [0, 0])[:2]
            scores = torch.stack([score_mod(s, torch.tensor(b), torch.tensor(h), torch.tensor(i), j)
                                  for s, j in zip(scores, keys)]).double()
        if mask is not None and mask.dtype != torch.bool:
            scores = scores + mask[(*where, i)][keys].double()
        if scores.max() == -math.inf:
            continue
        weights = (scores - scores.max()).exp()
        O[(*where, i)] = weights @ V[tuple(source)][keys] / weights.sum()
        L[(*where, i)] = scores.max() + weights.sum().log()
    return O, L


def _kept(j, position, causal, window):
    left, right = window or (None, None)
    return not (causal and j > position or left is not None and j < position - left
                or right is not None and j > position + right)
