"""When verify passes: no right result fails, by luck of standard attention or not, and no wrong
one passes.
"""

import random
from dataclasses import replace
from functools import partial

import flash_attention
import flash_backward
import flash_decoding
import flash_variants
import pytest
import torch
from flash_attention import flash_attention_forward, online_softmax_step, standard_attention
from lab.bench import Candidate, verify
from lab.cases import Case
from lab.judge import judge
from lab.visible import DTYPES, Visible

PLANTED = [Case(256), Case(113, Nk=203, batch=2), Case(130, heads=8, kv_heads=2)]


def small(count, **fixed):
    """Yield as many small cases, a tile and a seed of each, drawn from all that verify takes."""
    choose = random.Random(count).choice
    for seed in range(count):
        heads, kv_heads = choose([(None, None), (4, 4), (4, 2), (4, 1)])
        window = choose([None, (128, 0), (0, 0), (2, 1), (20, 3)])
        case = Case(choose(range(1, 9)), choose((1, 2)), heads, kv_heads, choose((4, 31, 64)),
                    choose((None, 1, 11)), choose((None, 8)), choose(DTYPES),
                    choose((False, True)), window)
        tile = choose([(64, 64), (2, 3), ("auto", "auto")])
        yield replace(case, **fixed), tile, seed


def verified(tool, cases, *splits):
    return [row for case, tile, seed in cases for row in tool([case], *splits, *tile, seed=seed)]


def forward():
    return verified(flash_attention.compare_and_verify, small(100))


def backward():
    return verified(flash_backward.compare_and_verify, small(100))


def decoding():
    cases = small(12, heads=4, kv_heads=2, Nk=8)
    return verified(flash_decoding.compare_and_verify, cases, [1, 2, 3])


def variants():
    if flash_variants.flex_attention is None:
        pytest.skip("flex_attention needs torch 2.5")
    cases = small(3, heads=4, kv_heads=2, d=64, Nk=None, causal=False, window=None)
    return [flash_variants.check_variant(name, case, *tile, seed=seed)
            for name, (case, tile, seed) in zip(("ALiBi", "sink keys", "learned sink"), cases)]


@pytest.mark.parametrize("lesson", [forward, backward, decoding, variants])
def test_no_right_result_fails(lesson):
    assert [row for row in lesson() if not row.passed] == []


def test_without_the_floor_right_gradients_fail_where_standard_attention_is_right_by_luck():
    assert any(row.error_flash > 3 * row.error_standard for row in backward())


@pytest.mark.parametrize("tool, case, masks", [
    (flash_backward, Case(512, heads=8, kv_heads=2), {"causal": True}),
    (flash_backward, Case(256), {"window": (128, 0)}),
    (flash_backward, Case(1), {}),
    (flash_attention, Case(512, dtype=torch.float64), {}),
    (flash_decoding, Case(1, heads=8, Nk=4096, dtype=torch.bfloat16), {})])
def test_what_a_plain_command_verifies_passes(tool, case, masks):
    splits = [[4, 16, 64]] if tool is flash_decoding else []
    rows = tool.compare_and_verify([replace(case, **masks)], *splits)
    assert all(row.passed for row in rows), rows


def test_a_row_of_one_key_passes_whose_gradient_standard_attention_has_as_exactly_zero():
    dQ, dK, dV = flash_backward.compare_and_verify([Case(256, window=(0, 0))])
    assert dQ.error_standard == dK.error_standard == 0 < min(dQ.error_flash, dK.error_flash)
    assert dQ.passed and dK.passed and dV.passed


def found(attend, **masks):
    """Whether verify finds the fault of `attend` in some case."""
    rows = []
    for case in PLANTED:
        case = replace(case, **masks)
        calls = [Candidate(name, partial(call, **case.masks))
                 for name, call in (("standard", standard_attention), ("flash", attend))]
        rows += verify(case, calls, device=torch.device("cpu"))
    return not all(row.passed for row in rows)


def last(Q, K):
    return K.shape[-2] - Q.shape[-2]


def without(lost):
    """Attention that does not see the keys j of which lost(j, Nk) says so."""
    def attend(Q, K, V, **masks):
        Nk = K.shape[-2]
        mask = ~lost(torch.arange(Nk), Nk).expand(Nk)
        return flash_attention_forward(Q, K, V, attn_mask=mask, **masks)
    return attend


def changed(**options):
    """Attention with options that are functions of Q and K."""
    def attend(Q, K, V, **masks):
        given = {name: option(Q, K) for name, option in options.items()}
        return flash_attention_forward(Q, K, V, **masks, **given)
    return attend


