"""Keys and values in pages: the cache that hands them out, and attention through the table."""

import json
import math
import sys

import flash_pages
import pytest
import torch
from common.memory import measure_peak
from flash_attention import flash_attention_forward, standard_attention
from flash_decoding import KVCache
from flash_pages import PagedCache, paged_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle


def sequences(lengths, Nq=1, H=4, Hkv=2, d=8, dv=5, dtype=torch.float64, seed=0):
    """Return Q [B, H, Nq, d] and a list of K [Hkv, N, d] and of V [Hkv, N, dv]."""
    generator = torch.Generator().manual_seed(seed)
    random = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
              for N in lengths for shape in ((Hkv, N, d), (Hkv, N, dv))]
    Q = torch.randn(len(lengths), H, Nq, d, generator=generator, dtype=torch.float64).to(dtype)
    return Q, random[::2], random[1::2]


def in_pages(Ks, Vs, page, first=None, seed=0):
    """Return pages of which all but the tokens of the sequences hold NaN, their table, lengths.

    The pages lie in random order; entries of the table that no token needs are no page's number,
    nor are those before the page of token `first[b]`.
    """
    lengths = [K.shape[1] for K in Ks]
    counts = [-(-N // page) for N in lengths]
    P, most = sum(counts) + 2, max(counts, default=0) + 1
    order = torch.randperm(P, generator=torch.Generator().manual_seed(seed)).tolist()
    pages = [torch.full((P, page, *x[0].shape[::2]), math.nan, dtype=x[0].dtype) for x in (Ks, Vs)]
    table = torch.full((len(Ks), most), -1).index_fill(1, torch.tensor([most - 1]), 10**9)
    for b, (K, V, count) in enumerate(zip(Ks, Vs, counts)):
        unseen = max(0, first[b]) // page if first else 0
        for n in range(unseen, count):
            table[b, n] = order.pop()
            for pool, x in zip(pages, (K, V)):
                rows = x[:, n * page : (n + 1) * page].transpose(0, 1)
                pool[table[b, n], : len(rows)] = rows
    return *pages, table, torch.tensor(lengths, dtype=torch.int32)


def expected(Q, Ks, Vs, **options):
    """Return the oracle's O and L of each sequence by itself."""
    found = [oracle(Q[b : b + 1], K[None], V[None], causal=True, **options)
             for b, (K, V) in enumerate(zip(Ks, Vs))]
    return [torch.cat(x) for x in zip(*found)]


# Attention through the table


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.data())
def test_any_lengths_pages_and_windows_give_what_the_oracle_gives(data):
    draw = data.draw
    lengths = draw(st.lists(st.integers(0, 14), min_size=1, max_size=3))
    Nq, Hkv, G, page = (draw(st.integers(*s)) for s in ((1, 4), (1, 2), (1, 2), (1, 6)))
    Q, Ks, Vs = sequences(lengths, Nq, Hkv * G, Hkv, seed=draw(st.integers(0, 99)))
    options = {"scale": draw(st.sampled_from([None, 0.5]))}
    first = None
    if draw(st.booleans()):
        left = draw(st.integers(0, 6))
        options["window"] = left, draw(st.sampled_from([None, 0, 3]))
        first = [N - Nq - left for N in lengths]
    O, L = paged_attention(Q, *in_pages(Ks, Vs, page, first), return_lse=True, **options)
    for found, wanted in zip((O, L), expected(Q, Ks, Vs, **options)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("Nq", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_decoding_through_pages_has_the_bits_of_decoding_without(dtype, Nq):
    lengths, page = [70, 5, 64, 33], 16
    Q, Ks, Vs = sequences(lengths, Nq, d=64, dv=32, dtype=dtype)
    found = paged_attention(Q, *in_pages(Ks, Vs, page), return_lse=True)
    for b, (K, V) in enumerate(zip(Ks, Vs)):
        cache = KVCache(1, 2, 100, 64, 32, dtype=dtype)
        without = flash_attention_forward(Q[b : b + 1], *cache.append(K[None], V[None]), 64, page,
                                          causal=True, return_lse=True)
        for x, y in zip(found, without):
            assert torch.equal(x[b : b + 1], y)


def test_a_sequence_has_the_same_bits_alone_and_in_company():
    Q, Ks, Vs = sequences([70, 300, 1], d=64, dtype=torch.float32)
    together = paged_attention(Q, *in_pages(Ks, Vs, 16))
    for b in range(3):
        alone = paged_attention(Q[b : b + 1], *in_pages(Ks[b : b + 1], Vs[b : b + 1], 16, seed=b))
        assert torch.equal(together[b : b + 1], alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_err_at_most_twice_as_much_as_standard(dtype):
    Q, Ks, Vs = sequences([500], 2, H=8, d=64, dv=64, dtype=dtype)
    exact = expected(Q, Ks, Vs)[0]
    O = paged_attention(Q, *in_pages(Ks, Vs, 64))
    standard = standard_attention(Q, Ks[0][None], Vs[0][None], causal=True)
    assert O.dtype == dtype
    assert (O.double() - exact).abs().max() <= 2 * (standard.double() - exact).abs().max()


def test_where_more_queries_stand_than_tokens_the_first_see_none():
    Q, Ks, Vs = sequences([2, 0], 5)
    O, L = paged_attention(Q, *in_pages(Ks, Vs, 4), return_lse=True)
    assert (O[0, :, :3] == 0).all() and (L[0, :, :3] == -math.inf).all()
    assert L[0, :, 3:].isfinite().all() and (O[1] == 0).all() and (L[1] == -math.inf).all()


def test_pages_that_are_views_and_tables_of_either_int_give_the_same():
    Q, Ks, Vs = sequences([9, 13], dv=8)
    K, V, table, lengths = in_pages(Ks, Vs, 4)
    both = torch.stack([K, V], 1)  # as some systems keep them
    for kind in (torch.int32, torch.int64):
        arguments = both[:, 0], both[:, 1], table.to(kind), lengths.to(kind)
        assert torch.equal(paged_attention(Q, *arguments), paged_attention(Q, K, V, table, lengths))


@pytest.mark.parametrize("B, Nq, H, Hkv", [(0, 1, 2, 2), (2, 0, 2, 2), (2, 1, 0, 0)])
def test_empty_inputs_give_an_empty_result(B, Nq, H, Hkv):
    Q, K = torch.zeros(B, H, Nq, 8), torch.zeros(3, 4, Hkv, 8)
    table, lengths = torch.zeros(B, 2, dtype=torch.int64), torch.full((B,), 5)
    O, L = paged_attention(Q, K, K, table, lengths, return_lse=True)
    assert O.shape == Q.shape and L.shape == Q.shape[:-1]


def test_beside_the_result_stands_one_tile_whatever_the_length():
    peaks = []
    for N in (256, 4096):
        Q, Ks, Vs = sequences([N], d=64, dv=64, dtype=torch.float16)
        arguments = in_pages(Ks, Vs, 32)
        paged_attention(Q, *arguments)
        peaks.append(measure_peak(lambda a=arguments, q=Q: paged_attention(q, *a), Q.device)[1])
    page_in_float32 = 2 * 2 * 32 * 64 * 4
    table = 2 * 8 * (4096 // 32 + 1) * 4  # read to the host and looked through
    assert peaks[1] - peaks[0] < table and peaks[0] < 4 * page_in_float32


REFUSED = [
    (dict(Q=torch.zeros(2, 4, 8)), ValueError, "Q must be [B, H, Nq, d]"),
    (dict(Q=torch.zeros(2, 3, 1, 8)), ValueError, "number of heads that divides Q's"),
    (dict(Q=torch.zeros(2, 4, 1, 7)), ValueError, "same last dimension"),
    (dict(Q=torch.zeros(2, 4, 1, 8).half()), TypeError, "K_pages must be a tensor of torch.f"),
    (dict(Q=torch.zeros(2, 4, 1, 8).int()), TypeError, "Q must be a float16"),
    (dict(Q=torch.zeros(2, 4, 1, 8, requires_grad=True)), ValueError, "Q wants a gradient"),
    (dict(K_pages=torch.zeros(5, 16, 2, 8, device="meta")), ValueError, "be on Q's device cpu"),
    (dict(V_pages=torch.zeros(5, 32, 2, 8)), ValueError, "same number of pages"),
    (dict(block_table=torch.zeros(2, 3)), TypeError, "block_table must be a tensor of torch.int32"),
    (dict(block_table=[[0]]), TypeError, "block_table must be a tensor of torch.int32 or"),
    (dict(block_table=torch.zeros(1, 3).int()), ValueError, "block_table must be [B, pages]"),
    (dict(lengths=torch.tensor([[1, 2]])), ValueError, "lengths [B] with Q's B"),
    (dict(lengths=torch.tensor([4, 49])), ValueError, "from 0 to 48, the keys of 3 pages of 16, "
     "got 49 for batch entry 1"),
    (dict(lengths=torch.tensor([-1, 4])), ValueError, "got -1 for batch entry 0"),
    (dict(block_table=torch.tensor([[0, 5, 0], [0, 0, 0]])), ValueError,
     "from 0 to 4 where keys are seen, got 5 for page 1 of batch entry 0"),
    (dict(block_table=torch.tensor([[0, 1, 0], [-1, 0, 0]])), ValueError, "got -1 for page 0"),
    (dict(window=(-1, 0)), ValueError, "window must be"),
    (dict(scale=math.nan), ValueError, "scale must be"),
]


def refused_call(change):
    """Return arguments of attention through a table, one of them changed."""
    return {**dict(Q=torch.zeros(2, 4, 1, 8), K_pages=torch.zeros(5, 16, 2, 8),
                   V_pages=torch.zeros(5, 16, 2, 8), block_table=torch.zeros(2, 3).int(),
                   lengths=torch.tensor([20, 17])), **change}


@pytest.mark.parametrize("change, error, said", REFUSED)
def test_wrong_input_is_refused_and_named(change, error, said):
    with pytest.raises(error) as raised:
        paged_attention(**refused_call(change))
    assert said in str(raised.value)


# The cache


def test_sequences_that_grow_in_turn_give_what_one_full_pass_gives():
    Q, Ks, Vs = sequences([11, 23, 4], 2)
    cache = PagedCache(12, 4, 2, 8, 5, dtype=torch.float64)
    cache.K_pages.fill_(math.nan)
    cache.V_pages.fill_(math.nan)
    for j in range(0, 23, 3):
        for b, (K, V) in enumerate(zip(Ks, Vs)):
            cache.append(b, K[:, j : j + 3], V[:, j : j + 3])
    assert cache.tables[0] != sorted(cache.tables[0])  # they lie between each other
    O = paged_attention(Q, cache.K_pages, cache.V_pages, *cache.block_table([2, 0, 1])).roll(-1, 0)
    Q = Q.roll(-1, 0)
    wanted = expected(Q, [Ks[b] for b in (0, 1, 2)], [Vs[b] for b in (0, 1, 2)])[0]
    torch.testing.assert_close(O, wanted, rtol=0, atol=1e-12)


def test_a_fork_shares_full_pages_copies_the_last_and_writes_to_its_own():
    _, [K], [V] = sequences([10])
    cache = PagedCache(6, 4, 2, 8, 5, dtype=torch.float64)
    cache.append("a", K, V)
    cache.fork("a", "b")
    assert cache.tables["a"][:2] == cache.tables["b"][:2] and cache.lengths["b"] == 10
    assert cache.tables["a"][2] != cache.tables["b"][2] and len(cache.free) == 2
    cache.append("b", 100 + K[:, :3], V[:, :3])
    a = cache.K_pages[cache.tables["a"]].flatten(0, 1)[:10]
    b = cache.K_pages[cache.tables["b"]].flatten(0, 1)[:13]
    assert torch.equal(a, K.transpose(0, 1))
    assert torch.equal(b, torch.cat([K, 100 + K[:, :3]], 1).transpose(0, 1))


def test_a_page_is_free_again_when_its_last_owner_is_gone():
    _, [K], [V] = sequences([8])
    cache = PagedCache(3, 4, 2, 8, 5, dtype=torch.float64)
    cache.append("a", K, V)
    cache.fork("a", "b")
    cache.release("a")
    assert len(cache.free) == 1 and "a" not in cache.lengths
    cache.release("b")
    assert sorted(cache.free) == [0, 1, 2] and cache.owners == [0, 0, 0]
    assert cache.block_table([])[0].shape == (0, 0)


def test_the_cache_refuses_what_does_not_fit_and_stays_as_it_was():
    cache = PagedCache(3, 4, 2, 8)
    token = torch.zeros(2, 1, 8)
    cache.append("a", token, token)
    for wrong, error, said in (
            ((torch.zeros(2, 12, 8),) * 2, ValueError,
             "fit into 2 free pages of 4 tokens, got tokens for 3"),
            ((torch.zeros(1, 1, 8),) * 2, ValueError, r"K_new must be \[2, n, 8\]"),
            ((torch.zeros(8),) * 2, ValueError, r"K_new must be \[2, n, 8\]"),
            ((token, torch.zeros(2, 2, 8)), ValueError, "V_new .*one n for both"),
            ((token.half(), token), TypeError, "K_new must have the cache's torch.float32"),
            ((token, token.to("meta")), ValueError, "V_new must be on cpu, got meta")):
        with pytest.raises(error, match=said):
            cache.append("b", *wrong)
        assert list(cache.tables) == ["a"] and len(cache.free) == 2
    with pytest.raises(ValueError, match="new must be a sequence that is not there yet"):
        cache.fork("a", "a")
    cache.append("b", torch.zeros(2, 8, 8), torch.zeros(2, 8, 8))
    with pytest.raises(ValueError, match="new needs a free page"):
        cache.fork("a", "c")
    assert list(cache.tables) == ["a", "b"] and cache.owners == [1, 1, 1]


def test_the_lesson_verifies_pages_and_shows_what_they_save(monkeypatch, capsys, tmp_path):
    file = tmp_path / "rows.json"
    options = f"--seq-len 256 --device cpu --json {file}"
    monkeypatch.setattr(sys, "argv", ["flash_pages.py", *options.split()])
    assert flash_pages.main() == 0
    assert "4x8x1x64 4x2x256x64 4x2x256x64" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert [r["passed"] for r in rows if r["tool"] == "verify"] == [True, True]
    whole, *pages, shared = [r for r in rows if r["tool"] == "memory"]
    a_token = 2 * 2 * 64 * 4
    assert whole["reserved_bytes"] == 16 * 256 * a_token
    assert len({r["needed_bytes"] for r in (whole, *pages)}) == 1
    for row, page in zip(pages, (256, 64, 16)):
        assert 0 <= row["reserved_bytes"] - row["needed_bytes"] < 16 * page * a_token
    assert shared["reserved_bytes"] < pages[-1]["reserved_bytes"] and shared["fit"] > whole["fit"]
