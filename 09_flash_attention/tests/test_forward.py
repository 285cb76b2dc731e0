"""standard_attention and flash_attention_forward against an oracle written another way."""

import math

import pytest
import torch
from flash_attention import flash_attention_forward, standard_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle

BOTH = pytest.mark.parametrize("attend", [standard_attention, flash_attention_forward])


def inputs(Nq=7, Nk=None, d=8, dv=None, lead=(2,), dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    Nk = Nq if Nk is None else Nk
    shapes = (*lead, Nq, d), (*lead, Nk, d), (*lead, Nk, dv or d)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def check(attend, Q, K, V, *tiles, **options):
    """Hold O and L to the oracle: in float64 the rounding of unit-size terms is far below 1e-12."""
    O, L = attend(Q, K, V, *tiles, return_lse=True, **options)
    expected_O, expected_L = oracle(Q, K, V, **options)
    assert O.dtype == Q.dtype and O.shape == (*Q.shape[:-1], V.shape[-1])
    assert L.shape == Q.shape[:-1]
    torch.testing.assert_close(O.double(), expected_O, rtol=0, atol=1e-12)
    torch.testing.assert_close(L.double(), expected_L, rtol=0, atol=1e-12)


# Dense attention


@BOTH
@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)])
def test_any_number_of_leading_dimensions(attend, lead):
    check(attend, *inputs(lead=lead))


@pytest.mark.parametrize("N, tile", [(192, 128), (7, 4), (5, 32), (1, 1), (9, 1), (64, 64)])
def test_lengths_that_are_no_multiple_of_the_tile(N, tile):
    check(flash_attention_forward, *inputs(N, lead=(1,)), tile, tile)


@pytest.mark.parametrize("Br, Bc", [(1, 7), (7, 1), (2, 5), (100, 3)])
def test_tiles_of_unequal_sides(Br, Bc):
    check(flash_attention_forward, *inputs(11, 13), Br, Bc)


@BOTH
@pytest.mark.parametrize("d", [1, 31, 63, 72, 128])
def test_any_head_dimension(attend, d):
    check(attend, *inputs(5, d=d))


@BOTH
def test_every_head_dimension_is_read(attend):
    Q, K, V = inputs(d=128)
    changed = K.clone()
    changed[..., -1] *= 2
    assert (attend(Q, K, V) - attend(Q, changed, V)).abs().max() > 1e-3


@BOTH
@pytest.mark.parametrize("Nq, Nk, dv", [(3, 9, 8), (9, 3, 8), (5, 5, 3), (1, 6, 20)])
def test_lengths_and_value_dimension_may_differ(attend, Nq, Nk, dv):
    check(attend, *inputs(Nq, Nk, dv=dv))


@BOTH
def test_no_queries_give_an_empty_result_and_no_keys_give_zeros(attend):
    for Nq, Nk in ((0, 4), (4, 0), (0, 0)):
        O, L = attend(*inputs(Nq, Nk), return_lse=True)
        assert O.shape == (2, Nq, 8) and not O.any() and (L == -math.inf).all()
    assert attend(*inputs(4, lead=(0,))).shape == (0, 4, 8)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_result_has_the_dtype_of_q_and_l_is_wide(attend, dtype):
    O, L = attend(*inputs(dtype=dtype), return_lse=True)
    assert O.dtype == dtype
    assert L.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_types_err_at_most_twice_as_much_as_standard(dtype, causal):
    Q, K, V = inputs(256, lead=(1,), d=64, dtype=dtype)
    exact = oracle(Q, K, V, causal=causal)[0]
    flash, standard = ((attend(Q, K, V, causal=causal).double() - exact).abs().max()
                       for attend in (flash_attention_forward, standard_attention))
    assert flash <= 2 * standard


@BOTH
def test_half_scores_beyond_the_range_of_float16_stay_finite(attend):
    Q, K, V = (torch.full((1, 4, 128), 256.0, dtype=torch.float16) for _ in range(3))
    assert torch.equal(attend(Q, K, V), V)


