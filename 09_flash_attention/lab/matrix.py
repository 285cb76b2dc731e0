"""The calls that judge_kernel.py makes of a kernel, and what each of them has to give in float64.

A kernel is called as F.scaled_dot_product_attention is. Its `is_causal` is aligned upper-left:
query i sees the keys up to i. The lower-right corner of a cache, and windows, come as masks. A row
that sees no key has to be 0, as torch gives it since 2.5.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Callable, Optional

import torch

from lab.cases import Case, dtype_name
from lab.judge import floor, gradient_sums

NAN_BESIDE = ("rows of a buffer", "every second row", "a cache's first rows")
LARGE = ("large scores", "scores around 100")
SEEING = {"blind rows": "bool", "blind rows, -inf": "zero or -inf"}  # the same without blind rows


@dataclass(frozen=True)
class Problem:
    """One call. case: shapes and dtype; its causal and window stay unset, is_causal is SDPA's.

    mask: (kind, which dimensions it has), such as ("bool", "B11K"), see `mask_of`. layout, values:
    how q, k and v lie in memory and what they hold. gradients: dQ, dK and dV are judged, not O.
    """

    group: str
    case: Case
    is_causal: bool = False
    mask: Optional[tuple] = None
    scale: Optional[float] = None
    layout: str = ""
    values: str = ""
    gradients: bool = False

    @property
    def text(self):
        """The problem without its dtype, in a table's cell."""
        parts = [self.case.shape, "is_causal" * self.is_causal, " ".join(map(str, self.mask or ())),
                 f"scale {self.scale}" if self.scale is not None else "", self.layout, self.values,
                 "gradients" * self.gradients]
        return ", ".join(part for part in parts if part)

    @property
    def dtype(self):
        return dtype_name(self.case.dtype)

    def inputs(self, device, seed):
        """Return q, k, v, dO and the mask or None, on the device: the same on each device."""
        q, k, v, dO = self.case.inputs("cpu", seed, dO=True)
        q, k, v = numbers_of(self.values, q, k, v)
        q, k, v = laid_out(self.layout, *(x.to(device) for x in (q, k, v)))
        dO = dO.to(device)
        if self.layout == "dO expanded":
            dO = dO[:, :, :1].expand(dO.shape)
        generator = torch.Generator().manual_seed(seed + 1)
        mask = self.mask and mask_of(*self.mask, self.case, generator).to(device)
        return q, k, v, dO, mask


def numbers_of(values, q, k, v):
    """Return q, k and v with the numbers that `values` names."""
    q, k = q.clone(), k.clone()
    if values == "large scores":  # before the scale they overflow float16
        q, k = q * 100, k * 100
    if values == "scores around 100":  # exp(100) overflows float32
        q[..., 0], k[..., 0] = 10, 10 * q.shape[-1] ** 0.5
    if values == "rising scores":  # each tile has a larger maximum
        rise = torch.linspace(-1, 1, k.shape[-2])
        q[..., 0], k[..., 0] = 1, (8 * rise * k.shape[-1] ** 0.5).to(k.dtype)
    if values == "rising V":  # half sums, once large, no longer feel what is added
        v = v + torch.linspace(0, 8, v.shape[-2]).to(v.dtype)[:, None]
    return q, k, v


def laid_out(layout, q, k, v):
    """Return q, k and v of the same numbers in another layout, NaN beside them where there is room.

    Of "expanded" k and v are those of batch 0.
    """
    if layout == "BNHD in memory":
        return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    if layout == "q, k, v in one buffer":
        B, H, N, d = q.shape
        packed = torch.stack((q, k, v)).permute(1, 3, 0, 2, 4).contiguous()  # [B, N, 3, H, d]
        return [packed[:, :, i].transpose(1, 2) for i in range(3)]
    if layout == "column by column":
        return [x.mT.contiguous().mT for x in (q, k, v)]
    if layout == "expanded":
        return [q, *(x[:1].expand(x.shape) for x in (k, v))]
    if layout == "one number off":  # not on 16 bytes
        return [torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape) for x in (q, k, v)]
    if layout in NAN_BESIDE:
        return [within_nan(layout, x) for x in (q, k, v)]
    return [q, k, v]


