"""What a wrong kernel computes instead: formulas that the output of one is compared with.

Each is a `Call` with something changed, or its gradients with a step left out. Behind the formulas
stand the faults that are known by where NaN or the wrong rows are, or by the size of the error.
"""

import math

import torch

from lab.judge import largest
from lab.matrix import LARGE, NAN_BESIDE

TILES = (256, 128, 64, 32, 16)
UNNAMED = "none of the formulas", "more scores than are looked at"
EDGES = (16, 32, 64, 128, 256, 512, 1024)


def wrong_calls(call, raw):
    """Yield (name, detail, the wrong Call) for the output."""
    yield from wrong_masks(call)
    yield from wrong_corners(call)
    yield from wrong_scales(call)
    yield from wrong_heads(call, raw)
    yield from wrong_sums(call)


def wrong_masks(call):
    mask = call.mask
    if mask is None:
        return
    is_bool = mask.dtype == torch.bool
    yield "mask ignored", "", call.change(mask=None)
    if is_bool:
        yield "mask inverted", "", call.change(mask=~mask)
        yield "bool mask added as 0 and 1", "", call.change(mask=mask.double())
        yield from wrong_windows(call)
    else:
        yield "float mask subtracted", "", call.change(mask=-mask)
        yield "mask multiplied by the scale", "", call.change(mask=mask * call.scale)
        yield "float mask taken as bool", "", call.change(mask=mask != 0)
    full = call.full_mask
    for n in EDGES:
        if n < full.shape[-1]:
            beyond = full.clone()
            beyond[..., n:] = True if is_bool else 0
            yield "mask ignored beyond a key", f"from key {n} on", call.change(mask=beyond)
    yield "mask of batch 0 for all", "", call.change(mask=full[:1])
    yield "mask of head 0 for all", "", call.change(mask=full[:, :1])
    yield "mask of query 0 for all", "", call.change(mask=full[:, :, :1])
    if full.shape[-1] == full.shape[-2]:
        yield "mask transposed", "", call.change(mask=full.mT)
    blind = (call.bias == -torch.inf).all(-1, keepdim=True)
    if blind.any():
        def finite(S):
            return torch.softmax(S.masked_fill(blind, 0), dim=-1)

        yield "average of V in rows that see no key", "", call.change(softmax=finite)


def wrong_windows(call):
    """Yield the bands that are off by one, where the mask is a band or a lower-right corner."""
    full = call.full_mask
    Nq, Nk = full.shape[-2:]
    offset = torch.arange(Nk) - torch.arange(Nq)[:, None] - (Nk - Nq)  # [Nq, Nk]
    if not full.any() or full.all():
        return
    seen = offset.expand(full.shape)[full]
    left, right = seen.min(), seen.max()
    if not full.equal(((offset >= left) & (offset <= right)).expand(full.shape)):
        return
    for detail, (a, b) in {"a key more on the left": (-1, 0), "a key less on the left": (1, 0),
                           "a key more on the right": (0, 1), "a key less on the right": (0, -1),
                           }.items():
        yield "window off by one", detail, call.change(
            mask=(offset >= left + a) & (offset <= right + b))
    shift = Nk - Nq
    if shift:
        yield "upper-left in place of lower-right", "", call.change(
            mask=(offset + shift >= left) & (offset + shift <= right))