@BOTH
def test_a_bool_mask_works_in_float16(attend):
    Q, K, V = inputs(dtype=torch.float16)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()
    expected = oracle(Q, K, V, attn_mask=mask)[0]
    four_eps = 4 * torch.finfo(torch.float16).eps
    O = attend(Q, K, V, attn_mask=mask)
    torch.testing.assert_close(O.double(), expected, rtol=0, atol=four_eps)


@BOTH
def test_scale_is_taken_and_defaults_to_that_of_q(attend):
    Q, K, V = inputs(d=8, dv=3)
    check(attend, Q, K, V, scale=1.0)
    check(attend, Q, K, V, scale=-0.3)
    torch.testing.assert_close(attend(Q, K, V), attend(Q, K, V, scale=8**-0.5), rtol=0, atol=1e-15)
    assert (attend(Q, K, V) - attend(Q, K, V, scale=1.0)).abs().max() > 1e-2


@BOTH
def test_l_is_the_natural_log_of_the_sum_of_exp_of_the_scores(attend):
    Q, K, V = inputs()
    expected = torch.logsumexp(Q @ K.transpose(-2, -1) * 8**-0.5, dim=-1)
    torch.testing.assert_close(attend(Q, K, V, return_lse=True)[1], expected, rtol=0, atol=1e-12)


@BOTH
def test_strided_views_are_read_as_they_are(attend):
    Q, K, V = inputs(lead=(2, 3))
    views = [
        (Q.transpose(1, 2).contiguous().transpose(1, 2), K, V),
        (Q, torch.stack([K, K + 1], dim=-1).flatten(-2)[..., ::2], V),
        (Q, K, V.transpose(-2, -1).contiguous().transpose(-2, -1)),
    ]
    for view in views:
        assert not all(x.is_contiguous() for x in view)
        torch.testing.assert_close(attend(*view), attend(Q, K, V), rtol=0, atol=1e-12)
    check(attend, Q, K[:1].expand_as(K), V[:, :1].expand_as(V))


@BOTH
def test_inputs_are_left_as_they_were(attend):
    before = inputs(lead=(2, 2))
    after = [x.clone() for x in before]
    attend(*after, causal=True, score_mod=lambda score, b, h, q_idx, kv_idx: score * 2)
    assert all(torch.equal(a, b) for a, b in zip(before, after))


@BOTH
@pytest.mark.parametrize("factor", [1e3, 1e-160])  # whose products are denormal
def test_huge_and_tiny_inputs_stay_finite_and_right(attend, factor):
    Q, K, V = (x * factor for x in inputs(dtype=torch.float64))
    O = attend(Q, K, V)
    torch.testing.assert_close(O, oracle(Q, K, V)[0], rtol=1e-9, atol=0)


@BOTH
def test_equal_scores_give_the_mean_and_one_huge_score_gives_its_value(attend):
    Q, K, V = inputs()
    mean = V.mean(-2, keepdim=True).expand_as(V)
    torch.testing.assert_close(attend(Q, torch.zeros_like(K), V), mean)
    K[:, 5] = Q[:, 3] * 1e6
    torch.testing.assert_close(attend(Q[:, 3:4], K, V), V[:, 5:6], rtol=0, atol=0)


# Wrong input


@BOTH
@pytest.mark.parametrize("change, error, words", [
    (dict(Q=torch.zeros(2, 7, 8, dtype=torch.long)), TypeError, ["Q", "int64"]),
    (dict(K="K"), TypeError, ["K", "str"]),
    (dict(Q=torch.zeros(8)), ValueError, ["Q", "(8,)"]),
    (dict(K=torch.zeros(2, 7, 8)), TypeError, ["float64", "float32"]),
    (dict(K=torch.zeros(2, 7, 9).double()), ValueError, ["(2, 7, 8)", "(2, 7, 9)"]),
    (dict(V=torch.zeros(2, 6, 8).double()), ValueError, ["(2, 6, 8)", "(2, 7, 8)"]),
    (dict(Q=torch.zeros(3, 7, 8).double()), ValueError, ["(3, 7, 8)", "(2, 7, 8)"]),
    (dict(V=torch.zeros(2, 7, 8, device="meta").double()), ValueError, ["cpu", "meta"]),
    (dict(scale=math.nan), ValueError, ["scale", "nan"]),
    (dict(scale="1"), ValueError, ["scale", "'1'"]),
    (dict(q_start=0.5), ValueError, ["q_start", "0.5"]),
    (dict(window=3), ValueError, ["window", "3"]),
    (dict(window=(1, -2)), ValueError, ["window", "-2"]),
    (dict(attn_mask=torch.ones(7, 7, dtype=torch.long)), TypeError, ["attn_mask", "int64"]),
    (dict(attn_mask=torch.ones(7, 6, dtype=torch.bool)), ValueError, ["attn_mask", "(7, 6)"]),
    (dict(attn_mask=torch.ones(1, 2, 7, 7).bool()), ValueError, ["attn_mask", "(1, 2, 7, 7)"]),
])
def test_wrong_input_raises_and_names_what_was_given(attend, change, error, words):
    Q, K, V = inputs()
    with pytest.raises(error) as raised:
        attend(**{**dict(Q=Q, K=K, V=V), **change})
    assert all(word in str(raised.value) for word in words), raised.value


