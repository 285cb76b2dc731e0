"""judge_kernel.py: a right kernel passes, a planted fault is found, named and shown small; a kernel
that raises, dies or refuses is a row; what is no kernel is one line.
"""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import judge_kernel
import pytest
import torch
from lab import judge, kernel_worker
from lab.cases import Case
from lab.kernel_worker import NO_GRADIENT, JudgeRow, judge_problem, load, repeats
from lab.matrix import Call, Problem, problems

CPU = torch.device("cpu")
LESSON = Path(judge_kernel.__file__)
GOOD = ("math", "fused", "flash", "standard")


def judged(kernel, dtype=torch.float32, seed=0, groups=None):
    """Return (problem, row) of the quick matrix without its largest, or of these groups of it."""
    return [(problem, judge_problem(kernel, problem, CPU, seed))
            for problem in problems(dtype, quick=True)
            if (groups is None or problem.group in groups) and max(problem.case.shapes[0][2],
                                                                  problem.case.shapes[1][2]) < 1024
            and math.prod(problem.case.shapes[0][:3]) * problem.case.shapes[1][2] < 2**17]


class Here(judge_kernel.Worker):
    """Judges a function in this process."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def ask(self, _, problem, names=None):
        return judge_problem(self.kernel, problem, CPU, 0, names)


def named(kernel, *groups):
    """Return the names of what is wrong in these groups, as the report has them."""
    pairs = judged(kernel, groups=groups)
    matrix, rows = zip(*pairs)
    return {row.what for row in judge_kernel.named_alike(Here(kernel), matrix, rows) if row.wrong}


# A kernel in tiles of 64 keys with a place for each fault


def wrong(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, *, fault=""):
    d, dtype, H = q.shape[-1], q.dtype, q.shape[1]
    q, k, v = of_memory(fault, q, k, v)
    half = torch.float16 if fault == "tf32" else dtype if fault == "half sums" else torch.float32
    G = H // k.shape[1]
    order = torch.arange(H) % k.shape[1] if fault == "tiled heads" else torch.arange(H) // G
    k, v = k[:, order].to(half).float(), v[:, order].to(half).float()
    used = 64 if fault == "64 dimensions" else d
    S = q.to(half).float()[..., :used] @ k[..., :used].mT * scale_of(fault, d, scale)
    if fault == "one head" and H > 1:
        S = S[:, :1].expand(S.shape)
    S = S + bias_of(fault, attn_mask, is_causal, S, scale_of(fault, d, scale))
    if fault == "base 2":
        S = S * 0.6931471805599453
    blind = (S == -torch.inf).all(-1, keepdim=True)
    if fault == "average of blind rows":
        S, blind = S.masked_fill(blind, 0), blind & False
    if fault == "uniform average" and attn_mask is None and not is_causal:
        S = S * 0
    O = in_tiles(fault, S, v, dtype)
    if fault.startswith("rows of ") and q.shape[2] > 64:  # the last tile of 64 queries
        O[:, :, q.shape[2] // 64 * 64 :] = float(fault[8:])
    return (O if fault == "NaN in blind rows" else O.masked_fill(blind, 0)).to(dtype)


def of_memory(fault, q, k, v):
    if fault == "strides" and k.stride(-1) == 1:
        if k.stride(-2) != k.shape[-1] and k.untyped_storage().nbytes() >= k.numel() * 4:
            k, v = (x.as_strided(x.shape, torch.empty(x.shape).stride()) for x in (k, v))
    if fault == "reads on" and k.stride(1) > k.shape[2] * k.stride(2):
        more = (*k.shape[:2], k.shape[2] + 1, k.shape[3])
        seen = v.as_strided(more, v.stride())[:, :, -1:] * 0  # a weight of 0 on the key behind
        v = v + seen
    if fault == "batch 0":
        k, v = k[:1].expand(k.shape), v[:1].expand(v.shape)
    return q, k, v


def scale_of(fault, d, scale):
    right = d**-0.5 if scale is None else scale
    return {"scale missing": 1.0, "scale twice": right**2, "scale ignored": d**-0.5,
            "scale or 1/sqrt(d)": scale or d**-0.5, "|scale|": abs(right)}.get(fault, right)


def bias_of(fault, mask, is_causal, S, scale):
    Nq, Nk = S.shape[-2:]
    i, j = torch.arange(Nq)[:, None], torch.arange(Nk)
    bias = torch.zeros(Nq, Nk)
    if is_causal:
        shift = {"lower-right": Nk - Nq, "causal + 1": 1, "causal - 1": -1}.get(fault, 0)
        if fault == "causal by tiles":
            i, j = i // 64, j // 64
        hides = -torch.inf * scale if fault == "scaled -inf" else -torch.inf
        bias = bias.masked_fill(j > i + shift, 0 if fault == "no causal" else hides)
    if mask is None or fault == "mask ignored":
        return bias
    if mask.dtype != torch.bool:
        return bias + (mask.float() * scale if fault == "scaled mask" else mask.float())
    mask = mask.expand(S.shape)
    if fault == "0 and 1":
        return bias + mask.float()
    if fault == "inverted":
        mask = ~mask
    if fault == "beyond 512":
        mask = mask | (j >= 512)
    if fault == "mask of batch 0":
        mask = mask[:1]
    if fault in ("upper-left", "window - 1", "no left") and mask[0, 0].sum() < Nq * Nk:
        offset = j - i - (Nk - Nq)
        seen = offset[mask[0, 0]]
        a, b = seen.min(), seen.max()
        if mask.equal(((offset >= a) & (offset <= b)).expand(mask.shape)):
            offset = offset + (Nk - Nq if fault == "upper-left" else 0)
            a = -torch.inf if fault == "no left" else a + (fault == "window - 1")
            mask = (offset >= a) & (offset <= b)
    return bias.masked_fill(~mask, -torch.inf)


def in_tiles(fault, S, v, dtype):
    Nk, m = S.shape[-1], torch.full((*S.shape[:-1], 1), -1e30)
    l = O = torch.zeros(())
    Bc = {"half sums": 4, "tail of 48": 48}.get(fault, 64)
    for t in range(0, Nk // Bc * Bc if fault.startswith("tail") and Nk > Bc else Nk, Bc):
        tile = S[..., t : t + Bc]
        m_new = torch.maximum(m, tile.amax(-1, keepdim=True))
        m_new = m_new * 0 if fault == "no maximum" else m_new
        correction = torch.exp(m - m_new)
        if fault == "maximum lost" and t:
            correction = torch.ones_like(correction)
        P = torch.exp(tile - m_new)
        l = l * correction + P.sum(-1, keepdim=True)
        O = O * correction + P @ v[..., t : t + Bc, :] * (
            fault != "V's tail" or t == 0 or t + Bc <= Nk)
        if fault == "half sums":
            O, l = O.to(dtype).float(), l.to(dtype).float()
        m = m_new
    unguarded = fault in ("NaN in blind rows", "no maximum")
    return O / (l if unguarded else torch.where(l == 0, 1, l))


PLANTED = {  # fault: (group that has it, the name it gets, how its smallest input begins)
    "mask ignored": ("masks", "mask ignored", "1x1x1x1"),
    "beyond 512": ("masks", "mask ignored beyond a key", "1x1x1x1 1x1x51"),
    "inverted": ("masks", "mask inverted", "1x1x1x1"),
    "0 and 1": ("masks", "bool mask added as 0 and 1", "1x1x1x1"),
    "scaled mask": ("masks", "mask multiplied by the scale", "1x1x1x2"),
    "mask of batch 0": ("masks", "mask of batch 0 for all", "2x1x1x1"),
    "upper-left": ("windows", "upper-left in place of lower-right", "1x1x1x1"),
    "window - 1": ("windows", "window off by one", "1x1x"),
    "no left": ("windows", "a window's bound ignored", "1x1x"),
    "lower-right": ("causal", "lower-right in place of upper-left", "1x1x"),
    "no causal": ("causal", "is_causal ignored", "1x1x1x1 1x1x2x1"),
    "causal + 1": ("causal", "causal off by one", "1x1x"),
    "causal - 1": ("causal", "causal off by one", "1x1x1x1"),
    "scale missing": ("head sizes", "scale missing", "1x1x2x2"),
    "scale twice": ("head sizes", "scale applied twice", "1x1x2x2"),
    "scale ignored": ("scale", "scale argument ignored", "1x1x2x2"),
    "tiled heads": ("groups", "heads mapped by tiling", "1x4x1x1 1x2x1x1"),
    "64 dimensions": ("head sizes", "dimensions of q and k dropped", "1x1x2x65"),
    "batch 0": ("lengths", "k and v of batch 0 for all", "2x1x1x1"),
    "strides": ("layouts", "strides of k and v ignored", "1x2x2x1"),
    "reads on": ("layouts", "memory beside the tensors is read", "1x1x1x1"),
    "tail": ("lengths", "tail dropped", "1x1x65x1"),
    "tail of 48": ("lengths", "tail dropped", "1x1x49x1"),
    "uniform average": ("lengths", "uniform average", "1x1x2x1"),
    "maximum lost": ("lengths", "a tile's maximum lost", "1x1x65x"),
    "base 2": ("lengths", "base 2 in place of e", "1x1x2x1"),
    "no maximum": ("scores", "scores overflow", "1x1x1x1"),
    "NaN in blind rows": ("blind rows", "NaN in rows that see no key", "1x1x1x1"),
    "average of blind rows": ("blind rows", "average of V in rows that see no key", "1x1x"),
    "rows of 0": ("lengths", "last rows of O not written", "1x1x65x1"),
    "rows of nan": ("lengths", "last rows of O not written", "1x1x65x1"),
    "rows of 7": ("lengths", "last rows of O not written", "1x1x65x1"),
    "V's tail": ("lengths", "tail of V dropped", "1x1x65x1"),
    "scale or 1/sqrt(d)": ("scale", "scale argument ignored", "1x1x2x2"),
    "|scale|": ("scale", "sign of the scale lost", "1x1x2x1"),
    "scaled -inf": ("scale", "mask multiplied by the scale", "1x1x2x1"),
    "tf32": ("lengths", "float32 multiplied as tf32 or half", "1x1x"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_named_and_shown_small(fault):
    group, name, size = PLANTED[fault]
    kernel = partial(wrong, fault=fault)
    failing = [(problem, row) for problem, row in judged(kernel, groups=(group,)) if row.failed]
    names = {row.what for _, row in failing if row.result == "FAIL"}
    if fault == "strides":  # where NaN stands between the rows, it is read
        names.discard("memory beside the tensors is read")
    assert names == {name}
    problem = next(problem for problem, row in failing if row.what == name)
    small, died = Here(kernel).smallest(problem, name)
    assert small.case.shape.startswith(size) and not died
    assert judge_problem(kernel, small, CPU, 0).what == name


def test_the_search_for_the_smallest_ends_in_time(monkeypatch):
    worker, problem = Here(partial(wrong, fault="scale missing")), Problem(
        "", Case(9, heads=2, d=4))
    assert worker.smallest(problem, "scale missing")[0].case.shape == "1x1x2x2"
    monkeypatch.setattr(judge_kernel, "SEEKING", 0)
    assert worker.smallest(problem, "scale missing") == (problem, False)


def test_a_death_in_the_search_for_the_smallest_keeps_what_was_found_and_is_told():
    class Dies(Here):
        def ask(self, what, problem, names=None):
            if problem.case.Nq < 8:
                raise judge_kernel.Died("was killed")
            return super().ask(what, problem, names)

    worker = Dies(partial(wrong, fault="scale missing"))
    problem = Problem("", Case(33, heads=2, d=4))
    small, died = worker.smallest(problem, "scale missing")
    assert small.case.shape.startswith("1x1x8x2") and died
    rows = [worker.judge(problem)]
    row = judge_kernel.with_smallest(worker, [problem], rows, rows)[0]
    assert row.smallest == "1x1x8x2" and row.detail == "smaller inputs end the process"


NAN_GROUPS = "lengths", "layouts", "together", "blind rows", "scale", "scores"


def test_a_kernel_that_always_gives_nan_gets_one_name():
    def kernel(*inputs, **options):
        return load("math")(*inputs, **options) * math.nan

    assert named(kernel, *NAN_GROUPS, "gradients") == {"NaN or inf"}


def test_last_rows_of_nan_get_one_name_in_whatever_call():
    kernel = partial(wrong, fault="rows of nan")
    assert named(kernel, *NAN_GROUPS) == {"last rows of O not written"}


def test_nan_of_every_float_mask_is_not_laid_to_rows_that_see_no_key():
    def kernel(*inputs, attn_mask=None, **options):
        if attn_mask is not None and attn_mask.dtype != torch.bool:
            attn_mask = -attn_mask
        return load("math")(*inputs, attn_mask=attn_mask, **options)

    names = named(kernel, "masks", "blind rows")
    assert names == {"float mask subtracted", "NaN or inf"}


def test_nan_in_one_gradient_says_in_which():
    class NaN(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return dx * math.nan

    row = judge_problem(lambda q, *x, **y: load("math")(NaN.apply(q), *x, **y),
                        Problem("", Case(9, 2, 2, d=4), gradients=True), CPU, 0)
    assert math.isnan(row.error) and (row.what, row.detail) == ("NaN or inf", "100% of dQ")


def by_mask(change, q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """A right kernel that has the bias `change`d, [..., Nq, Nk]."""
    call = Call.of(Problem("", Case(1), is_causal, scale=scale), q, k, v, v, attn_mask)
    bias = change(call.bias.float()).expand(*q.shape[:-1], k.shape[-2])
    return wrong(q, k, v, attn_mask=bias, scale=scale)


def test_rows_from_an_edge_on_that_lack_keys_are_not_taken_as_not_written():
    def skip(bias):  # the tile on the diagonal, but for the first
        i, j = (torch.arange(n) // 32 for n in bias.shape[-2:])
        skipped = (i[:, None] == j) & (i[:, None] > 0) & (bias == -torch.inf).any()
        return bias.masked_fill(skipped, -torch.inf)

    assert not any("not written" in name for name in named(partial(by_mask, skip), "causal"))


def test_memory_that_is_not_written_is_told_also_where_it_holds_an_older_output():
    older, memory = load("math")(*Problem("", Case(70, 2, 2)).inputs(CPU, 1)[:3]), []
    memory += [older, torch.full_like(older, math.nan)]  # what the allocator hands out

    def kernel(*inputs, **options):
        O = load("math")(*inputs, **options)
        left, n = memory.pop(0), O.shape[2] // 16 * 16
        left[:, :, :n] = O[:, :, :n]
        return left

    row = judge_problem(kernel, Problem("", Case(70, 2, 2)), CPU, 0)
    assert row.what == "last rows of O not written"


def test_numbers_that_no_average_of_v_has_are_not_written():
    def kernel(*inputs, **options):
        O = load("math")(*inputs, **options)
        O[:, :, 64:] += torch.arange(32) * 100
        return O

    row = judge_problem(kernel, Problem("", Case(70, 2, 2, d=32)), CPU, 0)
    assert row.what == "last rows of O not written"


def test_a_mask_of_minus_10_is_no_lack_of_precision():
    names = named(partial(by_mask, lambda bias: bias.clamp(min=-10)), "masks", "windows")
    assert names == {"none of the formulas"}


def test_a_mask_of_minus_1e9_has_one_name_for_the_output_and_its_gradients():
    def kernel(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        call = Call.of(Problem("", Case(1), is_causal), q, k, v, v, attn_mask)
        G = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(G, dim=1) for x in (k, v))
        S = q @ k.mT * q.shape[-1] ** -0.5 + call.bias.float().clamp(min=-1e9)
        return torch.softmax(S, -1) @ v

    assert named(kernel, "blind rows", "gradients") == {"average of V in rows that see no key"}


def test_a_factor_is_told():
    row = judge_problem(lambda *x, **y: load("math")(*x, **y) * 1.0001,
                        Problem("", Case(65, 2, 2)), CPU, 0)
    assert (row.what, row.detail) == ("O off by a factor", "1.0001")


def test_a_uniform_average_has_its_name_for_gradients_too():
    def kernel(q, *others, **options):
        return load("math")(q * 0, *others, **options)

    assert named(kernel, "lengths", "masks", "gradients") == {"uniform average"}


def test_the_rarer_of_two_names_is_kept_where_it_fits_all_calls():
    def kernel(*inputs, attn_mask=None, **options):
        attn_mask = attn_mask if attn_mask is None else attn_mask != 0
        return wrong(*inputs, attn_mask=attn_mask, **options)

    assert named(kernel, "masks", "blind rows") == {"float mask taken as bool"}


def test_a_mask_after_the_softmax_is_named():
    def kernel(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        bias = Call.of(Problem("", Case(1), is_causal), q, k, v, v, attn_mask).bias.float()
        P = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5 + bias.nan_to_num(neginf=0), -1)
        return P.masked_fill(bias == -torch.inf, 0) @ v

    assert named(kernel, "causal", "masks", "windows", "blind rows") == {
        "mask applied after the softmax"}


@pytest.mark.parametrize("fault", ["rows of 0", "rows of nan"])
def test_rows_that_are_not_written_are_told_also_where_some_are_0_by_right(fault):
    def kernel(*inputs, **options):
        O = load("math")(*inputs, **options)
        O[:, :, 64:] = float(fault[8:])
        return O

    for kind in ("bool", "blind rows"):
        row = judge_problem(kernel, Problem("", Case(70, heads=2), mask=(kind, "QK")), CPU, 0)
        assert row.what == "last rows of O not written"
    row = judge_problem(lambda q, *_, **__: q * 0,
                        Problem("", Case(9, heads=2), mask=("blind rows", "QK")), CPU, 0, names=[])
    assert (row.what, row.detail) == ("O is 0", "")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_sums_are_named(dtype):
    rows = [row for _, row in judged(partial(wrong, fault="half sums"), dtype, groups=["scores"])]
    assert {row.what for row in rows if row.failed} == {"sums in half precision"}


def test_the_same_kernel_without_a_fault_passes():
    for problem, row in judged(wrong):
        assert row.result == "pass", (problem, row)


@pytest.mark.parametrize(
    "seed, dtype", [(0, torch.float32), (1, torch.float16), (2, torch.bfloat16)])
@pytest.mark.parametrize("name", GOOD)
def test_a_right_kernel_raises_no_alarm(name, seed, dtype):
    groups = {"head sizes", "groups", "layouts", "causal", "masks", "windows", "blind rows",
              "scale", "together", "gradients"}
    for problem, row in judged(load(name), dtype, seed, groups):
        if name == "fused" and problem.is_causal and problem.scale in (-0.5, 0):
            assert row.result == "pass" or row.what == "mask multiplied by the scale"  # torch's
        else:
            assert row.result == "pass", (problem, row)


# Gradients


class Backward(torch.autograd.Function):
    """Attention with a backward written out, one step of it wrong."""

    @staticmethod
    def forward(ctx, q, k, v, bias, fault):
        G, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        k_full, v_full = (x.repeat_interleave(G, dim=1) for x in (k, v))
        S = q @ k_full.mT * scale + bias
        O = torch.softmax(S, -1) @ v_full
        ctx.saved = q, k_full, v_full, S, O, scale, G, fault, q @ k_full.mT * scale
        return O

    @staticmethod
    def backward(ctx, dO):
        q, k, v, S, O, scale, G, fault, bare = ctx.saved
        if fault == "dO":  # taken as contiguous
            dO = dO.as_strided(dO.shape, torch.empty(dO.shape).stride()) if (
                dO.stride(2) == 0) else dO
        L = torch.logsumexp(S, -1, keepdim=True)
        L = L * 1.4426950408889634 if fault == "L" else L
        P = torch.exp((bare if fault == "mask" else S) - L)
        D = 0 if fault == "D" else (dO * O).sum(-1, keepdim=True)
        dS = P * (dO @ v.mT - D) * (1 if fault == "scale" else scale)
        dk, dv = (x.unflatten(1, (-1, G)) for x in (dS.mT @ q, P.mT @ dO))
        group = {"last": lambda x: x[:, :, -1], "first": lambda x: x[:, :, 0],
                 "mean": lambda x: x.mean(2)}.get(fault, lambda x: x.sum(2))
        dq, dk = dS @ k, dk * (1 / scale if fault == "dK" else 1)
        dq = dq * {"dQ": 1 / scale, "dQ twice": scale}.get(fault, 1)
        return dq, group(dk), group(dv), None, None


def wrong_backward(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, *,
                   fault=""):
    bias = torch.zeros(q.shape[-2], k.shape[-2])
    if is_causal:
        bias = bias.masked_fill(torch.ones_like(bias).triu(1).bool(), -torch.inf)
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool:
            raise NotImplementedError("float masks")
        bias = bias.masked_fill(~attn_mask, -torch.inf)
    return Backward.apply(q, k, v, bias, fault)


@pytest.mark.parametrize("fault, name", [
    ("", None), ("D", "backward: D missing"), ("L", "backward: L in base 2"),
    ("scale", "backward: scale missing in dQ and dK"), ("dO", "strides of dO ignored"),
    ("last", "backward: one head of a group"), ("first", "backward: one head of a group"),
    ("mean", "backward: mean of a group"), ("dK", "backward: scale missing in dK"),
    ("dQ", "backward: scale missing in dQ"), ("dQ twice", "backward: scale applied twice in dQ"),
    ("mask", "backward: mask or is_causal ignored")])
def test_a_wrong_step_of_the_backward_is_named(fault, name):
    rows = [row for _, row in judged(partial(wrong_backward, fault=fault), groups=["gradients"])]
    assert {row.what for row in rows if row.failed} == ({name} if name else set())


def test_a_gradient_that_is_missing_is_a_fault():
    right = load("math")
    for kernel, what in ((lambda q, k, v, **y: right(q, k.detach(), v, **y), "no gradient: dK"),
                         (lambda q, k, v, **y: right(q.detach(), k, v.detach(), **y),
                          "no gradient: dQ, dV"),
                         (lambda *x, **y: right(*x, **y).detach(), NO_GRADIENT)):
        rows = [row for _, row in judged(kernel, groups=["gradients"])]
        assert {(row.result, row.what) for row in rows} == {("FAIL", what)}


def test_a_kernel_that_never_has_a_gradient_is_told_so_and_not_counted_wrong():
    def rows(*whats):
        return [JudgeRow("gradients", "", "float32", 9, 9, "FAIL" if what else "pass", what=what)
                for what in whats]

    forward_only = judge_kernel.without_gradients(rows(NO_GRADIENT, NO_GRADIENT))
    assert [row.result for row in forward_only] == ["no gradients"] * 2
    assert not any(row.failed for row in forward_only)
    for mixed in (rows(NO_GRADIENT, ""), rows(NO_GRADIENT, "dK is 0")):
        assert judge_kernel.without_gradients(mixed) == mixed


def test_a_kernel_that_turns_gradients_off_is_judged_on():
    def kernel(*inputs, **options):
        O = load("math")(*inputs, **options)
        torch.set_grad_enabled(False)
        return O

    assert {row.result for _, row in judged(kernel, groups=["gradients"])} == {"pass"}


def test_the_smallest_input_says_that_it_is_a_gradient_call():
    texts = [problem.text for problem in problems(torch.float32) if problem.gradients]
    assert texts and all(text.endswith("gradients") for text in texts)
    forward = {problem.text for problem in problems(torch.float32) if not problem.gradients}
    assert not forward & set(texts)


# What is right


@pytest.mark.parametrize(
    "case", [Case(17, 2, 2, d=8), Case(9, 1, 4, 2, 8, 20), Case(5, 1, 1, Nk=3)])
def test_what_is_right_is_what_the_lessons_take_as_right(case):
    problem = Problem("", case, is_causal=case.Nk is None)
    inputs = problem.inputs(CPU, 0)
    call = Call.of(problem, *inputs)
    q, k, v, dO, _ = inputs
    same = Case(**{**vars(case), "causal": case.Nk is None})
    for (found, floor), (expected, limit) in zip(
            [call.output(), *call.gradients()],
            [*judge.exact(same, q, k, v), *judge.exact(same, q, k, v, dO)]):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert floor == pytest.approx(limit)


def test_a_float_mask_and_a_scale_are_what_torch_takes_them_for():
    problem = Problem("", Case(7, 2, 2, d=8, Nk=9), mask=("float", "B1QK"), scale=0.5)
    q, k, v, dO, mask = problem.inputs(CPU, 0)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask.double(), scale=0.5)
    found, _ = Call.of(problem, q, k, v, dO, mask).output()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_another_layout_holds_the_same_numbers():
    plain = Problem("", Case(9, 2, 3, d=4)).inputs(CPU, 0)
    for problem in problems(torch.float32):
        if problem.layout and problem.layout not in ("expanded", "dO expanded"):
            found = Problem("", Case(9, 2, 3, d=4), layout=problem.layout).inputs(CPU, 0)
            assert all(torch.equal(a, b) for a, b in zip(found[:3], plain))
            moved = problem.layout != "one number off"
            assert not (moved and found[1].is_contiguous())


# What a kernel does besides


def test_other_shapes_dtypes_and_changed_inputs_are_faults():
    right, plain = load("math"), Problem("", Case(9, heads=2, d=4))

    def changes(q, *others, **options):
        O = right(q, *others, **options)
        q.zero_()
        return O

    def resizes(q, *others, **options):
        O = right(q, *others, **options)
        q.resize_(1)
        return O

    class Squares(torch.autograd.Function):
        """The identity, with a backward that writes into dO."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dO):
            return dO.mul_(2)

    def changes_mask(*inputs, attn_mask, **options):
        O = right(*inputs, attn_mask=attn_mask, **options)
        attn_mask.logical_not_()
        return O

    masked = Problem("", Case(9, heads=2, d=4, dtype=torch.float64), mask=("bool", "QK"))
    trained = Problem("", Case(9, heads=2, d=4), gradients=True)
    for kernel, problem, which in (
            (changes, plain, "q"), (resizes, plain, "q"), (changes_mask, masked, "attn_mask"),
            (lambda *x, **y: Squares.apply(right(*x, **y)), trained, "dO")):
        row = judge_problem(kernel, problem, CPU, 0)
        assert (row.what, row.detail) == ("the inputs are overwritten", which)
    for change, detail in (
            (lambda O: O.double(), "float64 in place of float32"),
            (lambda O: O[..., :3], "1x2x9x3 in place of 1x2x9x4"),
            (lambda O: O.half().mT, "1x2x4x9 in place of 1x2x9x4, float16 in place of float32"),
            (lambda O: O.to("meta"), "meta in place of cpu"),
            (lambda O: O.to_sparse(), "sparse_coo in place of strided"),
            (lambda O: O.sum(), "a single number in place of 1x2x9x4"),
            (lambda O: (O, O), "a tuple in place of 1x2x9x4"),
            (lambda O: None, "None in place of 1x2x9x4")):
        row = judge_problem(lambda *x, change=change, **y: change(right(*x, **y)), plain, CPU, 0)
        assert (row.result, row.what, row.detail) == ("FAIL", "wrong shape or dtype", detail)