WRONG = {
    "the tail of the last tile dropped": without(lambda j, Nk: j >= Nk // 64 * 64),
    "the tail of each tile dropped": without(lambda j, Nk: j % 64 == 63),
    "one key lost": without(lambda j, Nk: j == 100),
    "the last key lost": without(lambda j, Nk: j == Nk - 1),
    "scale off by 1e-3": changed(scale=lambda Q, K: 1.001 * Q.shape[-1] ** -0.5),
    "causal too far by one": changed(q_start=lambda Q, K: last(Q, K) + 1),
    "causal too short by one": changed(q_start=lambda Q, K: last(Q, K) - 1),
    "causal from the upper left": changed(q_start=lambda Q, K: 0),
    "V of another head": lambda Q, K, V, **masks: flash_attention_forward(
        Q, K, V.roll(1, -3), **masks),
    "a column of d ignored": lambda Q, K, V, **masks: flash_attention_forward(
        Q, torch.cat([K[..., :-1], 0 * K[..., -1:]], -1), V, **masks),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_candidate_fails(name):
    assert not found(flash_attention_forward, causal=True)
    assert found(WRONG[name], causal=True)


def uncorrected(of_l=1.0, of_O=1.0):
    """A step that leaves the correction of l or of O out, where these are 0."""
    def step(m, l, O_block, S_block, V_block):
        new = torch.maximum(m, S_block.amax(-1, keepdim=True)) - m
        l, O_block = l * (new * (1 - of_l)).exp(), O_block * (new * (1 - of_O)).exp()
        return online_softmax_step(m, l.nan_to_num(), O_block.nan_to_num(), S_block, V_block)
    return step


def rounded(m, l, O_block, S_block, V_block):
    m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block)
    return m, l, O_block.bfloat16().to(O_block.dtype)


@pytest.mark.parametrize("step", [uncorrected(of_l=0), uncorrected(of_O=0), rounded],
                         ids=["l not corrected", "O not corrected", "O kept in bfloat16"])
def test_a_wrong_step_fails(step, monkeypatch):
    stepped = partial(flash_attention.attend_in_tiles, step=step)
    monkeypatch.setattr(flash_attention, "attend_in_tiles", stepped)
    assert found(flash_attention_forward)


def test_an_exp_that_is_off_by_a_thousandth_fails(monkeypatch):
    right = flash_attention.exp_
    monkeypatch.setattr(flash_attention, "exp_", lambda x: right(x).add_(1e-3))
    assert found(flash_attention_forward)


SHARED = {
    "scale": lambda visible: visible.scale * 1.001,
    "q_start": lambda visible: visible.q_start + 1,
    "right": lambda visible: visible.right + 1,
    "left": lambda visible: visible.left - 1,
}


@pytest.mark.parametrize("name", SHARED)
def test_a_fault_that_standard_attention_shares_fails(name, monkeypatch):
    right = Visible.__init__

    def wrong(self, *args, **options):
        right(self, *args, **options)
        setattr(self, name, SHARED[name](self))

    monkeypatch.setattr(Visible, "__init__", wrong)
    assert found(flash_attention_forward, causal=True, window=(20, None))


backward_of, blocks_of = flash_backward.flash_attention_backward, flash_backward.row_blocks


def blocks(change):
    """Row blocks whose l_block and D_block are changed."""
    def wrong(*args):
        *others, l_block, D_block = blocks_of(*args)
        return (*others, *change(l_block, D_block))
    return wrong


def given(**options):
    """A backward with options that are functions of Q and K."""
    def wrong(dO, Q, K, *args, **right):
        return backward_of(
            dO, Q, K, *args, **{**right, **{name: x(Q, K) for name, x in options.items()}})
    return wrong


def results(change):
    return lambda *args, **options: change(*backward_of(*args, **options))


BACKWARD = {
    "D left out": ("row_blocks", blocks(lambda l, D: (l, 0 * D))),
    "D off by 1e-3": ("row_blocks", blocks(lambda l, D: (l, 1.001 * D))),
    "l off by 1e-3": ("row_blocks", blocks(lambda l, D: (1.001 * l, D))),
    "dK without scale": ("flash_attention_backward", results(lambda q, k, v: (q, k * 8, v))),
    "dQ off by 1e-3": ("flash_attention_backward", results(lambda q, k, v: (q * 1.001, k, v))),
    "dV of another head": ("flash_attention_backward", results(
        lambda q, k, v: (q, k, v.roll(1, -3)))),
    "scale off by 1e-3": ("flash_attention_backward", given(
        scale=lambda Q, K: 1.001 * Q.shape[-1] ** -0.5)),
    "causal too far by one": ("flash_attention_backward", given(
        q_start=lambda Q, K: last(Q, K) + 1)),
    "causal from the upper left": ("flash_attention_backward", given(q_start=lambda Q, K: 0)),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_a_wrong_backward_fails(name, monkeypatch):
    monkeypatch.setattr(flash_backward, *BACKWARD[name])
    rows = flash_backward.compare_and_verify([replace(c, causal=True) for c in PLANTED])
    assert not all(row.passed for row in rows)


merge_of = flash_decoding.merge


MERGE = {
    "a part lost": lambda O, m, l: merge_of(O[1:], m[1:], l[1:]),
    "m ignored": lambda O, m, l: merge_of(O, 0 * m, l),
    "l ignored": lambda O, m, l: merge_of(O, m, torch.ones_like(l)),
    "L in base 2": lambda O, m, l: merge_of(O, m + l.log2(), torch.ones_like(l)),
}


@pytest.mark.parametrize("name", MERGE)
def test_a_wrong_merge_fails(name, monkeypatch):
    monkeypatch.setattr(flash_decoding, "merge", MERGE[name])
    case = Case(1, heads=8, Nk=4096)
    rows = flash_decoding.compare_and_verify([case], [4, 64])
    assert [row.passed for row in rows if "split" in row.name] == [False, False]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_fails(dtype):
    x, nan = torch.ones(2, dtype=dtype), torch.tensor([1, torch.nan], dtype=dtype)
    assert judge(x, x, x.double(), 1e-6)[3]
    assert not judge(nan, x, x.double(), 1e-6)[3] and not judge(x, nan, x.double(), 1e-6)[3]
