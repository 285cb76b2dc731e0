"""The recomputed backward against finite differences and autograd through standard attention."""

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import flash_backward
import pytest
import torch
from common.memory import measure_peak
from common.timing import Rounds
from flash_attention import flash_attention_forward, standard_attention
from flash_backward import (
    benchmark_speed,
    compare_and_verify,
    flash_attention,
    gradients,
    profile_memory,
)
from hypothesis import given, settings
from lab import bench
from lab.cases import Case
from test_forward import inputs, problems

CPU = torch.device("cpu")


def dO_of(Q, V, seed=1):
    shape = (*Q.shape[:-1], V.shape[-1])
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(Q.dtype)


def both(Q, K, V, dO, Br=4, Bc=4, **options):
    """Return (dQ, dK, dV) of flash and of standard attention."""
    return (
        gradients(lambda *QKV: flash_attention(*QKV, Br, Bc, **options), Q, K, V, dO),
        gradients(lambda *QKV: standard_attention(*QKV, **options), Q, K, V, dO),
    )


def check(Q, K, V, dO=None, *tiles, **options):
    """Hold flash's gradients to standard's. In float64, rounding stays below 1e-12."""
    flash, standard = both(Q, K, V, dO_of(Q, V) if dO is None else dO, *tiles, **options)
    for x, found, expected in zip((Q, K, V), flash, standard):
        assert found.shape == x.shape and found.dtype == x.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    return flash


# Gradients


MASK = torch.rand(5, 5, generator=torch.Generator().manual_seed(2)) < 0.6


@pytest.mark.parametrize(
    "shape, options",
    [
        ({}, {}),
        ({}, {"causal": True}),
        ({"Nk": 7}, {"causal": True}),
        ({"Nk": 7}, {"causal": True, "q_start": 0}),
        ({"Nk": 3}, {"causal": True}),
        ({}, {"window": (2, 1)}),
        ({}, {"causal": True, "window": (2, None)}),
        ({"lead": (1, 4), "kv_heads": 2}, {"causal": True}),
        ({"lead": (2, 3), "kv_heads": 1}, {}),
        ({"Nk": 4, "dv": 2}, {}),
        ({}, {"scale": -0.7}),
        ({}, {"attn_mask": MASK}),
        ({"lead": (1, 2)}, {"attn_mask": MASK[:1].double(), "causal": True}),
        ({"lead": ()}, {}),
    ],
)
def test_gradients_are_those_of_finite_differences(shape, options):
    lengths = {name: size for name, size in shape.items() if name != "kv_heads"}
    Q, K, V = inputs(5, d=3, **{"lead": (1,), **lengths})
    if "kv_heads" in shape:
        K, V = (x[:, : shape["kv_heads"]].clone() for x in (K, V))
    QKV = [x.requires_grad_() for x in (Q, K, V)]
    assert torch.autograd.gradcheck(lambda *QKV: flash_attention(*QKV, 3, 2, **options), QKV)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(problems())
def test_any_problem_has_the_gradients_of_autograd(problem):
    tensors, tiles, options = problem
    options.pop("score_mod", None)
    check(*tensors, None, *tiles, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_half_types_err_at_most_three_times_as_much_as_standard(dtype, causal):
    Q, K, V = inputs(256, lead=(1,), d=64, dtype=dtype)
    dO = dO_of(Q, V)
    wide = [x.double() for x in (Q, K, V, dO)]
    exact = gradients(lambda *QKV: standard_attention(*QKV, causal=causal), *wide)
    for flash, standard, oracle in zip(*both(Q, K, V, dO, 64, 64, causal=causal), exact):
        assert flash.dtype == dtype
        error, allowed = ((x.double() - oracle).abs().max() for x in (flash, standard))
        assert error <= 3 * allowed


def test_half_types_are_summed_in_float32_over_many_tiles_and_heads():
    """In float16 a sum of ones stops at 2048: V's gradient counts the 4096 queries that read it."""
    Q = torch.zeros(1, 4, 1024, 2, dtype=torch.float16)
    K, V = torch.zeros(1, 1, 1, 2, dtype=torch.float16), torch.ones(1, 1, 1, 2).half()
    dV = both(Q, K, V, torch.ones_like(Q), 16, 16)[0][2]
    assert dV.tolist() == [[[[4096.0, 4096.0]]]]


def test_chosen_tiles_give_the_same_gradients():
    Q, K, V = inputs(70, lead=(2, 2))
    check(Q, K, V, None, "auto", "auto", causal=True)
    check(Q, K, V, None, 16, "auto")


def test_the_result_is_that_of_the_forward():
    Q, K, V = inputs(lead=(2, 4))
    expected = flash_attention_forward(Q, K, V, 4, 3, causal=True)
    Q.requires_grad_()
    assert torch.equal(flash_attention(Q, K, V, 4, 3, causal=True), expected)


def test_only_what_wants_a_gradient_gets_one():
    Q, K, V = inputs()
    V.requires_grad_()
    flash_attention(Q, K, V).sum().backward()
    assert Q.grad is None and K.grad is None and V.grad.shape == V.shape
    assert not flash_attention(*inputs()).requires_grad


def test_strided_inputs_have_the_gradients_of_contiguous_ones():
    Q, K, V = inputs(lead=(2, 3))
    expected = check(Q, K, V, causal=True)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (Q, K, V)]
    assert not any(x.is_contiguous() for x in strided)
    for found, same in zip(check(*strided, causal=True), expected):
        torch.testing.assert_close(found, same, rtol=0, atol=1e-12)
    check(Q, K[:1].expand_as(K), V[:, :1].expand_as(V))


