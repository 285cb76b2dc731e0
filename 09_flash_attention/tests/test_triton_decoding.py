"""The Triton kernels of decoding, run by Triton's interpreter, against float64 and bit by bit."""

import json
import math
import os
import re
import sys
from functools import partial

import flash_decoding
import flash_pages
import pytest
import torch
from flash_attention import standard_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.cases import Case
from oracle import oracle
from test_decoding import inputs as problem
from test_pages import REFUSED, expected, in_pages, refused_call, sequences

os.environ["TRITON_INTERPRET"] = "1"  # Triton looks as it loads: see conftest.py
try:
    import flash_triton_decoding
except ImportError as missing:  # no package for this platform, or an old one
    pytest.skip(str(missing), allow_module_level=True)
finally:
    del os.environ["TRITON_INTERPRET"]

import triton
from flash_triton_decoding import paged_attention_triton, split_kv_attention_triton
from lab import triton_tools

pytestmark = pytest.mark.usefixtures("interpreted")
SMALL = (16, 32, 4, 1)  # a tile of 16 x 32: a part of 128 keys has four
inputs = partial(problem, dtype=torch.float32)
sequences = partial(sequences, dtype=torch.float32)


def hold(O, L, wanted_O, wanted_L, standard=None):
    """Hold O and L to float64: float32 to 1e-5, half types by the 2x rule."""
    assert torch.equal(L == -math.inf, wanted_L == -math.inf)
    torch.testing.assert_close(L.double(), wanted_L, rtol=0, atol=1e-5)
    error = (O.double() - wanted_O).abs().max().item()
    assert error <= (1e-5 if standard is None else
                     2 * (standard.double() - wanted_O).abs().max().item())


def check(Q, K, V, split=128, tile=SMALL, **options):
    found = split_kv_attention_triton(Q, K, V, split=split, tile=tile, return_lse=True, **options)
    assert found[0].dtype == Q.dtype and found[0].shape == (*Q.shape[:-1], V.shape[-1])
    assert found[1].dtype == torch.float32 and found[1].shape == Q.shape[:-1]
    half = Q.dtype != torch.float32
    hold(*found, *oracle(Q, K, V, **options), standard_attention(Q, K, V, **options) if half else
         None)


# One cache for all


@pytest.mark.parametrize("Nq, Nk, H, Hkv", [
    (1, 260, 2, 1), (3, 257, 2, 2), (1, 5, 3, 1), (2, 128, 9, 1), (17, 130, 1, 1)])
@pytest.mark.parametrize("options", [
    {}, {"causal": True}, {"window": (100, 0)}, {"window": (2, None)}, {"window": (None, 1)},
    {"causal": True, "q_start": 40}])
def test_lengths_groups_and_what_is_seen(Nq, Nk, H, Hkv, options):
    check(*inputs(Nq, Nk, H, Hkv), **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d, dv", [(64, 64), (31, 72), (256, 128)])
def test_half_types_and_head_sizes(dtype, d, dv):
    check(*inputs(2, 200, 2, 1, d=d, dv=dv, dtype=dtype), causal=True)


@pytest.mark.parametrize("lead", [(), (3,), (2, 2), (2, 1, 2)])
def test_any_number_of_leading_dimensions(lead):
    generator = torch.Generator().manual_seed(0)
    check(*(torch.randn(*lead, N, 8, generator=generator) for N in (2, 150, 150)), causal=True)


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.5, 1e-40])
def test_any_scale(scale):
    check(*inputs(2, 150), scale=scale, causal=True)


def test_scores_whose_exp_overflows():
    Q, K, V = inputs(1, 300)
    O = split_kv_attention_triton(1000 * Q, K, V, split=128)
    # A score of 10000 in float32 is off by 1e-3, and so is each weight.
    torch.testing.assert_close(O.double(), oracle(1000 * Q, K, V)[0], rtol=0, atol=1e-2)


