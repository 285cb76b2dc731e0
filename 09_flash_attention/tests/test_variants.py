"""Masks and score functions of other models, against FlexAttention and the row-by-row oracle."""

import math

import pytest
import torch
from lab.cases import Case
from flash_attention import flash_attention_forward, standard_attention
from flash_variants import (
    RULES,
    VARIANTS,
    check_variant,
    drawings,
    flex_attention,
    plot,
    sink_logits,
    skipped_share,
    weights,
    with_sink,
)
from oracle import oracle

EACH = pytest.mark.parametrize("name", VARIANTS)


def inputs(N, H=4, Hkv=2, dtype=torch.float64):
    return Case(N, batch=2, heads=H, kv_heads=Hkv, d=8, dtype=dtype).inputs("cpu", 0)


@pytest.mark.skipif(flex_attention is None, reason="flex_attention needs torch 2.5")
@EACH
def test_each_variant_agrees_with_flex_attention(name):
    case = Case(45, batch=2, heads=4, kv_heads=2, d=16, dv=8)
    row = check_variant(name, case, 16, 8)
    assert row.passed and row.error_flash < 1e-5, row


@EACH
@pytest.mark.parametrize("attend", [flash_attention_forward, standard_attention])
def test_each_variant_agrees_with_the_oracle(name, attend):
    Q, K, V = inputs(13)
    options = {**VARIANTS[name](13, 4, "cpu"), "return_lse": True}
    O, L = attend(Q, K, V, **options)
    del options["return_lse"]
    expected_O, expected_L = oracle(Q, K, V, **options)
    torch.testing.assert_close(O, expected_O, rtol=0, atol=1e-12)
    torch.testing.assert_close(L, expected_L, rtol=0, atol=1e-12)


@EACH
@pytest.mark.parametrize("N", [1, 7, 32])
def test_what_a_variant_sees_is_what_its_rule_says(name, N):
    q, k = torch.arange(N)[:, None], torch.arange(N)
    expected = RULES[name](N, q, k).expand(4, N, N)
    assert torch.equal(weights(name, N, 4) > 0, expected)


@EACH
def test_a_mask_or_a_band_skips_every_tile_that_its_rule_empties(name):
    N, tile = 48, 4
    Q, K, V = inputs(N)
    kept = RULES[name](N, torch.arange(N)[:, None], torch.arange(N))
    tiles = kept.view(N // tile, tile, N // tile, tile).any(3).any(1)  # [N/tile, N/tile]
    skipped = skipped_share(Q, K, V, tile, tile, VARIANTS[name](N, 4, "cpu"))
    assert skipped == pytest.approx(1 - tiles.double().mean().item())


def test_a_score_mod_that_hides_skips_nothing_where_a_mask_does():
    Q, K, V = inputs(48)

    def causal(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx <= q_idx, score, -math.inf)

    assert skipped_share(Q, K, V, 4, 4, {"score_mod": causal}) == 0
    assert skipped_share(Q, K, V, 4, 4, {"causal": True}) == pytest.approx(11 / 24)


def test_alibi_slopes_are_those_of_the_paper_for_eight_heads():
    score_mod = VARIANTS["ALiBi"](16, 8, "cpu")["score_mod"]
    bias = score_mod(torch.zeros(8), 0, torch.arange(8), torch.tensor(5), torch.tensor(4))
    assert bias.tolist() == [-(0.5**i) for i in range(1, 9)]  # section 3: 1/2, 1/4 ... 1/256


def test_softcap_leaves_small_scores_and_keeps_huge_ones_below_the_cap():
    score_mod = VARIANTS["softcap"](16, 4, "cpu")["score_mod"]
    capped = score_mod(torch.tensor([0.0, 0.1, 50.0, 1e4, -1e4]), *[torch.tensor(0)] * 4)
    expected = [0, 0.1, 50 * math.tanh(1), 50, -50]  # Gemma 2's cap is 50
    assert capped.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_learned_sink_is_one_more_score_whose_value_is_zero(dtype):
    Q, K, V = inputs(9, Hkv=4, dtype=dtype)
    O, L = flash_attention_forward(Q, K, V, causal=True, return_lse=True)
    sink = sink_logits(4, "cpu").double()
    S = Q.double() @ K.double().transpose(-2, -1) * 8**-0.5
    S = S.masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
    P = torch.softmax(torch.cat([S, sink.view(4, 1, 1).expand(2, 4, 9, 1)], dim=-1), dim=-1)
    result = with_sink(O, L, sink)
    assert result.dtype == dtype
    atol = 1e-12 if dtype == torch.float64 else 4e-3  # 4 eps
    torch.testing.assert_close(result.double(), P[..., :-1] @ V.double(), rtol=0, atol=atol)


def test_a_sink_leaves_a_row_that_sees_no_key_at_zero():
    O, L = torch.zeros(1, 1, 1, 3), torch.full((1, 1, 1), -math.inf)
    assert torch.equal(with_sink(O, L, torch.zeros(1)), O)


def test_the_drawings_show_every_variant_within_80_columns():
    lines = drawings()
    assert all(name in "\n".join(lines) for name in VARIANTS)
    assert max(map(len, lines)) <= 80


def test_the_plot_is_one_picture_that_is_whole(tmp_path):
    pytest.importorskip("matplotlib")
    plot(tmp_path / "deep" / "masks.png", N=16)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["masks.png"]
    assert (tmp_path / "deep" / "masks.png").read_bytes().startswith(b"\x89PNG")
