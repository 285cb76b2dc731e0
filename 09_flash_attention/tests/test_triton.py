"""The Triton kernel, run by Triton's interpreter, means what the tiled forward means."""

import contextlib
import gc
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import flash_attention
import flash_backward
from common.memory import measure_peak
from lab.cases import Case
from lab.formulas import backward_bytes, forward_bytes
from lab.served import measurable
from flash_attention import flash_attention_forward, standard_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle
from test_forward import inputs

try:
    import flash_triton
except ImportError as missing:  # no package for this platform, or an old one
    pytest.skip(str(missing), allow_module_level=True)

import triton
from lab import triton_tools
from flash_triton import flash_attention_triton, tile_of
from lab.triton_tools import padded, programs

pytestmark = pytest.mark.usefixtures("interpreted")
FOLDER = Path(flash_triton.__file__).parent
HALF = (torch.float16, torch.bfloat16)
SMALL = (16, 32, 4, 1)  # a tile of 16 x 32: short inputs have several


def check(Q, K, V, tile=SMALL, **options):
    """Hold O and L to the float64 oracle: float32 to 1e-5, half types by the 2x rule."""
    O, L = flash_attention_triton(Q, K, V, tile=tile, return_lse=True, **options)
    expected_O, expected_L = oracle(Q, K, V, **options)
    assert O.dtype == Q.dtype and O.shape == (*Q.shape[:-1], V.shape[-1])
    assert L.dtype == torch.float32 and L.shape == Q.shape[:-1]
    assert torch.equal(L == -math.inf, expected_L == -math.inf)
    torch.testing.assert_close(L.double(), expected_L, rtol=0, atol=1e-5)
    error = (O.double() - expected_O).abs().max().item()
    if Q.dtype == torch.float32:
        assert error < 1e-5
    else:
        standard = standard_attention(Q, K, V, **options).double()
        assert error <= 2 * (standard - expected_O).abs().max().item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [31, 64, 72, 128])
@pytest.mark.parametrize("Nq, Nk", [(1, 39), (13, 50), (65, 65), (70, 33), (64, 64)])
def test_float32_at_any_length_and_head_size(Nq, Nk, d, causal):
    check(*inputs(Nq, Nk, d, dtype=torch.float32, lead=(1,)), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [31, 64, 72, 128])
@pytest.mark.parametrize("dtype", HALF)
def test_half_types_by_the_2x_rule(dtype, d, causal):
    check(*inputs(70, 83, d, dtype=dtype, lead=(1,)), causal=causal)


@pytest.mark.parametrize("d, dv", [(1, 1), (16, 40), (256, 8), (8, 256)])
def test_the_smallest_and_largest_head_sizes_and_v_of_another(d, dv):
    check(*inputs(9, 20, d, dv, dtype=torch.float32, lead=(1,)))


@pytest.mark.parametrize("lead", [(), (2,), (2, 3), (2, 1, 3)])
def test_any_number_of_leading_dimensions(lead):
    check(*inputs(5, 7, lead=lead, dtype=torch.float32), causal=True)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_grouped_heads_read_their_own_key_value_head(kv_heads):
    Q, _, _ = inputs(5, lead=(2, 6), dtype=torch.float32)
    _, K, V = inputs(5, 9, lead=(2, kv_heads), dtype=torch.float32)
    check(Q, K, V, causal=True)


BANDS = [dict(window=(38, 73), q_start=0),  # of 40 queries and 75 keys it hides one pair each side
         dict(causal=True, q_start=0), dict(causal=True, q_start=14), dict(window=(7, 3)),
         dict(causal=True, q_start=-30), dict(window=(None, 40)), dict(window=(0, 0)),
         dict(window=(14, None), q_start=0), dict(causal=True, window=(9, None)),
         dict(causal=True, window=(50, 2)), dict(window=(40, 3), q_start=-10),
         dict(window=(3, 4), q_start=60), dict(window=(2**32, 0), q_start=2**32),
         dict(window=(0, 1), q_start=-(2**32))]


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_causal_windows_and_where_the_queries_stand(band):
    Nq, Nk = (75, 40) if BANDS.index(band) % 2 else (40, 75)
    check(*inputs(Nq, Nk, 16, dtype=torch.float32, lead=(1,)), (16, 16, 4, 1), **band)


