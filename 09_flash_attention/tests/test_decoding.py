"""The KV cache, split keys, and the merge of parts by their m and l."""

import json
import math
import subprocess
import sys

import flash_decoding
import pytest
import torch
from common.timing import count_launches
from flash_attention import flash_attention_forward, standard_attention
from flash_decoding import KVCache, decode, merge, split_kv_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle


def inputs(Nq, Nk, H=4, Hkv=2, d=8, dv=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, H, Nq, d), (2, Hkv, Nk, d), (2, Hkv, Nk, dv)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def close(actual, expected):
    """In float64, rounding of sums of unit-size terms stays below 1e-12."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


# The merge


@st.composite
def parts_of_keys(draw, count):
    """O_parts, m_parts and l_parts of `count` random parts, some of whose rows saw no key."""
    rows, dv = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    O = torch.randn(count, rows, dv, generator=generator, dtype=torch.float64)
    m = torch.randn(count, rows, generator=generator, dtype=torch.float64)
    m = m * draw(st.sampled_from([1.0, 30.0, 1000.0]))
    l = 1 + torch.rand(count, rows, generator=generator, dtype=torch.float64)
    empty = torch.tensor(
        draw(st.lists(st.booleans(), min_size=count * rows, max_size=count * rows))
    ).view(count, rows)
    return O.masked_fill(empty.unsqueeze(-1), 0), m, l.masked_fill(empty, 0)


def pick(parts, *which):
    return [x[list(which)] for x in parts]


def one(*parts):
    return [x.unsqueeze(0) for x in parts]


def both(a, b):
    return tuple(torch.cat(pair) for pair in zip(a, b))


def same(a, b):
    """Hold O and L = m + log(l) of both: m of a row that saw no key is anything."""
    for x, y in zip((a[0], a[1] + a[2].log()), (b[0], b[1] + b[2].log())):
        assert not x.isnan().any() and not y.isnan().any()
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(parts_of_keys(3))
def test_merge_is_commutative_and_associative(parts):
    whole = merge(*parts)
    same(merge(*pick(parts, 2, 0, 1)), whole)
    first_two = one(*merge(*pick(parts, 0, 1)))
    last_two = one(*merge(*pick(parts, 1, 2)))
    same(merge(*both(first_two, pick(parts, 2))), whole)
    same(merge(*both(pick(parts, 0), last_two)), whole)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(parts_of_keys(2))
def test_an_empty_part_changes_nothing(parts):
    O, m, l = parts
    for its_m in (-1e300, 0, 1e300):
        empty = torch.zeros_like(O[:1]), torch.full_like(m[:1], its_m), torch.zeros_like(l[:1])
        same(merge(*both(parts, empty)), merge(*parts))
        same(merge(*both(empty, pick(parts, 0))), (O[0], m[0], l[0]))


def test_two_empty_parts_and_no_part_at_all_give_zeros():
    for P in (0, 1, 2):
        O, m, l = merge(torch.zeros(P, 3, 4), torch.zeros(P, 3), torch.zeros(P, 3))
        assert torch.equal(O, torch.zeros(3, 4)) and torch.equal(l, torch.zeros(3))
        assert (m + l.log() == -math.inf).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.booleans(), st.integers(0, 99))
def test_parts_of_any_sizes_merge_to_what_one_pass_gives(sizes, causal, seed):
    Q, K, V = inputs(3, sum(sizes), seed=seed)
    parts, start = [], sum(sizes) - 3
    for K_part, V_part in zip(K.split(sizes, dim=-2), V.split(sizes, dim=-2)):
        options = {"causal": causal, "q_start": start, "return_m_l": True}
        parts.append(flash_attention_forward(Q, K_part, V_part, 2, 2, **options))
        start -= K_part.shape[-2]
    O, m, l = merge(*(torch.stack(x) for x in zip(*parts)))
    expected_O, expected_L = oracle(Q, K, V, causal=causal)
    close(O, expected_O)
    close(m + l.log(), expected_L)


def test_large_scores_merge_to_what_one_pass_gives():
    Q, K, V = (torch.full((1, n, 128), x) for n, x in ((1, 256.0), (700, 256.0), (700, 1.0)))
    for splits in (2, 3, 16):
        torch.testing.assert_close(split_kv_attention(Q, K, V, splits), torch.ones(1, 1, 128))


def test_ties_of_scores_of_millions_split_evenly():
    """L = m + log(l) is m there in float32, and parts of 1, 2 and 3 keys would weigh the same."""
    Q, K = torch.full((1, 1, 4), 1000.0), torch.full((1, 6, 4), 4000.0)
    V = torch.arange(6.0).view(1, 6, 1)
    for splits in (1, 2, 4, 6):
        assert split_kv_attention(Q, K, V, splits).item() == pytest.approx(2.5, abs=1e-6)


def test_merge_keeps_the_dtype_of_o_and_weighs_in_that_of_m_and_l():
    O = torch.tensor([[[1.0]], [[3.0]]], dtype=torch.float16)
    merged, m, l = merge(O, torch.tensor([[20.0], [20.0]]), torch.ones(2, 1))
    assert merged.dtype == torch.float16 and merged.item() == 2
    assert m.dtype == torch.float32 and (m.item(), l.item()) == (20, 2)


@pytest.mark.parametrize(
    "O_parts, m_parts, l_parts, error, words",
    [
        (torch.zeros(2, 3, 4), torch.zeros(2, 4), torch.zeros(2, 4), ValueError,
         ["(2, 3, 4)", "(2, 4)"]),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(2), ValueError, ["(2,)"]),
        (torch.zeros(2, 4), torch.zeros(2), torch.zeros(2), ValueError, ["O_parts", "(2, 4)"]),
        (torch.zeros(2, 3, 4).long(), torch.zeros(2, 3), torch.zeros(2, 3), TypeError,
         ["O_parts", "int64"]),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3).bool(), torch.zeros(2, 3), TypeError,
         ["m_parts", "bool"]),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3), [1], TypeError, ["l_parts", "list"]),
    ],
)
def test_merge_refuses_what_does_not_fit_and_names_it(O_parts, m_parts, l_parts, error, words):
    with pytest.raises(error) as raised:
        merge(O_parts, m_parts, l_parts)
    assert all(word in str(raised.value) for word in words), raised.value


# The split


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_split_gives_what_the_oracle_gives(data):
    draw = data.draw
    Nq, Nk = draw(st.integers(0, 4)), draw(st.integers(0, 14))
    Hkv, G = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    Q, K, V = inputs(Nq, Nk, Hkv * G, Hkv, seed=draw(st.integers(0, 99)))
    if Hkv * G == 1 and draw(st.booleans()):
        Q, K, V = (x[0, 0] for x in (Q, K, V))  # [N, d]
    elif G == 1 and draw(st.booleans()):
        Q, K, V = (x[:, 0] for x in (Q, K, V))  # the article's [B, N, d]
    reach = st.one_of(st.none(), st.integers(0, 6))
    options = {"causal": draw(st.booleans()), "scale": draw(st.sampled_from([None, 0.5]))}
    if draw(st.booleans()):
        options["window"] = draw(reach), draw(reach)
    if draw(st.booleans()):
        options["q_start"] = draw(st.integers(-3, 14))
    splits, Br, Bc = (draw(st.integers(1, n)) for n in (6, 5, 5))
    O, L = split_kv_attention(Q, K, V, splits, Br, Bc, return_lse=True, **options)
    expected_O, expected_L = oracle(Q, K, V, **options)
    close(O, expected_O)
    close(L, expected_L)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("splits", [2, 7, 16])
def test_a_split_in_half_types_errs_at_most_twice_as_much_as_standard(dtype, splits):
    Q, K, V = inputs(1, 500, H=8, Hkv=2, d=64, dv=64, dtype=dtype)
    exact = oracle(Q, K, V)[0]
    split = (split_kv_attention(Q, K, V, splits).double() - exact).abs().max()
    standard = (standard_attention(Q, K, V).double() - exact).abs().max()
    assert split <= 2 * standard


def test_parts_run_side_by_side_so_that_launches_fall_with_the_splits():
    Q, K, V = inputs(1, 1024)
    loop = count_launches(lambda: flash_attention_forward(Q, K, V, 16, 16))
    split = count_launches(lambda: split_kv_attention(Q, K, V, 16, 16, 16))
    assert split < loop / 8


@pytest.mark.parametrize("splits", [0, -2, 2.0, True, "4", None])
def test_wrong_splits_are_refused(splits):
    with pytest.raises(ValueError, match="splits must be .* got"):
        split_kv_attention(*inputs(1, 8), splits)


def test_fewer_key_value_heads_divide_the_default_of_heads(monkeypatch, capsys):
    options = "--seq-len 64 --kv-heads 2 --splits 2 --device cpu"
    monkeypatch.setattr(sys, "argv", ["flash_decoding.py", *options.split()])
    assert flash_decoding.main() == 0
    assert "1x8x1x64 1x2x64x64 1x2x64x64" in capsys.readouterr().out


# The cache


@pytest.mark.parametrize("Hkv", [4, 2, 1])
@pytest.mark.parametrize("chunk", [1, 3, 7, 20])
def test_a_cache_filled_step_by_step_gives_what_one_full_pass_gives(Hkv, chunk):
    Q, K, V = inputs(11, 11, Hkv=Hkv)
    close(decode(Q, K, V, chunk, 4, 4), flash_attention_forward(Q, K, V, causal=True))
    close(decode(Q, K, V, chunk, 4, 4), oracle(Q, K, V, causal=True)[0])


def test_a_prompt_and_then_single_tokens_give_what_one_full_pass_gives():
    Q, K, V = inputs(9, 9)
    cache, O = KVCache(2, 2, 16, 8, 5, dtype=torch.float64), []
    for rows in (slice(0, 6), slice(6, 7), slice(7, 9)):
        K_all, V_all = cache.append(K[:, :, rows], V[:, :, rows])
        O.append(split_kv_attention(Q[:, :, rows], K_all, V_all, 3, causal=True))
    assert cache.length == 9 and torch.equal(cache.K, K) and torch.equal(cache.V, V)
    close(torch.cat(O, dim=-2), oracle(Q, K, V, causal=True)[0])


def test_nan_in_the_unused_end_of_the_buffers_changes_nothing():
    Q, K, V = inputs(2, 5)
    cache = KVCache(2, 2, 13, 8, 5, dtype=torch.float64)
    cache.K_buffer.fill_(math.nan)
    cache.V_buffer.fill_(math.nan)
    cache.append(K, V)
    expected = oracle(Q, K, V, causal=True)[0]
    whole = cache.K_buffer, cache.V_buffer
    used = torch.arange(13) < cache.length
    close(flash_attention_forward(Q, cache.K, cache.V, 4, 4, causal=True), expected)
    close(flash_attention_forward(Q, *whole, 4, 4, causal=True, q_start=3), expected)
    close(split_kv_attention(Q, *whole, 2, 4, 4, causal=True, q_start=3), expected)
    for attend in (flash_attention_forward, standard_attention):
        close(attend(Q, *whole, attn_mask=used), oracle(Q, K, V)[0])


def test_the_cache_hands_out_views_of_buffers_that_never_move():
    cache = KVCache(1, 2, 4, 8)
    before = cache.K_buffer.data_ptr(), cache.V_buffer.data_ptr()
    for _ in range(4):
        K, V = cache.append(torch.ones(1, 2, 1, 8), torch.ones(1, 2, 1, 8))
    assert (K.data_ptr(), V.data_ptr()) == before and K.shape == (1, 2, 4, 8)


@pytest.mark.parametrize(
    "K_new, V_new, error, words",
    [
        ((1, 2, 5, 8), (1, 2, 5, 6), ValueError, ["N_max 4", "0 + 5"]),
        ((1, 1, 1, 8), (1, 2, 1, 6), ValueError, ["K_new", "(1, 1, 1, 8)"]),
        ((1, 2, 2, 8), (1, 2, 1, 6), ValueError, ["V_new", "(1, 2, 1, 6)"]),
        ((1, 2, 1, 8), (1, 2, 1, 8), ValueError, ["V_new", "(1, 2, 1, 8)"]),
    ],
)
def test_the_cache_refuses_what_does_not_fit_and_stays_as_it_was(K_new, V_new, error, words):
    cache = KVCache(1, 2, 4, 8, 6)
    with pytest.raises(error) as raised:
        cache.append(torch.zeros(K_new), torch.zeros(V_new))
    assert all(word in str(raised.value) for word in words) and cache.length == 0, raised.value


def test_the_cache_refuses_another_dtype_or_device():
    cache = KVCache(1, 2, 4, 8)
    new = torch.zeros(1, 2, 1, 8)
    with pytest.raises(TypeError, match="K_new .*float32, got torch.float16"):
        cache.append(new.half(), new)
    with pytest.raises(ValueError, match="V_new .* cpu, got meta"):
        cache.append(new, new.to("meta"))


def test_repeat_shows_that_parts_of_a_fixed_size_keep_their_bits(tmp_path):
    file = tmp_path / "rows.json"
    done = subprocess.run([sys.executable, flash_decoding.__file__, "--mode", "repeat", "--device",
                           "cpu", "--json", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    fixed = [r for r in rows if r["rule"] == "keys of a part"]
    assert all(r["parts_same_bits"] and r["parts_kept"] == r["splits"] for r in fixed)
    assert any(r["splits"] != rows[0]["splits"] for r in rows if r["rule"] == "number of parts")