@pytest.mark.parametrize("Nq, Nk", [(5, 3), (2, 0), (0, 3)])
def test_rows_that_see_no_key_give_zero(Nq, Nk):
    Q, K, V = inputs(Nq, Nk)
    O, L = split_kv_attention_triton(Q, K, V, causal=True, return_lse=True)
    blind = max(0, Nq - Nk)
    assert (O[:, :, :blind] == 0).all() and (L[:, :, :blind] == -math.inf).all()
    assert O.isfinite().all() and L[:, :, blind:].isfinite().all()


@pytest.mark.parametrize("window", [None, (40, 0)])
@pytest.mark.parametrize("outside", [0.0, math.nan])
def test_views_of_longer_buffers_on_a_chip_that_loads_anything_outside(
        monkeypatch, outside, window):
    monkeypatch.setattr(triton_tools, "OUTSIDE", triton.language.constexpr(outside))
    Q, K, V = inputs(2, 150, 2, 1)
    buffers = [torch.full((2, 1, 400, 40), math.nan) for _ in "KV"]
    views = [b[:, :, 7:157, 3 : 3 + x.shape[3]] for b, x in zip(buffers, (K, V))]
    for view, x in zip(views, (K, V)):
        view.copy_(x)
    check(Q, *views, causal=True, window=window)
    heads_inside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (Q, K, V)]
    check(*heads_inside, causal=True, window=window)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_no_query_sees_may_be_nan():
    Q, K, V = inputs(2, 300)
    wanted = oracle(Q, K, V, window=(70, 20), q_start=200)
    for x in (K, V):
        x[:, :, :130] = x[:, :, 222:] = math.nan
    hold(*split_kv_attention_triton(Q, K, V, window=(70, 20), q_start=200, split=128, tile=SMALL,
                                    return_lse=True), *wanted)


# Pages


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_any_lengths_pages_and_windows_give_what_the_oracle_gives(data):
    draw = data.draw
    lengths = draw(st.lists(st.integers(0, 200), min_size=1, max_size=2))
    Nq, Hkv, G, page = draw(st.integers(1, 5)), *(draw(st.sampled_from(x)) for x in (
        (1, 2), (1, 3), (16, 48, 64)))
    Q, Ks, Vs = sequences(lengths, Nq, Hkv * G, Hkv, seed=draw(st.integers(0, 99)))
    options, first = {"scale": draw(st.sampled_from([None, 0.5]))}, None
    if draw(st.booleans()):
        left = draw(st.integers(0, 200))
        options["window"] = left, draw(st.sampled_from([None, 0, 3]))
        first = [N - Nq - left for N in lengths]
    found = paged_attention_triton(Q, *in_pages(Ks, Vs, page, first), split=128, tile=SMALL,
                                   return_lse=True, **options)
    hold(*found, *expected(Q, Ks, Vs, **options))


@pytest.mark.parametrize("page", [64, 128, 192])
@pytest.mark.parametrize("window", [None, (100, 0)])
def test_decoding_through_pages_has_the_bits_of_decoding_without(page, window):
    """The launcher's Bc is 64 in the interpreter, and divides these pages."""
    Q, Ks, Vs = sequences([300, 5, 256], 2, H=2, Hkv=1, d=64)
    found = paged_attention_triton(Q, *in_pages(Ks, Vs, page), return_lse=True, window=window)
    for b, (K, V) in enumerate(zip(Ks, Vs)):
        without = split_kv_attention_triton(Q[b : b + 1], K[None], V[None], causal=True,
                                            return_lse=True, window=window)
        for x, y in zip(found, without):
            assert torch.equal(x[b : b + 1], y)


def test_a_row_has_the_same_bits_in_any_batch():
    """Beside 1500 keys, 300 have four empty parts more, and 5 have five."""
    Q, Ks, Vs = sequences([300, 5, 1500], H=2, Hkv=1, d=64)
    for batch in ([0, 1, 2], [1, 0]):
        found = paged_attention_triton(
            Q[batch], *in_pages([Ks[b] for b in batch], [Vs[b] for b in batch], 64))
        for b, O in zip(batch, found):
            alone = in_pages(Ks[b : b + 1], Vs[b : b + 1], 64, seed=9)
            assert torch.equal(O, paged_attention_triton(Q[b : b + 1], *alone)[0])