def strided(x, kind):
    if kind == "heads inside":  # [B, N, H, d] seen as [B, H, N, d], as most models hold it
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "columns first":
        return x.mT.contiguous().mT
    if kind == "every second":
        return x.repeat_interleave(2, -1)[..., ::2]
    return x[:1, :1].expand(x.shape)


@pytest.mark.parametrize("kind", ["heads inside", "columns first", "every second", "expanded"])
def test_strides_are_honoured(kind):
    Q, K, V = inputs(20, 40, lead=(2, 3), dtype=torch.float32)
    check(*(strided(x, kind) for x in (Q, K, V)))


@pytest.mark.parametrize("scale", [None, 0.3, 2, 0.0, -0.5, 1e-40])
def test_any_scale(scale):
    check(*inputs(20, 40, dtype=torch.float32), scale=scale, causal=True)


@pytest.mark.parametrize("times, shift, allowed", [(1000, 0, 1e-3), (1, 20, 1e-3), (1, 200, 0.1)])
def test_scores_whose_exp_overflows_or_underflows(times, shift, allowed):
    Q, K, V = inputs(20, 40, dtype=torch.float32)
    Q, K = times * Q + shift, K - shift
    O, expected = flash_attention_triton(Q, K, V), oracle(Q, K, V)[0]
    # A score of 3000 in float32 is off by 1e-4, one of -100000 by 1e-2, and so is each weight.
    torch.testing.assert_close(O.double(), expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("d", [31, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_what_lies_beside_a_view_is_not_read_into_it(d, causal):
    views = []
    for x in inputs(40, 70, d, dtype=torch.float32):
        around = torch.full((2, x.shape[1] + 64, 128), math.nan)
        around[:, : x.shape[1], :d] = x
        views.append(around[:, : x.shape[1], :d])
    check(*views, causal=causal)


def test_a_row_that_sees_no_key_is_zero_and_l_is_minus_inf():
    Q, K, V = inputs(50, 20, dtype=torch.float32)
    O, L = flash_attention_triton(Q, K, V, causal=True, return_lse=True, tile=SMALL)
    assert (O[:, :30] == 0).all() and (L[:, :30] == -math.inf).all() and L[:, 30:].isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_key_that_a_query_block_does_not_see_may_be_nan():
    Q, K, V = inputs(32, 32, dtype=torch.float32)
    K[:, 16:], V[:, 16:] = math.nan, math.inf
    O = flash_attention_triton(Q, K, V, causal=True, tile=SMALL)
    torch.testing.assert_close(O[:, :16], flash_attention_triton(
        Q[:, :16], K[:, :16], V[:, :16], causal=True), rtol=0, atol=1e-6)
    assert O[:, 16:].isnan().any()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("band", [dict(causal=True, q_start=0), dict(window=(3, 2), q_start=20)])
def test_keys_beside_those_of_the_queries_may_be_nan(band):
    Q, K, V = inputs(20, 70, dtype=torch.float32)
    seen = slice(max(0, band["q_start"] - 3), band["q_start"] + 20 + 2 * ("window" in band))
    bad = torch.ones(70, dtype=torch.bool)
    bad[seen] = False
    expected = flash_attention_triton(Q, K, V, **band)
    K[:, bad], V[:, bad] = math.nan, math.inf
    assert torch.equal(flash_attention_triton(Q, K, V, **band), expected)


def test_nan_in_a_query_stays_in_its_row():
    Q, K, V = inputs(5, 5, dtype=torch.float32)
    Q[0, 2] = math.nan
    O, L = flash_attention_triton(Q, K, V, return_lse=True)
    assert O[0].isnan().any(-1).tolist() == L[0].isnan().tolist() == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("Nq, Nk, lead", [(0, 3, (2,)), (3, 0, (2,)), (3, 3, (0,)), (3, 3, (2, 0))])
def test_empty_inputs_are_those_of_the_tiled_forward(Nq, Nk, lead):
    Q, K, V = inputs(Nq, Nk, lead=lead, dtype=torch.float32)
    for found, expected in zip(flash_attention_triton(Q, K, V, return_lse=True),
                               flash_attention_forward(Q, K, V, return_lse=True)):
        assert torch.equal(found, expected)


def test_programs_share_the_query_blocks_and_each_is_taken_once():
    calls = inputs(100, 40, lead=(3,), dtype=torch.float32)  # 21 query blocks for 4 programs
    assert programs(torch.device("cpu")) < 21
    check(*calls)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_random_problems(data):
    draw = data.draw
    size = st.integers(1, 50)
    Hkv, G, d, dv = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)])) + (
        draw(st.integers(1, 40)), draw(st.integers(1, 40)))
    Nq, Nk = draw(size), draw(size)
    Q, _, _ = inputs(Nq, Nk, d, lead=(1, Hkv * G), dtype=torch.float32, seed=draw(size))
    _, K, V = inputs(Nq, Nk, d, dv, lead=(1, Hkv), dtype=torch.float32, seed=draw(size))
    tile = draw(st.sampled_from([(16, 16, 4, 1), (16, 64, 4, 1), (64, 16, 4, 1)]))
    window = draw(st.tuples(*[st.none() | st.integers(0, 30)] * 2)) if draw(st.booleans()) else None
    check(Q, K, V, tile, causal=draw(st.booleans()), scale=draw(st.sampled_from([None, 0.5])),
          window=window, q_start=draw(st.none() | st.integers(-20, 60)))