def test_no_queries_or_no_keys_give_zero_gradients():
    for Nq, Nk in ((0, 4), (4, 0), (0, 0)):
        assert not any(x.any() for x in check(*inputs(Nq, Nk)))


def test_two_backwards_are_bitwise_equal():
    Q, K, V = inputs(100, lead=(2, 4), dtype=torch.float32)
    K, V, dO = K[:, :2], V[:, :2], dO_of(Q, V)
    first, second = (both(Q, K, V, dO, 16, 16, causal=True)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_hidden_tiles_are_not_visited(monkeypatch):
    visited, step = [], flash_backward.gradient_step
    monkeypatch.setattr(flash_backward, "gradient_step",
                        lambda *blocks, **more: visited.append(step(*blocks, **more)))
    key = torch.arange(32)
    for options, tiles in (
        ({}, 64),
        ({"causal": True}, 36),
        ({"causal": True, "window": (4, 0)}, 15),
        ({"attn_mask": key < 12}, 24),
    ):
        visited.clear()
        Q, K, V = (x.requires_grad_() for x in inputs(32))
        flash_attention(Q, K, V, 4, 4, **options).sum().backward()
        assert len(visited) == tiles


# What went wrong elsewhere


def test_one_dead_row_does_not_poison_the_gradients():
    Q, K, V = inputs(8, lead=(1, 1))
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[4] = False
    dQ, dK, dV = check(Q, K, V, attn_mask=mask)
    assert not dQ[0, 0, 4].any() and dQ[0, 0, :4].any() and dK.any() and dV.any()
    dO = dO_of(Q, V)
    dO[0, 0, 4] = math.nan  # a loss may well be NaN where there is nothing to see
    for with_nan, without in zip(check(Q, K, V, dO, attn_mask=mask), (dQ, dK, dV)):
        assert torch.equal(with_nan, without)


def test_rows_before_the_first_key_pass_no_gradient():
    dQ = check(*inputs(5, 2), causal=True)[0]
    assert not dQ[:, :3].any() and dQ[:, 3:].any()


def test_a_dO_of_any_strides_gives_the_same_gradients():
    Q, K, V = inputs(lead=(2, 3))
    row = dO_of(Q, V)[:1, :1, :1]
    layouts = {
        "expanded": row.expand(2, 3, 7, 8),
        "transposed": dO_of(Q, V).transpose(-2, -1).contiguous().transpose(-2, -1),
        "strided": torch.stack([dO_of(Q, V)] * 2, dim=-1).flatten(-2)[..., ::2],
        "all one number": torch.ones((), dtype=torch.float64).expand(2, 3, 7, 8),
        "zero": torch.zeros(()).double().expand(2, 3, 7, 8),
    }
    for dO in layouts.values():
        found = both(Q, K, V, dO)[0]
        for a, b in zip(found, both(Q, K, V, dO.contiguous())[0]):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
    assert not any(x.any() for x in found)  # zero in, zero out


def test_gradients_of_grouped_heads_go_to_the_head_of_the_group():
    """4 query heads read heads 0, 0, 1, 1: with dO = h + 1, dV of a head is 1 + 2 or 3 + 4."""
    Q, K = torch.zeros(1, 4, 3, 2), torch.zeros(1, 2, 3, 2)
    V = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 3, 2)
    dO = torch.arange(1.0, 5.0).view(1, 4, 1, 1).expand(1, 4, 3, 2)
    _, _, dV = both(Q, K, V, dO, 2, 2)[0]
    torch.testing.assert_close(dV, torch.tensor([3.0, 7.0]).view(1, 2, 1, 1).expand(1, 2, 3, 2))