@pytest.mark.parametrize("outside", [0.0, math.nan])
def test_pages_on_a_chip_that_loads_anything_outside(monkeypatch, outside):
    monkeypatch.setattr(triton_tools, "OUTSIDE", triton.language.constexpr(outside))
    Q, Ks, Vs = sequences([140, 33], 2, d=31, dv=40)
    found = paged_attention_triton(Q, *in_pages(Ks, Vs, 48), split=128, return_lse=True)
    hold(*found, *expected(Q, Ks, Vs))


def test_a_table_and_pages_that_are_views_give_the_same():
    Q, Ks, Vs = sequences([100, 40], dv=8)
    K, V, table, lengths = in_pages(Ks, Vs, 16)
    plain = paged_attention_triton(Q, K, V, table, lengths)
    both = torch.stack([K, V], 1)
    for kind in (torch.int32, torch.int64):
        views = table.to(kind).mT.contiguous().mT, lengths.to(kind).repeat_interleave(2)[::2]
        assert torch.equal(plain, paged_attention_triton(Q, both[:, 0], both[:, 1], *views))


def test_a_page_may_lie_beyond_2_to_the_31_elements():
    Q, [K], [V] = sequences([16], 1, 1, 1, d=256, dv=256, dtype=torch.float16)
    last = 2**31 // (16 * 256) + 1
    pages = torch.empty(last + 1, 16, 1, 256, dtype=torch.float16)  # only what is written is there
    tables = []
    for n, x in ((last, K), (last - 1, V)):
        pages[n] = x.transpose(0, 1)
        tables.append(torch.tensor([[n]], dtype=torch.int32))
    found = paged_attention_triton(Q, pages, pages, tables[0], torch.tensor([16]), return_lse=True)
    hold(*found, *oracle(Q, K[None], K[None]), standard_attention(Q, K[None], K[None]))


# What is launched


class Recorder:
    """Stands in the place of a kernel, and keeps what it is called with by name."""

    def __init__(self, kernel, refuse=lambda given: False):
        self.kernel, self.refuse, self.seen = kernel, refuse, []

    def __getitem__(self, grid):
        def launch(*given, **options):
            self.seen.append({**dict(zip(self.kernel.arg_names, given)), "grid": grid[0]})
            if self.refuse(self.seen[-1]):
                raise ValueError("ub overflow, requires 2 bits while 1 bits available")
            return self.kernel[grid](*given, **options)
        return launch


def test_the_keys_are_split_and_only_parts_in_the_window_are_taken(monkeypatch):
    recorder = Recorder(flash_triton_decoding.split_kernel)
    monkeypatch.setattr(flash_triton_decoding, "split_kernel", recorder)
    Q, K, V = inputs(2, 1000, 2, 1)
    for window, splits in ((None, 4), ((100, 0), 2)):
        check(Q, K, V, split=256, causal=True, window=window)
        seen = recorder.seen.pop()
        assert seen["splits"] == splits and seen["blocks"] == 2 * splits
        assert seen["grid"] == min(seen["blocks"], triton_tools.programs(Q.device))


def test_where_a_tile_does_not_fit_the_next_smaller_is_taken(monkeypatch):
    recorder = Recorder(flash_triton_decoding.split_kernel,
                        lambda given: given["Br"] * given["Bc"] > 16 * 64)
    monkeypatch.setattr(flash_triton_decoding, "split_kernel", recorder)
    monkeypatch.setattr(triton_tools, "fitting", {})
    monkeypatch.setattr(flash_triton_decoding, "platform_of", lambda device: "npu")
    for _ in range(2):
        check(*inputs(33, 130, 1, 1), tile=None, causal=True)
    assert [(s["Br"], s["Bc"]) for s in recorder.seen] == [
        (64, 128), (64, 64), (32, 64), (32, 32), (32, 32)]


def test_on_cuda_a_program_takes_one_block(monkeypatch):
    for name, value in (("platform_of", "hopper"), ("programs", 2**31 - 1)):
        monkeypatch.setattr(flash_triton_decoding, name, lambda device, value=value: value)
    check(*inputs(2, 300), tile=None, causal=True, window=(90, 0))
    Q, Ks, Vs = sequences([140, 33], 2, d=31, dv=40)
    hold(*paged_attention_triton(Q, *in_pages(Ks, Vs, 48), return_lse=True), *expected(Q, Ks, Vs))