# Errors


@pytest.mark.parametrize("change, error, said", [
    (dict(Q=torch.ones(2, 3, 4, dtype=torch.float64)), TypeError, "K must have Q's dtype"),
    (dict(K=torch.ones(2, 3, 5)), ValueError, "same last dimension"),
    (dict(V=torch.ones(2, 4, 4)), ValueError, "K and V must agree"),
    (dict(scale=math.nan), ValueError, "scale must be"),
    (dict(window=(1, -1)), ValueError, "window must be"),
    (dict(q_start=0.5), ValueError, "q_start must be"),
])
def test_wrong_input_raises_as_in_the_tiled_forward(change, error, said):
    arguments = {**dict.fromkeys("QKV", torch.ones(2, 3, 4)), **change}
    for attend in (flash_attention_triton, flash_attention_forward):
        with pytest.raises(error, match=said):
            attend(**arguments)


def test_float64_and_large_heads_are_refused():
    x = torch.ones(1, 3, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match="float16, bfloat16 or float32.*float64"):
        flash_attention_triton(x, x, x)
    x = torch.ones(1, 3, 257)
    with pytest.raises(ValueError, match="at most 256, got 257"):
        flash_attention_triton(x, x, x)


@pytest.mark.parametrize("tile", ["auto", 16, (16, 16), (16, 16, 4, 1, 1), (48, 16, 4, 1),
                                  (8, 16, 4, 1), (16.0, 16, 4, 1), (True, 16, 4, 1), (16, 0, 4, 1),
                                  (2048, 16, 4, 1), (16, 16, 3, 1), (16, 16, 4, 0)])
def test_a_tile_that_no_chip_takes_is_refused(tile):
    x = torch.ones(1, 3, 4)
    with pytest.raises(ValueError, match="tile must be None or"):
        flash_attention_triton(x, x, x, tile=tile)


# What is launched where


@pytest.mark.parametrize("kind, backends, said", [
    ("cuda", {"nvidia"}, None), ("cuda", {"amd"}, None), ("npu", {"ascend"}, None),
    ("cuda", {"ascend"}, "pip install triton"), ("npu", {"nvidia"}, "triton-ascend==3.2.0"),
    ("cpu", {"nvidia"}, "TRITON_INTERPRET=1"), ("meta", {"nvidia"}, "does not serve it")])
def test_a_device_that_this_triton_does_not_serve_is_named(kind, backends, said, monkeypatch):
    monkeypatch.setattr(triton_tools, "INTERPRETED", False)
    monkeypatch.setattr(triton.backends, "backends", dict.fromkeys(backends))
    found = triton_tools.unserved(SimpleNamespace(type=kind))
    assert found is None if said is None else said in found


