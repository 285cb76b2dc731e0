"""Values that reports showed wrong, elsewhere or here: large scores, ties, wide masks, autocast."""

import math
import warnings

import numpy as np
import pytest
import torch
from flash_attention import flash_attention_forward, standard_attention
from flash_backward import flash_attention, gradients
from flash_variants import with_sink
from hypothesis import given, settings
from lab import tiles
from test_forward import check, inputs, problems

BOTH = pytest.mark.parametrize("attend", [standard_attention, flash_attention_forward])


# Weights are rebuilt from m and l, not from a rounded L


@pytest.mark.parametrize("hidden", [-1e9, torch.finfo(torch.float32).min])
def test_equal_keys_under_a_huge_negative_mask_share_the_gradient(hidden):
    Q, K, V = torch.zeros(1, 1, 4), torch.zeros(1, 5, 4), torch.randn(1, 5, 3)
    mask = torch.full((1, 5), hidden)
    dV = gradients(lambda *QKV: flash_attention(*QKV, attn_mask=mask), Q, K, V,
                   torch.ones(1, 1, 3))[2]
    torch.testing.assert_close(dV, torch.full_like(dV, 0.2), rtol=1e-6, atol=0)


def hard(kind, seed):
    """Return Q, K, V, dO in float32 and a mask, of one of the kinds that reports had."""
    generator = torch.Generator().manual_seed(seed)
    Q, K, V, dO = (torch.randn(1, n, d, generator=generator)
                   for n, d in ((20, 40), (30, 40), (30, 24), (20, 24)))
    mask = torch.zeros(20, 30)
    if kind == "integers to 10":
        Q, K = (torch.randint(-10, 11, x.shape, generator=generator).float() for x in (Q, K))
    if kind == "1000":  # scores of 6e6, where float32 has steps of a half
        Q, K = torch.full_like(Q, 1000.0), torch.full_like(K, 1000.0)
    if kind in ("-1e9", "finfo.min"):
        lowest = -1e9 if kind == "-1e9" else torch.finfo(torch.float32).min
        mask[torch.rand(20, 30, generator=generator) < 0.3] = lowest
        mask[3] = lowest  # a whole row
    return Q, K, V, dO, mask


@pytest.mark.parametrize("kind", ["integers to 10", "1000", "-1e9", "finfo.min"])
@pytest.mark.parametrize("seed", range(5))
def test_gradients_of_hard_inputs_err_at_most_three_times_as_much_as_standard(kind, seed):
    Q, K, V, dO, mask = hard(kind, seed)

    def of(attend, *tensors, **tile):
        return gradients(lambda *QKV: attend(*QKV, attn_mask=mask, **tile), *tensors)

    exact = of(standard_attention, *(x.double() for x in (Q, K, V, dO)))
    flash = of(flash_attention, Q, K, V, dO, Br=8, Bc=8)
    standard = of(standard_attention, Q, K, V, dO)
    # Of dQ and dK, dP - D cancels where one weight is nearly 1: D = dO . O is rounded by itself.
    cancels = 2 * dO.abs().amax() * V.abs().amax() * V.shape[-1] * 40**-0.5
    floors = (cancels * K.abs().amax(), cancels * Q.abs().amax() * len(Q[0]),
              exact[2].abs().amax())
    for name, a, b, reference, floor in zip(("dQ", "dK", "dV"), flash, standard, exact, floors):
        error, allowed = ((x.double() - reference).abs().max().item() for x in (a, b))
        assert error <= 3 * allowed + torch.finfo(torch.float32).eps * floor.item(), name


def test_tied_scores_of_integers_are_ties_at_any_head_size():
    """Q K^T of integers is exact, so two equal scores have equal weights, as in standard attention:
    the scale, 1/sqrt(40) here, is rounded after the product and not in each of Q's entries."""
    generator = torch.Generator().manual_seed(0)
    Q = torch.randint(-10, 11, (1, 50, 40), generator=generator).float()
    K = torch.randint(-10, 11, (1, 50, 40), generator=generator).float()
    K = torch.cat([K, K.flip(-1)], dim=1)  # with Q symmetric: the same products, in another order
    Q = torch.cat([Q[..., :20], Q[..., :20].flip(-1)], dim=-1)
    P = flash_attention_forward(Q, K, torch.eye(100).expand(1, 100, 100), 16, 16)
    torch.testing.assert_close(P[..., :50], P[..., 50:], rtol=0, atol=3e-7)  # exp's own rounding


def test_m_and_l_are_the_two_parts_of_l_in_base_e():
    Q, K, V = inputs(9, 2)
    O, m, l = flash_attention_forward(Q, K, V, 4, 4, causal=True, return_m_l=True)
    again, L = flash_attention_forward(Q, K, V, 4, 4, causal=True, return_lse=True)
    assert torch.equal(O, again) and torch.equal(m + l.log(), L) and (l[:, :7] == 0).all()