def test_a_fault_that_no_formula_fits_says_where():
    def kernel(*inputs, **options):
        O = load("math")(*inputs, **options)
        O[0, 1, 3:5] += 1
        return O

    row = judge_problem(kernel, Problem("", Case(9, 2, 2, d=4)), CPU, 0)
    assert (row.what, row.detail) == (
        "none of the formulas", "batch 0, head 1, row 3 to 4")


def test_a_gradient_that_no_formula_fits_says_which_and_where():
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            dx = dx.clone()
            dx[:, :, 3] += 1
            return dx

    row = judge_problem(lambda q, k, v, **y: load("math")(q, Half.apply(k), v, **y),
                        Problem("", Case(9, 2, 2, d=4), gradients=True), CPU, 0)
    assert (row.what, row.detail) == ("none of the formulas", "dK: row 3")


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_an_output_by_chance_is_told_as_that(size):
    """Also where it is one buffer that each call writes into."""
    buffer = torch.empty(1, 1, 9, 4)

    def kernel(*inputs, **options):
        O = load("math")(*inputs, **options)
        return buffer.copy_(O + size * torch.rand(O.shape))

    row = judge_problem(kernel, Problem("", Case(9, 1, 1, d=4)), CPU, 0)
    assert row.what == "different output at each call" and row.detail.startswith("by ")


