"""The Triton kernels' gradients, run by Triton's interpreter, are those of autograd in float64."""

import itertools
import math

import pytest
import torch
from flash_attention import standard_attention
from flash_backward import gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forward import inputs

try:
    import flash_triton_backward
except ImportError as missing:  # no package for this platform, or an old one
    pytest.skip(str(missing), allow_module_level=True)

import triton
from flash_triton import flash_attention_triton
from flash_triton_backward import DK_DV_TILES, DQ_TILES, flash_attention_triton_backward
from lab import triton_tools
from test_triton import BANDS, on_a_small_npu, strided

pytestmark = pytest.mark.usefixtures("interpreted")
HALF = (torch.float16, torch.bfloat16)
SMALL = (16, 32, 4, 1)  # a tile of 16 x 32: short inputs have several
MASKS = [{}, dict(causal=True), dict(window=(11, 5)), dict(causal=True, window=(40, None))]


def exact(Q, K, V, dO, dL=None, causal=False, q_start=None, window=None, scale=None):
    """Return dQ, dK, dV in float64: dense, by autograd."""
    leaves = [x.detach().double().requires_grad_() for x in (Q, K, V)]
    G = Q.shape[1] // K.shape[1] if Q.dim() == 4 else 1
    Q, K, V = leaves[0], *(x.repeat_interleave(G, 1) if G > 1 else x for x in leaves[1:])
    Nq, Nk = Q.shape[-2], K.shape[-2]
    at = torch.arange(Nq)[:, None] + (Nk - Nq if q_start is None else q_start)
    left, right = window or (None, None)
    beyond = torch.arange(Nk) - at
    keep = torch.ones(Nq, Nk, dtype=torch.bool)
    for hides, side in ((causal, beyond > 0), (right is not None, beyond > (right or 0)),
                        (left is not None, -beyond > (left or 0))):
        keep &= ~side if hides else keep
    blind = ~keep.any(-1, keepdim=True)
    S = (Q @ K.mT * (Q.shape[-1] ** -0.5 if scale is None else scale))
    S = S.masked_fill(~keep & ~blind, -math.inf)
    O = (torch.softmax(S, -1) @ V).masked_fill(blind, 0)
    if dL is None:
        return torch.autograd.grad(O, leaves, dO.double())
    L = torch.logsumexp(S, -1).masked_fill(blind[..., 0], 0)
    return torch.autograd.grad((O, L), leaves, (dO.double(), dL.double()))


def dO_of(Q, V, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*Q.shape[:-1], V.shape[-1], generator=generator).to(Q.dtype)


def found(Q, K, V, dO, tile=SMALL, **options):
    return gradients(lambda *QKV: flash_attention_triton(*QKV, tile=tile, **options), Q, K, V, dO)


def check(Q, K, V, dO=None, tile=SMALL, **options):
    """Hold dQ, dK, dV to float64: float32 to 5e-6, half types to 3 times standard's error."""
    dO = dO_of(Q, V) if dO is None else dO
    right = exact(Q, K, V, dO, **options)
    if Q.dtype in HALF:
        standard = gradients(lambda *QKV: standard_attention(*QKV, **options), Q, K, V, dO)
        allowed = [3 * (x.double() - y).abs().max().item() for x, y in zip(standard, right)]
    else:
        allowed = [5e-6] * 3
    got = found(Q, K, V, dO, tile, **options)
    for x, gradient, y, limit in zip((Q, K, V), got, right, allowed):
        assert gradient.dtype == x.dtype and gradient.shape == x.shape
        assert (gradient.double() - y).abs().max().item() <= limit


@pytest.mark.parametrize("d, mask", [*itertools.product([31, 64, 72, 128, 256], MASKS)], ids=str)
def test_float32_at_any_length_and_head_size(d, mask):
    Nq, Nk = [(39, 50), (70, 33), (1, 39), (65, 65)][(d + MASKS.index(mask)) % 4]
    check(*inputs(Nq, Nk, d, dtype=torch.float32, lead=(1,)), **mask)