# Small faults


def test_a_sink_of_minus_infinity_leaves_a_row_without_keys_at_zero():
    O = torch.zeros(1, 2, 3, 4, requires_grad=True)
    L = torch.full((1, 2, 3), -math.inf, requires_grad=True)
    result = with_sink(O, L, torch.tensor([-math.inf, 0.0]))
    assert torch.equal(result, torch.zeros_like(result))
    result.sum().backward()
    assert O.grad.isfinite().all() and L.grad.isfinite().all()


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_lowest_number_of_a_wider_mask_hides_no_row(attend, dtype):
    Q, K, V = inputs(dtype=dtype)
    mask = torch.full((7, 7), torch.finfo(torch.float64).min, dtype=torch.float64)
    mean = V.float().mean(-2, keepdim=True).expand_as(V).to(dtype)
    torch.testing.assert_close(attend(Q, K, V, attn_mask=mask), mean)


@BOTH
def test_a_scale_of_numpy_is_taken_without_a_warning(attend):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        O = attend(*inputs(), scale=np.float32(0.5))
    assert torch.equal(O, attend(*inputs(), scale=0.5))


@BOTH
@pytest.mark.parametrize("change, word", [
    (lambda x: x.to_sparse(), "sparse_coo"),
    (lambda x: torch.nested.nested_tensor(list(x)), "nested")])
def test_other_layouts_are_refused_by_name(attend, change, word):
    Q, K, V = inputs()
    with pytest.raises(TypeError, match=f"K must be a dense tensor.*{word}"):
        attend(Q, change(K), V)


def test_a_mask_given_as_the_fourth_argument_is_told_what_to_write():
    Q, K, V = inputs()
    for attend in (flash_attention_forward, flash_attention):
        with pytest.raises(TypeError, match="Br must be .* a mask is given as attn_mask="):
            attend(Q, K, V, torch.ones(7, 7, dtype=torch.bool))


@BOTH
def test_positions_as_low_as_they_may_be_are_taken(attend):
    from flash_decoding import split_kv_attention
    Q, K, V = inputs(3, 9)
    for call in (attend, lambda *a, **o: split_kv_attention(*a, 2, **o)):
        assert not call(Q, K, V, causal=True, q_start=-(2**31)).any()


# Heads in groups


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_heads_taken_in_groups_give_the_same(problem):
    tensors, _, options = problem
    before = tiles.SCORES_BYTES
    tiles.SCORES_BYTES = 64  # eight scores: a head or two at a time
    try:
        check(flash_attention_forward, *tensors, "auto", "auto", **options)
        options.pop("score_mod", None)
        found = gradients(lambda *QKV: flash_attention(*QKV, "auto", "auto", **options), *tensors,
                          torch.ones(*tensors[0].shape[:-1], tensors[2].shape[-1]).double())
    finally:
        tiles.SCORES_BYTES = before
    expected = gradients(lambda *QKV: standard_attention(*QKV, **options), *tensors,
                         torch.ones(*tensors[0].shape[:-1], tensors[2].shape[-1]).double())
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("lead, mask", [
    ((2, 16), (16, 1, 64)), ((8, 4), (4, 1, 64)), ((8, 4), (8, 1, 1, 64)), ((2, 16), (2, 1, 1, 64)),
    ((8, 8), (8, 1, 64)), ((2, 5, 1), (1, 5, 1, 64, 64)), ((32,), (32, 1, 64)), ((4, 4), (64,))])
def test_a_mask_of_any_broadcast_shape_goes_with_its_heads(monkeypatch, lead, mask):
    monkeypatch.setattr(tiles, "SCORES_BYTES", 3 * 64 * 64 * 8)  # three heads at a time
    Q, K, V = inputs(64, lead=lead)
    bias = torch.randn(mask, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = flash_attention_forward(Q, K, V, "auto", "auto", attn_mask=bias)
    torch.testing.assert_close(found, standard_attention(Q, K, V, attn_mask=bias), rtol=0,
                               atol=1e-12)


def test_many_heads_are_taken_in_groups_whose_tiles_are_not_slivers():
    Q = torch.empty(4096, 256, 8, device="meta")
    assert tiles.choose_tile("auto", "auto", Q, Q, 8, "cpu") == (256, 128, 16)
    assert tiles.choose_tile(64, 64, Q, Q, 8, "cpu") == (64, 64, 4096)  # what was asked for
    assert tiles.choose_tile("auto", "auto", Q, Q, 8, "npu")[2] == 4096