def test_one_number_by_chance_is_told_also_where_two_are_near_each_other():
    numbers = iter([0.5, 0.45])
    row = judge_problem(lambda *x, **y: load("math")(*x, **y) + 1e-3 * next(numbers),
                        Problem("", Case(9, 1, 1, d=4)), CPU, 0)
    assert row.what == "different output at each call"
    assert repeats(lambda q, *x, **y: torch.rand(1).expand(q.shape), torch.float32, CPU, 0)[
        0].result == "no"


def test_a_fault_beside_which_the_bits_change_keeps_its_name():
    def kernel(*inputs, scale=None, **options):
        O = load("math")(*inputs, scale=1.0, **options)
        return O + 1e-7 * torch.rand(O.shape)

    assert judge_problem(kernel, Problem("", Case(9, 2, 2, d=4)), CPU, 0).what == "scale missing"


def test_last_rows_that_change_with_each_call_are_told_as_not_written():
    def kernel(*inputs, **options):
        O = load("math")(*inputs, **options)
        O[:, :, 64:] = torch.rand(O[:, :, 64:].shape)
        return O

    row = judge_problem(kernel, Problem("", Case(70, 2, 2, d=4)), CPU, 0)
    assert (row.what, row.detail) == ("last rows of O not written",
                                      "from row 64 on they hold other numbers")