@pytest.mark.parametrize("N, d", [(5, 8), (8, 5)])
def test_D_has_one_number_a_query_and_not_one_a_dimension(N, d):
    check(*inputs(N, d=d))
    check(*inputs(N, d=d, dv=d + 1))


def test_backward_returns_one_gradient_for_each_argument_of_forward():
    Q, K, V = (x.requires_grad_() for x in inputs(5))
    options = {"causal": True, "q_start": 0, "window": (3, 0), "scale": 0.5, "attn_mask": MASK}
    flash_attention(Q, K, V, 4, 3, **options).sum().backward()
    assert all(x.grad.shape == x.shape for x in (Q, K, V))


def test_a_nan_in_a_key_that_no_query_sees_stays_there():
    Q, K, V = inputs(lead=(1, 2))
    mask = torch.arange(7) < 5
    expected = check(Q, K, V, attn_mask=mask)
    K, V = (x.index_fill(-2, torch.tensor([5, 6]), math.nan) for x in (K, V))
    for tiles in ((4, 4), (64, 64)):
        for found, same in zip(both(Q, K, V, dO_of(Q, V), *tiles, attn_mask=mask)[0], expected):
            torch.testing.assert_close(found, same, rtol=0, atol=1e-12)


# What is refused


def test_a_second_derivative_is_refused():
    Q, K, V = (x.requires_grad_() for x in inputs())
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(flash_attention(Q, K, V).sum(), Q, create_graph=True)


def test_wrong_input_raises_as_in_the_forward():
    Q, K, V = (x.requires_grad_() for x in inputs())
    with pytest.raises(ValueError, match="Br must be"):
        flash_attention(Q, K, V, 0)
    with pytest.raises(TypeError, match="float64"):
        flash_attention(Q, K.float(), V)
    with pytest.raises(ValueError, match="window"):
        flash_attention(Q, K, V, window=3)


def test_an_input_that_changed_before_the_backward_is_noticed():
    Q, K, V = (x.requires_grad_() for x in inputs())
    O = flash_attention(Q, K, V)
    with torch.no_grad():
        K += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        O.sum().backward()


# Memory


def saved_bytes(attend, Q, K, V):
    """Return the bytes that autograd keeps for the backward, beside Q, K and V."""
    kept = {}
    own = {x.untyped_storage().data_ptr() for x in (Q, K, V)}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        O = attend(Q, K, V)
    assert O.requires_grad
    return sum(size for place, size in kept.items() if place not in own)


def test_the_forward_keeps_O_m_and_l_alone():
    Q, K, V = (x.requires_grad_() for x in inputs(256, lead=(1,), d=64, dtype=torch.float32))
    assert saved_bytes(flash_attention, Q, K, V) == 256 * (64 + 2) * 4


def test_memory_of_a_training_step_grows_with_N_and_not_with_its_square():
    peak = {}
    for N in (1024, 4096):
        for row in profile_memory([Case(N)], 128, 128):
            peak[row.name, N] = row.peak_bytes
    assert 3.4 < peak["flash", 4096] / peak["flash", 1024] < 4
    assert 15 < peak["standard", 4096] / peak["standard", 1024] < 16
    assert peak["standard", 4096] >= 20 * peak["flash", 4096]


@pytest.mark.parametrize(
    "case",
    [
        Case(256),
        Case(200, causal=True),
        Case(256, batch=2, heads=4),
        Case(256, heads=4, kv_heads=2),
        Case(100, Nk=160, dv=96, dtype=torch.float64),
    ],
)
def test_the_formulas_are_what_is_measured(case):
    standard, flash = profile_memory([case], 64, 64)
    assert standard.peak_bytes == standard.theory_bytes + 8  # the number that holds the scale
    assert 0 <= flash.peak_bytes - flash.theory_bytes <= 12  # and that of log2(e)


