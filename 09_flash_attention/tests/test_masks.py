"""What a query may see: faults that other projects had, each as a test named after it."""

import math

import pytest
import torch
from flash_attention import flash_attention_forward, standard_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle
from test_forward import check, inputs, problems
from lab.visible import Visible

BOTH = pytest.mark.parametrize("attend", [standard_attention, flash_attention_forward])


@BOTH
def test_a_fully_masked_row_gives_zeros_and_not_nan(attend):
    Q, K, V = inputs(8, lead=(1, 1))
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[4] = False
    O, L = attend(Q, K, V, attn_mask=mask, return_lse=True)
    assert not O[0, 0, 4].any() and L[0, 0, 4] == -math.inf
    check(attend, Q, K, V, attn_mask=mask)


@pytest.mark.parametrize("options", [
    {"window": (1, 0)}, {"window": (0, 0)}, {"causal": True, "window": (2, None)},
    {"attn_mask": torch.ones(16, 16, dtype=torch.bool).triu(9)}])
def test_a_first_tile_that_is_wholly_masked_adds_nothing(options):
    check(flash_attention_forward, *inputs(16), 4, 4, **options)


@BOTH
def test_one_causal_query_sees_every_key_and_not_only_the_first(attend):
    Q, K, V = inputs(1, 5)
    torch.testing.assert_close(attend(Q, K, V, causal=True), attend(Q, K, V), rtol=0, atol=1e-15)


@BOTH
def test_causal_is_aligned_at_the_lower_right(attend):
    for Nq, Nk in ((2, 5), (5, 2), (3, 128)):
        Q, K, V = inputs(Nq, Nk)
        check(attend, Q, K, V, causal=True)
        dead = max(0, Nq - Nk)
        assert not attend(Q, K, V, causal=True)[:, :dead].any()
    Q, K, V = inputs(2, 5)
    upper_left = attend(Q, K, V, causal=True, q_start=0)
    torch.testing.assert_close(upper_left[:, 0], V[:, 0], rtol=0, atol=1e-15)


@BOTH
def test_the_mask_is_that_of_a_loop_over_rows(attend):
    Q, K, V = inputs(3, 128)
    O = attend(Q, K, V, causal=True)
    for i in range(3):
        alone = torch.softmax(Q[:, i : i + 1] @ K[:, : 126 + i].mT / math.sqrt(8), -1)
        torch.testing.assert_close(O[:, i : i + 1], alone @ V[:, : 126 + i], rtol=0, atol=1e-14)


@BOTH
def test_heads_are_grouped_and_not_tiled(attend):
    Q, K, _ = inputs(lead=(1, 4))
    V = torch.arange(2.0, dtype=torch.float64).view(1, 2, 1, 1).expand(1, 2, 7, 3)
    O = attend(Q, K[:, :2], V)
    assert [round(x, 12) for x in O[0, :, 0, 0].tolist()] == [0, 0, 1, 1]


@BOTH
def test_the_scale_is_not_applied_to_the_additive_mask(attend):
    Q, K, V = inputs()
    mask = torch.full((7, 7), -3.0, dtype=torch.float64).triu(1)
    expected = torch.softmax(Q @ K.mT * 0.5 + mask, -1) @ V
    O = attend(Q, K, V, scale=0.5, attn_mask=mask)
    torch.testing.assert_close(O, expected, rtol=0, atol=1e-14)


@BOTH
def test_the_lowest_finite_number_as_a_mask_gives_the_mean_as_elsewhere(attend):
    Q, K, V = inputs(dtype=torch.float32)
    mask = torch.full((7, 7), torch.finfo(torch.float32).min)
    mean = V.mean(-2, keepdim=True).expand_as(V)
    torch.testing.assert_close(attend(Q, K, V, attn_mask=mask), mean)


@BOTH
@pytest.mark.parametrize("kind", ["bool", "float", "window", "causal"])
def test_nan_and_inf_in_keys_that_no_query_sees_change_nothing(attend, kind):
    Q, K, V = inputs(6, 9, lead=(2, 2))
    keep = torch.tensor([True] * 5 + [False] * 4)
    options = {
        "bool": {"attn_mask": keep},
        "float": {"attn_mask": torch.zeros(9).masked_fill(~keep, -math.inf)},
        "window": {"q_start": 0, "window": (None, 0)},
        "causal": {"q_start": -1, "causal": True},
    }[kind]
    clean = attend(Q, K, V, return_lse=True, **options)
    unused = slice(5, 9) if kind != "window" else slice(6, 9)
    K[..., unused, :], V[..., unused, :] = math.nan, math.inf
    spoiled = attend(Q, K, V, return_lse=True, **options)
    assert all(torch.equal(a, b) for a, b in zip(clean, spoiled))
    assert all(torch.isfinite(x[..., 1:, :] if x.dim() == 4 else x[..., 1:]).all() for x in spoiled)