def wrong_corners(call):
    if not call.is_causal:
        return
    Nq, Nk = call.q.shape[-2], call.k.shape[-2]
    ones = torch.ones(Nq, Nk, dtype=torch.bool)
    for name, mask in (("is_causal ignored", ones),
                       ("lower-right in place of upper-left", ones.tril(Nk - Nq)),
                       ("is_causal inverted", ones.triu())):
        yield name, "", call.change(is_causal=False, mask=mask)
    for detail, step in (("a key more", 1), ("a key less", -1)):
        yield "causal off by one", detail, call.change(is_causal=False, mask=ones.tril(step))
    for Bc in TILES:  # only whole tiles beyond the diagonal are left out
        i, j = torch.arange(Nq)[:, None], torch.arange(Nk)
        yield "causal by tiles alone", f"tiles of {Bc}", call.change(
            is_causal=False, mask=j // Bc <= i // Bc)


def wrong_scales(call):
    d, dv, scale = call.q.shape[-1], call.v.shape[-1], call.scale
    for name, wrong in (("scale missing", 1.0), ("scale applied twice", scale**2),
                        ("scale argument ignored", d**-0.5), ("scale of dv, not of d", dv**-0.5),
                        ("sign of the scale lost", abs(scale))):
        if wrong != scale:
            yield name, "", call.change(scale=wrong)
    for name, factor in (("base 2 in place of e", math.log(2)), ("log2(e) applied twice",
                                                                1 / math.log(2))):
        yield name, "", call.change(softmax=lambda S, factor=factor: call.softmax(S * factor))


def wrong_heads(call, raw):
    H, kv_heads = call.q.shape[1], call.k.shape[1]
    heads = torch.arange(H)
    for name, kv_head in (("heads mapped by tiling", heads % kv_heads),
                          ("every head reads key/value head 0", heads * 0)):
        if not kv_head.equal(call.kv_head):
            yield name, "", call.change(kv_head=kv_head)
    for n in (16, 32, 64, 128):
        if n < call.q.shape[-1]:
            yield "dimensions of q and k dropped", f"from {n} on", call.change(q=call.q[..., :n],
                                                                          k=call.k[..., :n])
    as_read = [contiguous(x) for x in raw[:3]]
    if any(x is not None for x in as_read):
        q, k, v = (new if new is not None else old
                   for new, old in zip(as_read, (call.q, call.k, call.v)))
        yield "strides ignored", "", call.change(q=q, k=k, v=v)
        yield "strides of k and v ignored", "", call.change(k=k, v=v)
    if len(call.q) > 1:
        yield "k and v of batch 0 for all", "", call.change(
            k=call.k[:1].expand(call.k.shape), v=call.v[:1].expand(call.v.shape))


def contiguous(x):
    """Return what is read where x is taken as contiguous, in float64; None where it is, or where
    that is not all in x's memory, or is NaN.
    """
    x = x.detach()
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    if x.is_contiguous() or room < x.numel():
        return None
    flat = x.as_strided((x.numel(),), (1,)).view(x.shape).cpu().double()
    return flat if flat.isfinite().all() else None


def wrong_sums(call):
    Nk = call.k.shape[-2]
    yield "uniform average", "of the keys that are seen", call.change(softmax=uniform)
    yield "uniform average", "of all keys", call.change(
        softmax=lambda S: torch.ones_like(S) / S.shape[-1])
    for n in dict.fromkeys(Nk // Bc * Bc for Bc in (*TILES, 8, 4)):
        if 0 < n < Nk:
            yield "tail dropped", f"keys from {n} on", call.change(softmax=first_keys(n))
            yield "tail of V dropped", f"rows from {n} on, l counts them", call.change(
                softmax=lambda S, n=n: call.softmax(S) * (torch.arange(Nk) < n))
    yield "keys dropped", "the last one", call.change(softmax=first_keys(Nk - 1))
    yield "keys dropped", "the first one", call.change(softmax=first_keys(1, -torch.inf))
    for Bc in TILES:
        if Bc < Nk:
            yield "tail's empty places take part", f"tiles of {Bc}, score 0", call.change(
                softmax=padded(-Nk % Bc))
        for lost in ("each", "the first", "the last") if Bc < Nk <= 32 * Bc else ():
            for O_alone in (False, True):
                what = "O alone" if O_alone else "l and O"
                yield "a tile's maximum lost", f"tiles of {Bc}, {lost} step, {what}", (
                    call.change(softmax=lost_maximum(Bc, lost, O_alone)))


def uniform(S):
    seen = (S != -torch.inf).double()
    return seen / seen.sum(-1, keepdim=True).clamp(min=1)


def first_keys(n, before=0.0):
    """Return a softmax that sees the keys before n alone, or with -inf those from n on alone."""

    def cut(S):
        S = S.clone()
        S[..., :n] = S[..., :n] + before
        if not before:
            S[..., n:] = -torch.inf
        blind = (S == -torch.inf).all(-1, keepdim=True)
        return torch.softmax(S.masked_fill(blind, 0), -1).masked_fill(blind, 0)

    return cut


def padded(n):
    """Return a softmax in which n more keys have the score 0."""

    def with_zeros(S):
        zeros = S.new_zeros(*S.shape[:-1], n)
        return torch.softmax(torch.cat((S, zeros), -1), -1)[..., : S.shape[-1]]

    return with_zeros


def lost_maximum(Bc, lost, O_alone):
    """Return a softmax by tiles that forgets `correction` in each, the first or the last step."""

    def by_tiles(S):
        tiles = S.split(Bc, dim=-1)
        m = S.new_full((*S.shape[:-1], 1), torch.finfo(S.dtype).min)
        P, l = [], 0
        for step, tile in enumerate(tiles):
            m_new = torch.maximum(m, tile.amax(-1, keepdim=True))
            correction = torch.exp(m - m_new)
            forgets = step and (lost == "each" or step == (
                1 if lost == "the first" else len(tiles) - 1))
            P = [x if forgets else x * correction for x in P] + [torch.exp(tile - m_new)]
            l = l * (1 if forgets and not O_alone else correction) + P[-1].sum(-1, keepdim=True)
            m = m_new
        return torch.cat(P, -1) / torch.where(l == 0, 1, l)

    return by_tiles


# Known by their place or size


def not_finite(problem, call, found, right, limits):
    """Name an output, or gradients, with NaN or inf in it."""
    bad = torch.cat([(~x.isfinite()).flatten() for x in found])
    blind = (call.bias == -torch.inf).all(-1)  # [..., Nq]
    if len(found) == 1 and blind.any():
        rows = (~found[0].isfinite()).any(-1)
        if rows.equal(blind.expand(rows.shape)):
            return "NaN in rows that see no key", ""
    if blind.any():
        return "NaN from rows that see no key", "beyond these rows"
    if call.scale <= 0 and (call.bias == -torch.inf).any():
        return "mask multiplied by the scale", "-inf times a scale of 0 or less"
    if problem.layout in NAN_BESIDE:
        return "memory beside the tensors is read", problem.layout
    if problem.values in LARGE:
        return "scores overflow", "no maximum is subtracted, or they are half"
    return unwritten(found, right, limits) or (
        "NaN or inf", f"{bad.float().mean().item():.0%} of the output")


def unwritten(found, right, limits):
    """Name the output, or the gradient, that is right up to a tile's edge and 0, NaN or far off in
    each row from there on; None where there is none.
    """
    edge = TILES[-1]
    for letter, x, y, limit in zip(letters(found), found, right, limits):
        wrong = (~((x - y).abs() <= limit)).any(-1)  # [B, H, N]
        unlike = ~(wrong | (y == 0).all(-1))  # a 0 that is right may be unwritten
        at = unlike.flatten(0, 1).any(0).nonzero()
        n = (int(at[-1]) + edge) // edge * edge if len(at) else 0
        tail = x[..., n:, :]
        held = "0" if (tail == 0).all() else "NaN" if tail.isnan().all() else "other numbers"
        known = held == "0" or n and (held == "NaN" or largest(x - y) > 0.1 * largest(y))
        if known and wrong[..., n:].any() and not wrong[..., :n].any():
            return f"last rows of {letter} not written", f"from row {n} on they hold {held}"
    return None


def letters(found):
    return ("O",) if len(found) == 1 else ("dQ", "dK", "dV")


def coarse(call, found, right):
    """Name an error that has the size of another precision's, within a factor of 8. Sizes alone:
    in which order a kernel sums can't be known.
    """
    error = largest(found - right)
    if call.dtype.itemsize >= 4:
        half, name = torch.float16, "float32 multiplied as tf32 or half"
        wrong = call.change(q=rounded(call.q, half), k=rounded(call.k, half),
                            v=rounded(call.v, half)).output()[0]
    else:
        name, wrong = "sums in half precision", half_sums(call)
    size = largest(wrong - right)
    return (name, "by the size of its error") if size / 8 < error < 8 * size else (
        UNNAMED[0], "")


def half_sums(call, Bc=16):
    """Return O where each tile of Bc keys is added to an O of the half type."""
    S = (call.q @ call.k[:, call.kv_head].mT * call.scale + call.bias)
    P, O = call.softmax(S), 0
    for P_tile, V_tile in zip(P.split(Bc, -1), call.v[:, call.kv_head].split(Bc, -2)):
        O = rounded(O + P_tile @ V_tile, call.dtype)
    return O


def rounded(x, dtype):
    return x.to(dtype).double()


# Gradients


def wrong_gradients(call, raw):
    """Yield (name, detail, ([dQ, dK, dV], their floors)) with a step of the backward wrong."""
    right = call.gradients()
    changed = call.change(is_causal=False, mask=None)
    dO = contiguous(raw[3])
    for name, options in (
            *([("strides of dO ignored", {"dO": dO})] if dO is not None else ()),
            ("backward: D missing", {"D": 0}),
            ("backward: scale missing in dQ and dK", {"scale": 1}),
            ("backward: scale missing in dQ", {"dq_scale": 1}),
            ("backward: L in base 2", {"L_factor": 1 / math.log(2)}),
            ("backward: mask or is_causal ignored", {"bias": changed.bias}),
            ("backward: one head of a group", {"one_head": True})):
        answers = backward(call, **options)
        yield name, "", (answers, [  # a larger result is rounded by as much more
            limit * max(1, largest(y) / largest(x)) if largest(x) else limit
            for y, (x, limit) in zip(answers, right)])
    for name, detail, wrong in wrong_calls(call, raw):
        try:
            parts = wrong.gradients()
        except RuntimeError:  # of other shapes
            continue
        yield name, detail, tuple(map(list, zip(*parts)))
    for name, x in (("dQ", 0), ("dK", 1), ("dV", 2)):
        zero = [part * (i != x) for i, (part, _) in enumerate(right)]
        yield f"{name} is 0", "", (zero, [limit for _, limit in right])


def backward(call, D=1, scale=None, dq_scale=None, L_factor=1, bias=None, one_head=False, dO=None):
    """Return dQ, dK, dV as flash_backward.py derives them, with a step changed."""
    dO = call.dO if dO is None else dO
    q, k, v = call.q, call.k[:, call.kv_head], call.v[:, call.kv_head]
    S = q @ k.mT * call.scale + call.bias  # [B, H, Nq, Nk]
    P = call.softmax(S)
    O = P @ v
    if L_factor != 1 or bias is not None:  # P is made again, of the forward's L
        L = torch.logsumexp(S, -1, keepdim=True)
        S = S if bias is None else q @ k.mT * call.scale + bias
        P = torch.exp(S - L * L_factor).masked_fill(L == -torch.inf, 0)
    dP = dO @ v.mT
    dS = P * (dP - D * (dO * O).sum(-1, keepdim=True)) * (scale or call.scale)
    dq = dS @ k * ((dq_scale or call.scale) / call.scale)
    G = q.shape[1] // call.k.shape[1]
    dk, dv = (x.unflatten(1, (-1, G)) for x in (dS.mT @ q, P.mT @ dO))  # [B, Hkv, G, Nk, ...]
    return [dq, *(x[:, :, -1] if one_head else x.sum(2) for x in (dk, dv))]