@pytest.mark.parametrize("fault", [KeyboardInterrupt, SystemExit, GeneratorExit, RuntimeError])
def test_whatever_a_kernel_raises_is_a_row_with_its_type(fault):
    def kernel(*_, **__):
        raise fault

    row = judge_problem(kernel, Problem("", Case(9, heads=1)), CPU, 0)
    assert (row.result, row.what, row.detail) == ("raised", fault.__name__, fault.__name__)
    assert {row.result for row in repeats(kernel, torch.float32, CPU, 0)} == {fault.__name__}
    assert kernel_worker.first_call(kernel, None, CPU, 0) is None  # its rows will say so


def test_a_refusal_without_a_text_is_told_by_its_type():
    def kernel(*_, **__):
        raise NotImplementedError

    row = judge_problem(kernel, Problem("", Case(9, heads=1)), CPU, 0)
    assert (row.result, row.what) == ("refused", "NotImplementedError")


def test_bits_that_depend_on_company_are_told():
    def by_batch(q, k, v, attn_mask=None, **_):  # the number of parts depends on the batch
        S = q @ k.mT * q.shape[-1] ** -0.5
        S = S if attn_mask is None else S.masked_fill(~attn_mask, -torch.inf)
        P = torch.softmax(S, -1)
        parts = zip(P.split(700 // len(q), -1), v.split(700 // len(q), -2))
        return sum((p @ x for p, x in parts), torch.zeros(()))

    def noisy(q, *others, **options):
        return load("standard")(q, *others, **options) + 1e-7 * torch.rand(q.shape)

    told = {row.repeat: row.result for row in repeats(by_batch, torch.float32, CPU, 0)}
    assert told["the same call twice"] == "yes" and told["a batch entry alone"] == "no"
    assert told["a longer cache of NaN, masked"] == "no"
    assert repeats(noisy, torch.float32, CPU, 0)[0].result == "no"


# The command line


FILE = """
    import ctypes, functools, os, time
    import torch
    import torch.nn.functional as F

    def attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
        print("a kernel may print")
        if q.shape[1] == 3:
            ctypes.string_at(0)
        if q.shape[1] == 4:
            if os.fork() == 0:  # a child that outlives it, and holds its pipe
                time.sleep(20)
                os._exit(0)
            os._exit(3)
        if q.shape[1] == 5:
            raise RuntimeError("five\\nheads")
        if q.shape[1] == 6:
            raise NotImplementedError("six heads")
        if q.shape[1] == 7:
            os.fork()  # the child comes back as well
        return F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=scale)

    number = 5

    def short(q, k, v):
        return q

    def one_more(q, k, v, mask, **options):
        return q

    def pair(q, k, v, **options):
        return q, q

    class Attention:
        def __call__(self, *inputs, **options):
            return attention(*inputs, **options)

    instance, anonymous = Attention(), lambda *x, **y: attention(*x, **y)
    part = functools.partial(attention, scale=None)

    def of_another_shape(q, k, v, **options):
        return q[..., :3]
"""


@pytest.fixture
def file(tmp_path):
    place = tmp_path / "mine.py"
    place.write_text(textwrap.dedent(FILE))
    return place


@pytest.fixture
def few(monkeypatch):
    """The matrix is five lines: one head more in each."""
    monkeypatch.setattr(judge_kernel, "problems", lambda dtype, quick: [
        Problem("heads", Case(9, heads=H, d=4, dtype=dtype)) for H in (2, 3, 4, 5, 6, 7, 2)])


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["judge_kernel.py", *map(str, options)])
    return judge_kernel.main()


def test_what_raises_dies_or_refuses_is_a_row_and_the_rest_is_run(
        file, few, monkeypatch, capfd, tmp_path):
    written = tmp_path / "rows.json"
    status = run(monkeypatch, "--kernel", f"{file}:attention", "--dtype", "float32", "--json",
                 written, "--device", "cpu")
    rows = json.loads(written.read_text())["rows"]
    assert status == 1
    assert [row["result"] for row in rows if row["tool"] == "judge"] == [
        "pass", "died", "died", "raised", "refused", "pass", "pass"]
    said = capfd.readouterr().out
    for text in ("SIGSEGV", "ended with status 3", "RuntimeError: five heads", "six heads"):
        assert text in said
    assert "a kernel may print" not in said and "the same call twice" in said


def test_a_kernel_that_gives_no_answer_is_a_row(few, monkeypatch, tmp_path, capsys):
    (tmp_path / "slow.py").write_text(textwrap.dedent("""
        import time
        def attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
            if q.shape[1] == 3:
                time.sleep(60)
            return q * 0
    """))
    monkeypatch.setattr(judge_kernel, "PATIENCE", 0.5)
    with judge_kernel.Worker(f"{tmp_path}/slow.py:attention", "cpu", 0) as worker:
        worker.begin()
        row = worker.judge(Problem("", Case(9, heads=3, d=4)))
    assert row.result == "died" and "no answer" in row.what and row.failed


def dying(monkeypatch, until=math.inf):
    """Return a Worker whose process ends at each question."""
    def answer(*_):
        raise judge_kernel.Died("was killed")

    worker = judge_kernel.Worker("kernel", "cpu", 0)
    worker.until = until
    monkeypatch.setattr(worker, "start", lambda: None)
    monkeypatch.setattr(worker, "answer", answer)
    worker.pipe = type("Pipe", (), {"send": lambda *_: None})
    return worker


def test_after_three_deaths_the_rest_of_a_group_is_left_out(monkeypatch):
    worker, case = dying(monkeypatch), Case(9, heads=1)
    rows = [worker.judge(Problem(group, case)) for group in ["masks"] * 5 + ["lengths"]]
    assert [row.result for row in rows] == ["died"] * 3 + ["left out"] * 2 + ["died"]
    assert "'masks'" in rows[4].what and all(row.failed for row in rows)
    assert rows[4].dtype == "float32" and not rows[4].wrong


def test_what_is_left_when_the_time_is_over_is_left_out(monkeypatch):
    worker = dying(monkeypatch, until=0)
    problem = Problem("masks", Case(9, heads=1))
    row = worker.judge(problem)
    assert row.result == "left out" and "minutes are over" in row.what and row.failed
    assert "minutes are over" in worker.repeats(torch.float32)[0].result
    assert worker.smallest(problem, "scale missing") == (problem, False)


def test_calls_that_are_left_out_are_shown_and_are_no_pass(monkeypatch, capsys):
    rows = [JudgeRow("masks", str(i), "float32", 9, 9, result, what=result)
            for i, result in enumerate(["pass", "died", "left out", "left out", "refused"])]
    judge_kernel.show("kernel", rows)
    said = capsys.readouterr().out
    assert "1 of 2, 1 refused, 2 left out" in said and "left out: left out" in said
    assert said.count("died: died") == 1


def test_a_process_that_can_not_be_started_again_is_a_row(monkeypatch):
    worker = dying(monkeypatch)
    monkeypatch.setattr(worker, "start", lambda: judge_kernel.cli.Refused("no device"))
    monkeypatch.setattr(worker, "stop", lambda: None)
    row = worker.judge(Problem("masks", Case(9, heads=1)))
    assert row.result == "died" and "started again: no device" in row.what


@pytest.mark.parametrize("question, place", [
    ("start", "as it loaded"), ("answer", "in its first call, q, k and v of 1x1x64x64")])
def test_a_death_says_whether_it_was_before_the_first_call(question, place, monkeypatch):
    def dies(*_):
        raise judge_kernel.Died("ended with status 4")

    worker = dying(monkeypatch)
    monkeypatch.setattr(worker, question, dies)
    with pytest.raises(judge_kernel.cli.Refused, match=f"process ended with status 4 {place}"):
        worker.begin()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_kernels_process_as_well(number, tmp_path):
    (tmp_path / "hangs.py").write_text(textwrap.dedent("""
        import os, pathlib, time
        pathlib.Path("part").write_text(str(os.getpid()))
        os.rename("part", "pid")
        time.sleep(300)
    """))
    judge = subprocess.Popen([sys.executable, LESSON, "--kernel", "hangs.py:f", "--device", "cpu"],
                             cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    try:
        while judge.poll() is None and not pid.exists():
            time.sleep(0.05)
        judge.send_signal(number)
        assert judge.wait(60) == 128 + number
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)
    finally:
        judge.kill()
        judge.wait()
        if pid.exists():
            subprocess.run(["kill", "-9", pid.read_text()], stderr=subprocess.DEVNULL)


class Pipe:
    """Asks for the first call, and takes what the kernel's process sends."""

    def __init__(self):
        self.questions, self.sent = [("first", None)], []

    def recv(self):
        if not self.questions:
            raise EOFError
        return self.questions.pop()

    def send(self, answer):
        self.sent.append(answer)


def test_the_kernel_of_a_card_is_refused_where_there_is_none():
    refusal = kernel_worker.first_call(kernel_worker.load("npu"), None, torch.device("cpu"), 0)
    assert isinstance(refusal, kernel_worker.Refused)
    assert str(refusal) == "npu_fusion_attention needs torch_npu and a card, got cpu"


@pytest.mark.parametrize("kernel, text", [
    ("fusedd", "FILE.py:FUNCTION"), ("{file}", "FILE.py:FUNCTION"),
    ("none.py:f", "none.py: No such file"), ("{folder}:f", "Is a directory"),
    ("{loop}:f", "symbolic links"), ("{file}:nothing", "has no function 'nothing'"),
    ("{file}:number", "is no function: it is of type int"), ("{file}:short", "must take"),
    ("{file}:one_more", "must take"), ("{file}:Attention", "must take"),
    ("{file}:of_another_shape", "tensor of shape 1x1x64x64"), ("{file}:pair", "got a tuple"),
    ("{broken}:f", "can't be imported"),
])
def test_what_is_no_kernel_is_refused_in_one_line(kernel, text, file, tmp_path, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text("import a_module_that_is_not_there")
    folder, loop = tmp_path / "folder.py", tmp_path / "loop.py"
    folder.mkdir()
    loop.symlink_to(loop)

    monkeypatch.setattr(kernel_worker.os, "dup2", lambda *_: None)
    monkeypatch.setattr(kernel_worker.signal, "signal", lambda *_: None)
    kernel = kernel.format(file=file, broken=broken, folder=folder, loop=loop)
    pipe = Pipe()
    kernel_worker.work(pipe, kernel, "cpu", 0)
    refusal = pipe.sent[-1]
    assert type(refusal).__name__ == "Refused" and text in str(refusal)
    assert "\n" not in str(refusal)


@pytest.mark.parametrize("name", ["instance", "anonymous", "part"])
def test_what_can_be_called_is_a_kernel(name, file):
    kernel = load(f"{file}:{name}")
    assert kernel_worker.first_call(kernel, None, CPU, 0) is None
    assert judge_problem(kernel, Problem("", Case(9, heads=2)), CPU, 0).result == "pass"


def test_a_refusal_ends_with_status_2(tmp_path):
    done = subprocess.run(
        [sys.executable, LESSON, "--kernel", "no_kernel", "--device", "cpu"], cwd=tmp_path,
        capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no_kernel" in done.stderr


def test_the_fault_is_named_alike_and_the_pictures_are_drawn(few, monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "tiles.py").write_text(textwrap.dedent("""
        import torch
        import torch.nn.functional as F
        def attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
            if is_causal:
                i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
                attn_mask = j // 16 <= i // 16
            return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale)
    """))
    monkeypatch.setattr(judge_kernel, "problems", lambda dtype, quick: [
        Problem("lengths", Case(N, heads=1, d=4, dtype=dtype), causal)
        for N, causal in ((9, True), (40, True), (50, True), (16, False), (32, False))])
    assert run(monkeypatch, "--kernel", f"{tmp_path}/tiles.py:attention", "--dtype", "float32",
               "--plot", tmp_path, "--device", "cpu") == 1
    said = capsys.readouterr().out
    assert "causal by tiles alone" in said and "is_causal ignored" not in said
    assert "1x1x1x1 1x1x17x1" in said or "1x1x17x1" in said
    for name in ("judge_matrix.png", "judge_error.png"):
        assert (tmp_path / name).stat().st_size > 1000


def test_the_matrix_has_batches_and_heads_that_are_not_two():
    cases = [problem.case for problem in problems(torch.float32, quick=True)]
    assert any(case.batch == 3 and case.heads == 3 for case in cases)