@pytest.mark.parametrize("case", [Case(512, dtype=torch.bfloat16), Case(512, window=(50, 0))])
def test_the_formula_of_flash_is_near_where_it_is_not_exact(case):
    flash = profile_memory([case], 64, 64)[1]
    assert 0.9 < flash.peak_bytes / flash.theory_bytes < 1.1


def test_a_small_mask_never_becomes_N_by_N():
    Q, K, V = inputs(1024, lead=(1, 1), d=16, dtype=torch.float32)
    mask = (torch.arange(1024) < 1000).view(1, 1, 1, 1024)
    dO = dO_of(Q, V)

    def peak(**options):
        attend = partial(flash_attention, Br=128, Bc=128, **options)
        return measure_peak(lambda: gradients(attend, Q, K, V, dO), CPU).total

    assert peak(attn_mask=mask) < peak() + 4 * 128 * 128 < 1024 * 1024


# The tools and the command line


def test_verify_passes_and_notices_a_wrong_gradient(monkeypatch):
    cases = [Case(70, causal=True), Case(64, heads=4, kv_heads=2), Case(64, dtype=torch.float16)]
    rows = compare_and_verify(cases, 16, 16)
    assert len(rows) == 9 and all(row.passed for row in rows)
    right = flash_backward.flash_attention_backward

    def without_scale(*args, **options):
        dQ, dK, dV = right(*args, **options)
        return dQ * 8, dK, dV

    monkeypatch.setattr(flash_backward, "flash_attention_backward", without_scale)
    verdicts = {row.gradient: row.passed for row in compare_and_verify([Case(70)], 16, 16)}
    assert verdicts == {"dQ": False, "dK": True, "dV": True}


def test_flops_are_three_and_a_half_times_those_of_the_forward(monkeypatch):
    monkeypatch.setattr(
        bench, "time_in_turn", lambda calls, device: Rounds((name, [2.0] * 3) for name in calls)
    )
    for case, pairs in ((Case(64, batch=2), 2 * 64 * 64), (Case(64, causal=True), 64 * 65 / 2)):
        for row in benchmark_speed([case], 32, 32):
            assert row.tflops == pytest.approx(3.5 * 4 * pairs * 64 / 2.0 / 1e12)
            assert row.ratio_to_standard == 1


def quick(monkeypatch):
    monkeypatch.setattr(bench, "time_in_turn", partial(bench.time_in_turn, budget=0))
    monkeypatch.setattr(bench, "square_matmul", lambda dtype, device: (lambda: CPU, 1))


def test_what_has_no_room_is_not_run(monkeypatch):
    monkeypatch.setattr(bench, "free_bytes", lambda device: 2 * 2**20)
    quick(monkeypatch)
    standard, flash = profile_memory([Case(512)], 256, 256)
    assert standard.peak_bytes is None and flash.peak_bytes
    standard, flash, _ = benchmark_speed([Case(512)], 128, 128)
    assert standard.seconds is None and flash.seconds and flash.ratio_to_standard is None


def test_the_command_writes_rows_and_plots(tmp_path, monkeypatch, capsys):
    quick(monkeypatch)
    files = ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path)]
    shape = ["--seq-len", "64", "--head-dim", "8"]
    monkeypatch.setattr(sys, "argv", ["flash_backward.py", "--mode", "all", *shape, *files])
    assert flash_backward.main() == 0
    shown = capsys.readouterr().out
    assert "pass" in shown and "FAIL" not in shown
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    tools = [row["tool"] for row in rows]
    assert [tools.count(mode) for mode in ("verify", "memory", "speed")] == [3, 2, 3]
    extras = [row for row in rows if row["tool"] == "extras"]
    assert len(extras) == 5 * (3 + 2 + 2) + 2 and extras[-1]["shape"] == "1x64x8, dropout"
    assert all((tmp_path / f"backward_{mode}.png").stat().st_size for mode in ("memory", "speed"))


def test_gradients_pass_on_a_simulated_npu():
    pytest.importorskip("torch", "2.13")  # what the simulation is built on
    program = Path(flash_backward.__file__)
    on_npu = {**os.environ, "PYTHONPATH": str(program.parent.parent / "tests" / "simulated_npu")}
    shape = ["--seq-len", "100", "--heads", "4", "--kv-heads", "2", "--dtype", "bfloat16"]
    run = [sys.executable, program, "--device", "npu", "--causal", *shape]
    shown = subprocess.run(run, env=on_npu, capture_output=True, text=True, check=True)
    assert shown.stdout.count("pass") == 3 and "npu:0" in shown.stdout