@BOTH
def test_heads_that_do_not_divide_are_refused(attend):
    Q, K, V = inputs(lead=(1, 4))
    with pytest.raises(ValueError, match="divides"):
        attend(Q, K[:, :3], V[:, :3])
    with pytest.raises(ValueError, match="agree"):
        attend(Q, K[:, :2], V[:, :1])


@pytest.mark.parametrize("tile", [0, -1, 2.0, True, "64", "Auto", None])
def test_wrong_tiles_are_refused(tile):
    with pytest.raises(ValueError, match="Br must be .* got"):
        flash_attention_forward(*inputs(), tile, 4)
    with pytest.raises(ValueError, match="Bc must be .* got"):
        flash_attention_forward(*inputs(), 4, tile)


def test_an_input_that_wants_a_gradient_is_refused_and_taken_without():
    Q, K, V = inputs()
    V.requires_grad_()
    with pytest.raises(ValueError, match="V wants a gradient"):
        flash_attention_forward(Q, K, V)
    with torch.no_grad():
        check(flash_attention_forward, Q, K, V)


# Everything at once


@st.composite
def problems(draw):
    """Inputs with any strides, tiles, masks and groups, small enough for the oracle."""
    Nq, Nk = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    d, dv = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    lead, kv_lead = draw(st.sampled_from(
        [((), ()), ((2,), (2,)), ((2, kv_heads * group), (2, kv_heads))]))
    seed = draw(st.integers(0, 2**20))
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape):
        x = torch.randn(*shape[:-2], shape[-1], shape[-2], generator=generator, dtype=torch.float64)
        return x.transpose(-2, -1) if draw(st.booleans()) else x.transpose(-2, -1).contiguous()

    options = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["q_start"] = draw(st.integers(-3, 9))
    if draw(st.booleans()):
        reach = st.one_of(st.none(), st.integers(0, 4))
        options["window"] = (draw(reach), draw(reach))
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-2, 2))
    if draw(st.booleans()):
        shape = [n if draw(st.booleans()) else 1 for n in (*lead, Nq, Nk)]
        shape = shape[draw(st.integers(0, len(lead))):]
        mask = torch.rand(shape, generator=generator) < 0.7
        bias = torch.randn(shape, generator=generator).masked_fill(~mask, -math.inf)
        options["attn_mask"] = draw(st.sampled_from([mask, bias]))
    if draw(st.booleans()):
        options["score_mod"] = draw(st.sampled_from([
            lambda score, b, h, q_idx, kv_idx: score + 0.1 * (h + 1) * (kv_idx - q_idx),
            lambda score, b, h, q_idx, kv_idx: 2 * torch.tanh(score / 2) + b,
            lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -math.inf),
        ]))
    Q, K, V = tensor(*lead, Nq, d), tensor(*kv_lead, Nk, d), tensor(*kv_lead, Nk, dv)
    return (Q, K, V), (draw(st.integers(1, 10)), draw(st.integers(1, 10))), options


@settings(max_examples=300, deadline=None, derandomize=True)
@given(problems())
def test_any_problem_agrees_with_the_oracle(problem):
    tensors, tiles, options = problem
    check(flash_attention_forward, *tensors, *tiles, **options)
    check(standard_attention, *tensors, **options)