@pytest.mark.parametrize("kind, of_the_chip, count, platform", [
    ("npu", {"num_aicore": 20}, 20, "npu"),
    ("cuda", {"max_shared_mem": 232448}, 2**31 - 1, "hopper"),
    ("cuda", {"max_shared_mem": 101376}, 2**31 - 1, "cuda")])
def test_ascend_gets_a_program_for_each_cube_core(kind, of_the_chip, count, platform, monkeypatch):
    monkeypatch.setattr(triton_tools, "INTERPRETED", False)
    monkeypatch.setattr(triton_tools, "properties", lambda device: of_the_chip)
    device = SimpleNamespace(type=kind, index=0)
    assert programs(device) == count and triton_tools.platform_of(device) == platform


def test_the_kernel_is_launched_on_the_inputs_device_and_asks_for_its_properties(monkeypatch):
    utils = SimpleNamespace(get_device_properties=lambda index: f"properties of {index}")
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(
        active=SimpleNamespace(utils=utils)))
    assert triton_tools.properties(SimpleNamespace(index=1)) == "properties of 1"
    monkeypatch.setattr(triton_tools, "accelerator", lambda kind: SimpleNamespace(
        device=lambda device: (kind, device.index)))
    assert triton_tools.current(SimpleNamespace(type="cuda", index=1)) == ("cuda", 1)


def test_ascend_reads_adjacent_columns_in_its_own_tile(monkeypatch):
    launched = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *given, **options: launched.append(given) or real[grid](*given, **options)

    real = flash_triton.flash_attention_kernel
    monkeypatch.setattr(flash_triton, "flash_attention_kernel", Recorder())
    monkeypatch.setattr(triton_tools, "platform_of", lambda device: "npu")
    entered = []
    monkeypatch.setattr(triton_tools, "current",
                        lambda device: entered.append(device) or contextlib.nullcontext())
    Q, K, V = (strided(x, "columns first") for x in inputs(20, 40, dtype=torch.float32))
    check(Q[..., :1], K[..., :1], V, tile=None, causal=True)
    [given] = launched
    assert entered == [Q.device]
    assert [x.stride(-1) for x in given[:3]] == [1, 1, 1]
    Br = real.arg_names.index("Br")
    assert given[Br : Br + 2] == tile_of("npu", torch.float32, 1, 8, True)[:2]


@pytest.mark.parametrize("platform", ["npu", "hopper", "cuda", "interpreter"])
def test_each_head_size_has_a_tile(platform):
    for dtype in flash_triton.DTYPES:
        for d in range(1, 257):
            for causal in (False, True):
                assert len(tile_of(platform, dtype, d, 64, causal)) == 4
        assert padded(d) == 256


# The rows of verify, memory and speed