@BOTH
def test_nan_of_a_hidden_key_does_not_reach_the_rows_that_may_not_see_it(attend):
    Q, K, V = inputs(8, 8)
    K[:, 5] = math.nan
    O = attend(Q, K, V, causal=True)
    assert torch.isfinite(O[:, :5]).all() and torch.isnan(O[:, 5:]).all()
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[:, 5] = False
    mask[2, 5] = True  # and causal hides it there
    assert torch.isfinite(attend(Q, K, V, causal=True, attn_mask=mask)).all()
    O, L = attend(Q.abs(), torch.full_like(K[:, :2], 1e308), V[:, :2], causal=True, return_lse=True)
    assert not O[:, :6].any() and (L[:, :6] == -math.inf).all()


@BOTH
def test_nan_in_a_float_mask_is_not_taken_for_hidden(attend):
    mask = torch.zeros(7, 7)
    mask[3, 2] = math.nan
    assert torch.isnan(attend(*inputs(), attn_mask=mask)[:, 3]).all()


@BOTH
def test_whole_numbers_of_any_kind_are_taken_and_huge_ones_refused(attend):
    import numpy as np
    Q, K, V = inputs(5, 9)
    check(attend, Q, K, V, causal=True, q_start=np.uint8(1).item())
    O = attend(Q, K, V, causal=True, q_start=np.uint8(1), window=(np.uint8(3), np.int8(0)))
    assert torch.equal(O, attend(Q, K, V, causal=True, q_start=1, window=(3, 0)))
    for options in ({"q_start": 2**70}, {"window": (0, 2**70)}, {"scale": 10**400}):
        with pytest.raises(ValueError):
            attend(Q, K, V, **options)


def test_what_a_mask_or_score_mod_learns_is_refused_by_the_forward_alone():
    Q, K, V = inputs()
    learned = torch.zeros(7, 7, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="attn_mask wants a gradient"):
        flash_attention_forward(Q, K, V, attn_mask=learned)
    with pytest.raises(ValueError, match="score_mod wants a gradient"):
        flash_attention_forward(Q, K, V, score_mod=lambda s, b, h, q, k: s + learned[q, k])


@BOTH
def test_no_heads_give_an_empty_result(attend):
    assert attend(*(torch.zeros(2, 0, 3, 4) for _ in range(3))).shape == (2, 0, 3, 4)


def test_grouped_heads_copy_no_keys():
    from common.memory import measure_peak
    Q, K, V = inputs(512, lead=(1, 8), d=16, dtype=torch.float32)
    K, V = K[:, :1], V[:, :1]
    peak = measure_peak(lambda: flash_attention_forward(Q, K, V, 32, 32), torch.device("cpu"))
    a_copy_per_query_head = 8 * 512 * 16 * 4
    assert peak.without_result < a_copy_per_query_head


def test_the_tiles_that_are_drawn_are_those_that_are_visited():
    Q, K, V = inputs(8, lead=())
    assert Visible(Q, K, V, causal=True).drawing(2, 2) == "/ . . .\n# / . .\n# # / .\n# # # /"
    assert Visible(Q, K, V, window=(3, 3)).drawing(4, 2) == "# # / /\n/ / # #"
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[:4, 4:] = False
    mask[7, 0] = False
    assert Visible(Q, K, V, attn_mask=mask).drawing(4, 4) == "# .\n/ #"


def test_causal_visits_about_half_of_the_tiles():
    Q, K, V = inputs(64, lead=())
    visible = Visible(Q, K, V, causal=True)
    visited = sum(len(list(visible.key_blocks(rows, 4))) for rows in visible.query_blocks(4))
    assert visited == 16 * 17 / 2


# Invariances


@settings(max_examples=100, deadline=None, derandomize=True)
@given(problems(), st.integers(1, 10), st.integers(1, 10))
def test_other_tiles_give_the_same(problem, Br, Bc):
    tensors, tiles, options = problem
    one = flash_attention_forward(*tensors, *tiles, return_lse=True, **options)
    other = flash_attention_forward(*tensors, Br, Bc, return_lse=True, **options)
    for a, b in zip(one, other):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.permutations(range(9)), st.floats(-50, 50), st.integers(1, 5))
def test_permuted_keys_and_a_constant_added_to_every_score_change_nothing(order, constant, Bc):
    Q, K, V = inputs(5, 9)
    O, L = flash_attention_forward(Q, K, V, 2, Bc, return_lse=True)
    permuted, L_permuted = flash_attention_forward(Q, K[:, order], V[:, order], 2, Bc,
                                                   return_lse=True)
    torch.testing.assert_close(permuted, O, rtol=0, atol=1e-13)
    torch.testing.assert_close(L_permuted, L, rtol=0, atol=1e-13)
    shifted, L_shifted = flash_attention_forward(
        Q, K, V, 2, Bc, return_lse=True, score_mod=lambda score, b, h, q, k: score + constant)
    torch.testing.assert_close(shifted, O, rtol=0, atol=1e-12)
    torch.testing.assert_close(L_shifted, L + constant, rtol=0, atol=1e-12)


def test_the_oracle_reads_no_key_that_a_row_may_not_see():
    Q, K, V = inputs(2, 5)
    K[:, 4], V[:, 4] = math.nan, math.nan
    assert torch.isfinite(oracle(Q, K, V, causal=True)[0][:, 0]).all()