@pytest.mark.parametrize("d, mask", [*zip([31, 64, 72, 128, 256], [*MASKS, MASKS[1]])], ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_half_types_by_the_3x_rule(dtype, d, mask):
    check(*inputs(41, 50, d, dtype=dtype, lead=(1,)), **mask)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_causal_windows_and_where_the_queries_stand(band):
    Nq, Nk = (75, 40) if BANDS.index(band) % 2 else (40, 75)
    check(*inputs(Nq, Nk, 16, 8, dtype=torch.float32, lead=(1,)), **band)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_query_heads_of_a_group_are_summed(kv_heads):
    Q, _, _ = inputs(20, lead=(2, 4), dtype=torch.float32)
    _, K, V = inputs(5, 40, lead=(2, kv_heads), dtype=torch.float32)
    check(Q, K, V, causal=True, q_start=3)


def test_a_group_in_half_precision_is_summed_in_float32():
    """In float16 a sum of ones stops at 2048: V's gradient counts the 2560 queries that read it."""
    Q = torch.zeros(1, 2, 1280, 2, dtype=torch.float16)
    K, V = torch.zeros(1, 1, 1, 2, dtype=torch.float16), torch.ones(1, 1, 1, 2).half()
    dV = found(Q, K, V, torch.ones_like(Q), (1024, 16, 4, 1))[2]
    assert dV.tolist() == [[[[2560.0, 2560.0]]]]


@pytest.mark.parametrize("lead", [(), (2,), (2, 1, 3)])
def test_any_number_of_leading_dimensions(lead):
    check(*inputs(5, 7, lead=lead, dtype=torch.float32), causal=True)


@pytest.mark.parametrize("kind", ["heads inside", "columns first", "every second", "expanded"])
def test_strides_are_honoured(kind):
    Q, K, V = inputs(20, 40, lead=(2, 2), dtype=torch.float32)
    dO = dO_of(Q, V)
    check(*(strided(x, kind) for x in (Q, K, V, dO)))


def test_the_gradient_of_a_sum_is_expanded_and_is_taken_so():
    Q, K, V = inputs(20, 40, dtype=torch.float32)
    check(Q, K, V, torch.ones(()).expand(*Q.shape[:-1], V.shape[-1]))


@pytest.mark.parametrize("scale", [0.3, 1, 0.0, -0.5, 1e-40])
def test_any_scale(scale):
    check(*inputs(20, 40, 8, dtype=torch.float32), scale=scale, causal=True)


@pytest.mark.parametrize("mask", [{}, dict(causal=True, q_start=-5)])
def test_the_gradient_of_l(mask):
    Q, K, V = inputs(20, 40, 8, dtype=torch.float32)
    dO = dO_of(Q, V)
    got = found(Q, K, V, dO, return_lse=True, **mask)
    for x, y in zip(got, exact(Q, K, V, dO, dL=dO[..., 0], **mask)):  # as `gradients` takes dL
        torch.testing.assert_close(x.double(), y, rtol=0, atol=5e-6)


def test_scores_that_are_large_keep_the_weights():
    """From L = m + log(l) in float32, P would lose log(l) beside m: here an error of 1e-3."""
    Q, K, V = inputs(20, 40, 8, dtype=torch.float32)
    Q, K = torch.full_like(Q, 50.0), (K / 1000 + 100.0).round(decimals=2)
    dO = dO_of(Q, V)
    torch.testing.assert_close(
        found(Q, K, V, dO)[2].double(), exact(Q, K, V, dO)[2], rtol=0, atol=1e-1)


# Rows that see nothing, and what lies outside


@pytest.mark.parametrize("mask, blind", [
    (dict(causal=True), slice(0, 30)), (dict(window=(3, None), q_start=0), slice(23, 50))], ids=str)
def test_a_row_that_sees_no_key_passes_0_on_even_where_it_is_nan(mask, blind):
    Q, K, V = inputs(50, 20, dtype=torch.float32)
    dO = dO_of(Q, V)
    right = exact(Q, K, V, dO, **mask)
    Q[:, blind], dO[:, blind] = math.nan, math.nan
    got = found(Q, K, V, dO, **mask)
    assert (got[0][:, blind] == 0).all()
    for x, y in zip(got, right):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=5e-6)


@pytest.mark.parametrize("Nq, Nk, lead", [(0, 3, (2,)), (3, 0, (2,)), (3, 3, (0,)), (3, 3, (2, 0))])
def test_empty_inputs_have_gradients_of_zero(Nq, Nk, lead):
    Q, K, V = inputs(Nq, Nk, lead=lead, dtype=torch.float32)
    for x, gradient in zip((Q, K, V), found(Q, K, V, dO_of(Q, V))):
        assert torch.equal(gradient, torch.zeros_like(x))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("mask", [{}, dict(causal=True, q_start=9), dict(window=(9, 3))], ids=str)
def test_what_lies_outside_is_never_read_into_it_whatever_the_chip_loads(monkeypatch, mask):
    monkeypatch.setattr(triton_tools, "OUTSIDE", triton.language.constexpr(math.nan))
    views = []
    for x in (*(qkv := inputs(41, 70, 31, dtype=torch.float32)), dO_of(qkv[0], qkv[2])):
        around = torch.full((2, x.shape[1] + 64, 64), math.nan)
        around[:, : x.shape[1], :31] = x
        views.append(around[:, : x.shape[1], :31])
    check(*views, **mask)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("band, unseen", [
    (dict(causal=True, q_start=0), slice(20, 70)), (dict(window=(3, None), q_start=40), slice(37)),
    (dict(window=(3, 2), q_start=40), [*range(37), *range(62, 70)])], ids=str)