def run(*options, **environment):
    """Run flash_attention.py as a user does; return (exit status, stdout, stderr)."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, FOLDER / "flash_attention.py", *options], text=True,
                          capture_output=True, env={**inherited, **environment}, timeout=300)
    return done.returncode, done.stdout, done.stderr


def test_verify_on_a_cpu_has_rows_of_the_kernel_where_it_is_asked_for(tmp_path):
    file = tmp_path / "rows.json"
    code, out, err = run("--device", "cpu", "--seq-len", "40", "--causal", "--json", str(file),
                         TRITON_INTERPRET="1")
    assert code == 0, err
    assert re.search(r"\| triton +\| 1x40x64 .* pass", out)
    flash, kernel = json.loads(file.read_text())["rows"]
    assert (flash["name"], kernel["name"]) == ("flash", "triton") and kernel["passed"]
    assert "triton" not in run("--device", "cpu", "--seq-len", "40")[1]


@pytest.mark.parametrize("options", [["--dtype", "float64"], ["--head-dim", "257"]])
def test_a_case_that_the_kernel_does_not_take_is_said_so(options):
    code, out, _ = run("--seq-len", "16", "--device", "cpu", *options, TRITON_INTERPRET="1")
    assert code == 0 and "| triton" not in out
    assert "triton: the kernels take no float64 and no head size above 256" in out


def test_a_missing_triton_is_one_line_that_says_how_to_get_it(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError(\"No module named 'triton'\")")
    code, out, _ = run("--seq-len", "16", "--device", "cpu", TRITON_INTERPRET="1",
                       PYTHONPATH=str(tmp_path))
    assert code == 0 and "| triton" not in out
    [line] = [line for line in out.splitlines() if line.startswith("triton: ")]
    assert "pip install triton," in line and "pip install triton-ascend==3.2.0" in line


@pytest.mark.parametrize("lesson", [flash_attention, flash_backward])
def test_off_the_cpu_memory_and_speed_have_a_row_of_the_kernels(lesson, monkeypatch):
    def named(device):
        return [c.name for c in measurable(lesson.candidates(Case(8), 8, 8, device), device)]

    own = [name for name in named("cpu") if name != "triton"]
    assert named("cpu") == own  # interpreted, they show nothing
    monkeypatch.setattr(lesson, "kernels_of", lambda *_: (flash_triton, None))
    assert named("cuda") == [*own, "triton"]
    monkeypatch.setattr(lesson, "kernels_of", lambda *_: (None, "why"))
    assert named("cuda") == own


def test_a_wrong_kernel_fails_verify(monkeypatch):
    monkeypatch.setattr(flash_triton, "flash_attention_triton", lambda Q, K, V, **masks: V * 0)
    rows = flash_attention.compare_and_verify([Case(20)])
    assert [(row.name, row.passed) for row in rows] == [("flash", True), ("triton", False)]


@pytest.mark.parametrize("lesson, formula", [
    (flash_attention, forward_bytes), (flash_backward, backward_bytes)])
def test_the_formula_of_the_kernels_is_what_they_hold(lesson, formula):
    case = Case(100, heads=4, kv_heads=2, batch=2, causal=True)
    [kernel] = [c for c in lesson.candidates(case) if c.name == "triton"]
    inputs = case.inputs("cpu", 0, dO=lesson is flash_backward)
    gc.collect()  # the interpreter leaves what it held to the collector
    peak, _ = measure_peak(lambda: kernel.call(*inputs), torch.device("cpu"))
    assert peak == formula("triton", case)


# Chips whose compilers or loads differ


def on_a_small_npu(monkeypatch, module, kernel):
    """Let a kernel run as on an NPU on which a tile of 32 x 64 fits; return the tiles tried."""
    tried, real = [], getattr(module, kernel)
    Br, Bc = (real.arg_names.index(name) for name in ("Br", "Bc"))

    class Chip:
        def __getitem__(self, grid):
            def launch(*given, **options):
                tried.append((given[Br], given[Bc]))
                if given[Br] * given[Bc] > 32 * 64:
                    raise ValueError("[ERROR]\nub overflow, requires 2 bits while 1 bits available")
                return real[grid](*given, **options)
            return launch

    monkeypatch.setattr(module, kernel, Chip())
    monkeypatch.setattr(triton_tools, "fitting", {})
    monkeypatch.setattr(triton_tools, "platform_of", lambda device: "npu")
    return tried


def test_where_a_tile_does_not_fit_the_next_smaller_is_taken_and_remembered(monkeypatch):
    tried = on_a_small_npu(monkeypatch, flash_triton, "flash_attention_kernel")
    for _ in range(2):
        check(*inputs(20, 40, dtype=torch.float32), tile=None)
    assert tried == [(128, 128), (128, 64), (64, 64), (32, 64), (32, 64)]
    with pytest.raises(ValueError, match="ub overflow"):  # what was asked for is not replaced
        check(*inputs(20, 40, dtype=torch.float32), tile=(64, 64, 4, 1))


def test_an_error_that_is_no_overflow_is_not_tried_again(monkeypatch):
    class Chip:
        def __getitem__(self, grid):
            raise RuntimeError("device lost")

    monkeypatch.setattr(flash_triton, "flash_attention_kernel", Chip())
    with pytest.raises(RuntimeError, match="device lost"):
        flash_attention_triton(*inputs(dtype=torch.float32))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("band", [{}, dict(causal=True), dict(window=(9, 3), q_start=50)], ids=str)
@pytest.mark.parametrize("d", [31, 64])
def test_a_chip_that_loads_nan_outside_gives_the_same(monkeypatch, d, band):
    monkeypatch.setattr(triton_tools, "OUTSIDE", triton.language.constexpr(math.nan))
    check(*inputs(40, 70, d, dtype=torch.float32), **band)