def within_nan(layout, x):
    B, H, N, d = x.shape
    shape, place = {"rows of a buffer": ((B, H, N, d + 8), (..., slice(d))),
                    "every second row": ((B, H, 2 * N, d), (..., slice(0, None, 2), slice(None))),
                    "a cache's first rows": ((B, H, N + 192, d), (..., slice(N), slice(None)))
                    }[layout]
    buffer = x.new_full(shape, torch.nan)
    buffer[place] = x
    return buffer[place]


def mask_of(kind, dims, case, generator):
    """Return a mask of the dimensions `dims`: QK, 11QK, B1QK, 1HQK, BHQK, B11K or BH1K.

    kind: bool keeps 7 of 10 pairs, each row its first key; 'float' is added; 'zero or -inf' is
    'bool' as such a float; 'padding' keeps the first keys; 'lower-right' and 'window L R' are
    bands; 'blind rows' is 'bool' with rows that see nothing, 'blind rows, -inf' the same as float.
    """
    (B, H, Nq, _), (*_, Nk, _), _ = case.shapes
    sizes = {"B": B, "H": H, "Q": Nq, "K": Nk, "1": 1}
    shape = [sizes[letter] for letter in dims]
    draw = partial(torch.rand, generator=generator)
    offset = torch.arange(Nk) - torch.arange(Nq)[:, None] - (Nk - Nq)  # [Nq, Nk]
    if kind == "float":
        return torch.randn(shape, generator=generator).to(case.dtype)
    if kind == "padding":
        lengths = 1 + (draw(*shape[:-1], 1) * Nk).long()
        return torch.arange(Nk) < lengths.clamp(max=max(1, Nk - 1))
    if kind == "lower-right":
        return offset <= 0
    if kind.startswith("window"):
        left, right = map(int, kind.split()[1:])
        return (offset >= -left) & (offset <= right)
    keep = draw(*shape) < 0.7
    keep[..., 0] = True
    if kind.startswith("blind rows"):
        keep[..., Nq // 2 :: 3, :] = False
        keep[..., 0, :] = False
    if "inf" in kind:
        return torch.zeros(shape, dtype=case.dtype).masked_fill(~keep, -torch.inf)
    return keep


# What is right, and how wrong it could be


def softmax(S):
    """Return the softmax of S, 0 in rows of -inf alone."""
    blind = (S == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(S.masked_fill(blind, 0), dim=-1).masked_fill(blind, 0)


@dataclass(frozen=True)
class Call:
    """A call in float64 on the CPU, of which `replace` makes another formula.

    kv_head: which key/value head each query head reads. softmax: of the scores [B, H, Nq, Nk] -> P,
    which weights, [..., Nq, Nk], multiply.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dO: torch.Tensor
    mask: Optional[torch.Tensor]
    is_causal: bool
    scale: float
    kv_head: torch.Tensor
    dtype: torch.dtype
    softmax: Callable = softmax
    weights: torch.Tensor = torch.ones(())

    @staticmethod
    def of(problem, q, k, v, dO, mask):
        q, k, v, dO = (x.detach().cpu().double().clone() for x in (q, k, v, dO))
        scale = q.shape[-1] ** -0.5 if problem.scale is None else problem.scale
        kv_head = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
        mask = mask if mask is None else mask.cpu().clone()  # a kernel may write into it
        return Call(q, k, v, dO, mask, problem.is_causal, scale, kv_head, problem.case.dtype)

    def change(self, **fields):
        return replace(self, **fields)

    @property
    def full_mask(self):
        """The mask as [B, H, Nq, Nk], a view."""
        return self.mask.expand(*self.q.shape[:-1], self.k.shape[-2])

    @property
    def bias(self):
        """What is added to the scores, [..., Nq, Nk]: the mask and the corner as 0 and -inf."""
        Nq, Nk = self.q.shape[-2], self.k.shape[-2]
        bias = torch.zeros(Nq, Nk, dtype=torch.float64)
        if self.mask is not None:
            is_bool = self.mask.dtype == torch.bool
            bias = bias.masked_fill(~self.mask, -torch.inf) if is_bool else bias + self.mask
        if self.is_causal:
            bias = bias.masked_fill(torch.ones(Nq, Nk, dtype=torch.bool).triu(1), -torch.inf)
        return bias

    def output(self):
        """Return O and its floor, as judge.py's `exact` does, with masks and scales of any kind."""
        q, k, v = self.q, self.k[:, self.kv_head], self.v[:, self.kv_head]
        bias = self.bias
        P = self.softmax(q @ k.mT * self.scale + bias) * self.weights
        t = q.abs() @ k.abs().mT * abs(self.scale) + bias.masked_fill(bias == -torch.inf, 0).abs()
        W = P * (1 + t + (P * t).sum(-1, keepdim=True))  # see judge.py, `floor`
        O = P @ v
        return O, floor(self.dtype, W @ v.abs(), P @ v.abs() + O.abs())

    def gradients(self):
        """Return (dQ, floor), (dK, floor), (dV, floor), by autograd. The scale is 1/sqrt(d), and a
        float mask holds 0 and -inf alone: judge.py's sums are those of that.
        """
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        q, k, v = leaves[0], *(x[:, self.kv_head] for x in leaves[1:])
        O = self.softmax(q @ k.mT * self.scale + self.bias) * self.weights @ v
        results = torch.autograd.grad(O, leaves, self.dO)
        keep = self.bias != -torch.inf
        with torch.no_grad():
            sums = gradient_sums(q, k, v, O, self.dO, keep, q.shape[1] // self.k.shape[1])
        return [(x, floor(self.dtype, terms, rounded + x.abs()))
                for x, (terms, rounded) in zip(results, sums)]


# The matrix


def company(dtype, device, seed):
    """Return {what is alike: (inputs, other inputs, which rows of the first output they share)}, of
    40 queries and 700 keys; inputs: (q, k, v) or (q, k, v, mask).
    """
    q, k, v, _, _ = Problem("", Case(40, 4, 2, Nk=700, dtype=dtype)).inputs(device, seed)
    longer = Problem("", Case(40, 4, 2, Nk=1100, dtype=dtype)).inputs(device, seed + 1)[1:3]
    longer = [torch.cat((a, b[:, :, 700:]), 2) for a, b in zip((k, v), longer)]
    nan = [torch.cat((x, torch.full_like(x, torch.nan)), 2) for x in (k, v)]
    hidden, hidden_nan = ((torch.arange(Nk) < 700).expand(40, Nk).to(device) for Nk in (1100, 1400))
    return {
        "the same call twice": ((q, k, v), (q, k, v), ...),
        "a batch entry alone": ((q, k, v), (q[:1], k[:1], v[:1]), slice(1)),
        "a query row alone": ((q, k, v), (q[:, :, 7:8], k, v), (..., slice(7, 8), slice(None))),
        "a longer cache, its rest masked": ((q, k, v), (q, *longer, hidden), ...),
        "a longer cache of NaN, masked": ((q, k, v), (q, *nan, hidden_nan), ...)}


def problems(dtype, quick=False):
    """Return the problems of one dtype."""
    C = partial(Case, batch=2, heads=2, d=32, dtype=dtype)
    groups = lengths, sizes, layouts, corners, masked, scored, differentiated
    return [problem for group in groups for problem in group(C, quick)]


def lengths(C, quick):
    """Beside the edges of tiles, and longer than what one product or one index takes."""
    N_few = (1, 17, 65, 129, 513)
    N_all = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 257, 511, 512, 513)
    for N in N_few if quick else N_all:
        yield Problem("lengths", C(N, d=64, batch=1 if N > 200 else 2))
    for Nq, Nk in ((113, 203), (203, 113), (3, 799), (1, 2048), (2048, 33), (1, 65536), (65536, 5)):
        yield Problem("lengths", C(Nq, Nk=Nk, batch=1))
    for N in () if quick else (1024, 2048):
        yield Problem("lengths", C(N, d=64, batch=1, heads=1))


def sizes(C, quick):
    for d in (8, 96, 128) if quick else (8, 16, 31, 63, 72, 80, 96, 128, 256):
        yield Problem("head sizes", C(33, d=d))
    for d, dv in ((64, 96), (96, 64)):
        yield Problem("head sizes", C(33, d=d, dv=dv))
    for H, kv_heads in ((4, 2), (8, 1), (6, 3)):
        yield Problem("groups", C(65, heads=H, kv_heads=kv_heads))
    yield Problem("groups", C(65, batch=3, heads=3, kv_heads=3))  # odd, and not two of each


def layouts(C, quick):
    for layout in (*NAN_BESIDE, "BNHD in memory", "q, k, v in one buffer", "column by column",
                   "expanded", "one number off"):
        yield Problem("layouts", C(65), layout=layout)
    for layout in ("BNHD in memory", "a cache's first rows"):
        for options in ({"is_causal": True}, {"mask": ("bool", "BHQK")}):
            yield Problem("together", C(65, heads=4, kv_heads=2), layout=layout, **options)


def corners(C, quick):
    few = ((17, 17), (65, 130), (130, 65))
    more = ((1, 5), (2, 5), (5, 2), (64, 64), (64, 128), (1, 513), (129, 129), (513, 513))
    for Nq, Nk in few if quick else few + more:
        yield Problem("causal", C(Nq, Nk=Nk, batch=1), True)


def masked(C, quick):
    shapes = ("QK", "11QK", "B11K", "BH1K", "B1QK", "1HQK", "BHQK")
    for mask in (*(("bool", dims) for dims in shapes), *(("float", dims) for dims in shapes),
                 ("padding", "B11K"), ("zero or -inf", "BHQK"), ("lower-right", "QK")):
        yield Problem("masks", C(65, Nk=130), mask=mask)
    for Nk in (600, 2048):
        for dims in ("QK", "B11K"):
            yield Problem("masks", C(9, Nk=Nk, batch=1), mask=("bool", dims))
    for Nq, Nk in ((65, 65), (33, 100)):
        for left, right in ((16, 0), (8, 8), (0, 16)):
            yield Problem("windows", C(Nq, Nk=Nk, batch=1), mask=(f"window {left} {right}", "QK"))
    for N in (9, 65):
        for mask in (("blind rows", "QK"), ("blind rows, -inf", "BHQK")):
            yield Problem("blind rows", C(N), mask=mask)


def scored(C, quick):
    for mask, scale in ((None, 1.0), (None, 0.05), (("float", "QK"), 0.5), (("bool", "QK"), 0.5)):
        yield Problem("scale", C(65), mask=mask, scale=scale)
    for scale in (-0.5, 0.0):  # the largest score is the smallest product; -inf * 0 is NaN
        for options in ({}, {"is_causal": True}, {"mask": ("bool", "QK")}):
            yield Problem("scale", C(65), scale=scale, **options)
    yield Problem("scores", C(65, d=64), scale=-0.125, values="large scores")
    for N in (65, 300):
        for values in (*LARGE, "rising scores"):
            for is_causal in (False, True):
                yield Problem("scores", C(N, d=64), is_causal, values=values)
    for Nk in (130, 1000):
        yield Problem("scores", C(9, Nk=Nk, batch=1), values="rising V")


def differentiated(C, quick):
    for case, options in (
            (C(65), {}), (C(65), {"is_causal": True}), (C(33, Nk=65), {"is_causal": True}),
            (C(65, heads=4, kv_heads=2), {}), (C(33), {"mask": ("bool", "BHQK")}),
            (C(33), {"mask": ("blind rows, -inf", "QK")}), (C(33), {"layout": "BNHD in memory"}),
            (C(33), {"layout": "dO expanded"}), (C(300, batch=1), {"is_causal": True})):
        yield Problem("gradients", case, gradients=True, **options)