def test_keys_that_no_query_sees_may_be_nan(band, unseen):
    Q, K, V = inputs(20, 70, dtype=torch.float32)
    dO = dO_of(Q, V)
    expected = found(Q, K, V, dO, **band)
    K[:, unseen], V[:, unseen] = math.nan, math.inf
    for x, y in zip(found(Q, K, V, dO, **band), expected):
        assert torch.equal(x, y)


# What is kept, what is visited


def test_what_is_kept_for_the_backward_grows_with_n_alone():
    def kept(N):
        seen = []
        Q, K, V = (x.requires_grad_() for x in inputs(N, d=8, dtype=torch.float32, lead=(1,)))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.shape) or x, max):
            O = flash_attention_triton(Q, K, V, return_lse=True)[0]
        assert not any(torch.is_tensor(x) for x in vars(O.grad_fn).values())
        return sum(map(math.prod, seen))

    # Q, K, V, O, m and l; and l once more, of which L is made
    assert kept(40) == 40 * (4 * 8 + 2) and kept(80) == 2 * kept(40)


def test_equal_input_gives_equal_bits_however_many_programs_there_are(monkeypatch):
    Q, _, _ = inputs(40, lead=(1, 2), dtype=torch.float32)
    _, K, V = inputs(40, lead=(1, 1), dtype=torch.float32)
    dO, got = dO_of(Q, V), []
    for count in (1, 3):
        monkeypatch.setattr(triton_tools, "programs", lambda device, count=count: count)
        got.append(found(Q, K, V, dO, causal=True))
    assert all(torch.equal(one, other) for one, other in zip(*got))


@pytest.mark.parametrize("mask, tiles, edges", [
    ({}, 16, 0), (dict(causal=True), 10, 4), (dict(causal=True, window=(16, None)), 7, 7),
    (dict(window=(0, 0)), 4, 4), (dict(causal=True, q_start=-64), 0, 0)], ids=str)
def test_hidden_tiles_are_skipped_and_the_edges_alone_masked(monkeypatch, mask, tiles, edges):
    """64 queries and keys in 16 x 16 tiles; seen as the picture at the top of lab/visible.py."""
    counted = {"gradient_step": [], "hide": []}
    for name, calls in counted.items():
        real = getattr(flash_triton_backward, name)
        monkeypatch.setattr(flash_triton_backward, name, lambda *given, real=real, calls=calls: (
            calls.append(1) or real(*given)))
    Q, K, V = inputs(64, d=8, dtype=torch.float32, lead=(1,))
    m = torch.zeros(1, 64)
    flash_attention_triton_backward(Q, Q, K, V, Q, m, m + 1, tiles=[(16, 16, 4, 1)] * 2, **mask)
    assert [len(calls) for calls in counted.values()] == [2 * tiles, 2 * edges]


@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_random_problems(data):
    draw = data.draw
    size, reach = st.integers(1, 45), st.none() | st.integers(0, 30)
    Hkv, G = draw(st.sampled_from([(1, 1), (2, 1), (1, 3)]))
    Nq, Nk, d, dv, seed = (draw(size) for _ in range(5))
    Q, _, _ = inputs(Nq, Nk, d, lead=(1, Hkv * G), dtype=torch.float32, seed=seed)
    _, K, V = inputs(Nq, Nk, d, dv, lead=(1, Hkv), dtype=torch.float32, seed=seed)
    tile = draw(st.sampled_from([(16, 16, 4, 1), (16, 64, 4, 1), (64, 16, 4, 1)]))
    check(Q, K, V, None, tile, causal=draw(st.booleans()),
          window=draw(st.none() | st.tuples(reach, reach)),
          q_start=draw(st.none() | st.integers(-20, 60)))


# The call, the launch


def test_a_second_derivative_is_refused():
    Q, K, V = (x.requires_grad_() for x in inputs(3, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(flash_attention_triton(Q, K, V).sum(), Q, create_graph=True)


def test_a_scale_that_is_not_above_0_is_refused_where_the_kernels_would_take_it():
    x = torch.ones(1, 3, 4)
    with pytest.raises(ValueError, match="scale must be above 0"):
        flash_attention_triton_backward(x, x, x, x, x, x[..., 0], x[..., 0], scale=-1.0)


@pytest.mark.parametrize("table", [DQ_TILES, DK_DV_TILES])
def test_each_head_size_has_a_tile(table):
    for platform, dtype, d, edges in itertools.product(
            ("npu", "hopper", "cuda", "interpreter"), triton_tools.DTYPES, range(1, 257, 15),
            (False, True)):
        assert len(triton_tools.tile_of(table, platform, dtype, d, 64, edges)) == 4


def test_where_a_tile_does_not_fit_the_next_smaller_is_taken(monkeypatch):
    tried = on_a_small_npu(monkeypatch, flash_triton_backward, "dK_dV_kernel")
    check(*inputs(20, 40, dtype=torch.float32), tile=None)
    assert tried == [(128, 128), (128, 64), (64, 64), (32, 64)]