@pytest.mark.parametrize("platform", ["npu", "hopper", "cuda", "interpreter"])
def test_each_head_size_has_a_tile_that_divides_a_part(platform):
    for dtype in triton_tools.DTYPES:
        for d in range(1, 257):
            Br, Bc, *_ = flash_triton_decoding.tile_of(platform, dtype, d, 64, False)
            assert 128 % Bc == 0 and Br >= 16


# Errors


@pytest.mark.parametrize("change, error, said", REFUSED)
def test_wrong_input_is_refused_as_by_the_plain_version(change, error, said):
    with pytest.raises(error) as raised:
        paged_attention_triton(**refused_call(change))
    assert said in str(raised.value)


@pytest.mark.parametrize("options, said", [
    ({"split": 100}, "split must be a power of 2"), ({"split": 64}, "from 128 to 4096"),
    ({"split": 256.0}, "split must be"), ({"tile": (16, 256, 4, 1), "split": 128}, "at most split"),
    ({"tile": (8, 16, 4, 1)}, "tile must be None or"), ({"scale": math.inf}, "scale must be")])
def test_wrong_options_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        split_kv_attention_triton(*inputs(1, 20), **options)


def test_what_the_kernels_do_not_take_is_refused():
    Q, K, V = inputs(1, 20)
    with pytest.raises(TypeError, match="float64"):
        split_kv_attention_triton(Q.double(), K.double(), V.double())
    with pytest.raises(ValueError, match="V wants a gradient"):
        split_kv_attention_triton(Q, K, V.requires_grad_())
    Q, Ks, Vs = sequences([20])
    with pytest.raises(ValueError, match="multiple of 16 keys a page, got 8"):
        paged_attention_triton(Q, *in_pages(Ks, Vs, 8))
    with pytest.raises(ValueError, match="at most 256, got 257"):
        paged_attention_triton(torch.ones(1, 1, 1, 257), *(torch.ones(1, 16, 1, 257),) * 2,
                               torch.zeros(1, 1).int(), torch.ones(1).int())


# The rows of the lessons


@pytest.mark.parametrize("lesson, names", [
    (flash_decoding, ["split 4", "triton split"]),
    (flash_pages, ["pages of 16", "pages of 100", "triton, pages of 16"])])
def test_verify_on_a_cpu_has_rows_of_the_kernels_where_they_are_asked_for(
        lesson, names, tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    options = f"--mode verify --seq-len 300 --heads 2 --kv-heads 1 --device cpu --json {file}"
    more = ["--splits", "4"] if lesson is flash_decoding else []
    monkeypatch.setattr(sys, "argv", [lesson.__file__, *options.split(), *more])
    assert lesson.main() == 0
    rows = json.loads(file.read_text())["rows"]
    assert [r["name"] for r in rows if "cache" not in r["name"]] == names
    assert all(r["passed"] for r in rows)


def test_a_case_that_the_kernels_do_not_take_is_said_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flash_decoding.py", *"--seq-len 16 --dtype float64 --device "
                                      "cpu --splits 2".split()])
    assert flash_decoding.main() == 0
    said = capsys.readouterr().out
    assert "triton: the kernels take no float64 and no head size above 256" in said
    assert not re.search(r"\| triton", said)


def test_off_the_cpu_memory_and_speed_have_a_row_of_the_kernels():
    found = flash_decoding.candidates(Case(1, heads=2, Nk=600), [4])
    names = [c.name for c in found]
    assert names[-1] == "triton split" and names[:-1] == [
        c.name for c in flash_decoding.measurable(found, "cpu")]
    assert names == [c.name for c in flash_decoding.measurable(found, "cuda:0")]
    # O and L of 2 rows, and O, m, l of each of three parts, all in float32
    assert found[-1].theory_bytes == 2 * (64 + 1) * 4 + 2 * 3 * (64 + 2) * 4
