"""What a wrong kernel computes instead: formulas that the output of one is compared with.

Each is a `Call` with something changed, or its gradients with a step left out.
"""

import math
from itertools import chain

import torch

from lab.judge import largest

TILES = (256, 128, 64, 32, 16)
OTHER_TILES = (192, 160, 112, 96, 80, 48, 8, 4)
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
                           "left": (-Nq - Nk, 0), "right": (0, Nq + Nk)}.items():
        name = "a window's bound ignored" if abs(a + b) > 1 else "window off by one"
        yield name, detail, call.change(mask=(offset >= left + a) & (offset <= right + b))
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
    yield "uniform average", "of the keys that are seen", call.change(scale=0.0)
    yield "uniform average", "of all keys", call.change(
        scale=0.0, mask=None, is_causal=False)
    kept = (call.bias != -torch.inf).double()
    if not kept.all():
        yield "mask applied after the softmax", "", call.change(
            is_causal=False, mask=call.bias.nan_to_num(neginf=0), weights=kept)
    for n in dict.fromkeys(Nk // Bc * Bc for Bc in TILES + OTHER_TILES):
        if 0 < n < Nk:
            yield "tail dropped", f"keys from {n} on", call.change(softmax=first_keys(n))
            yield "tail of V dropped", f"rows from {n} on, l counts them", call.change(
                weights=(torch.arange(Nk) < n).double())
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
            ("backward: scale missing in dK", {"dk_scale": 1}),
            ("backward: scale applied twice in dQ", {"dq_scale": call.scale**2}),
            ("backward: one head of a group", {"of_group": lambda x: x[:, :, -1]}),
            ("backward: one head of a group", {"of_group": lambda x: x[:, :, 0]}),
            ("backward: mean of a group", {"of_group": lambda x: x.mean(2)})):
        answers = backward(call, **options)
        yield name, "", (answers, [  # a larger result is rounded by as much more
            limit * max(1, largest(y) / largest(x)) if largest(x) else limit
            for y, (x, limit) in zip(answers, right)])
    passed = call.change(is_causal=False, mask=call.bias.clamp(min=-1e30))  # S is lost in -1e30
    for name, detail, wrong in chain(wrong_calls(call, raw), [
            ("average of V in rows that see no key", "", passed)]):
        try:
            parts = wrong.gradients()
        except RuntimeError:  # of other shapes
            continue
        yield name, detail, tuple(map(list, zip(*parts)))


def backward(call, D=1, scale=None, dq_scale=None, dk_scale=None, L_factor=1, bias=None,
             of_group=lambda x: x.sum(2), dO=None):
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
    dq, dk = dS @ k, dS.mT @ q
    dq, dk = (x * ((s or call.scale) / call.scale) for x, s in ((dq, dq_scale), (dk, dk_scale)))
    G = q.shape[1] // call.k.shape[1]
    parts = (x.unflatten(1, (-1, G)) for x in (dk, P.mT @ dO))  # [B, Hkv, G, Nk, ...]
    return [dq, *map(of_group, parts)]
