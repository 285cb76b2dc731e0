"""generations.py and lazy_rescale.py: the loops agree, and what they do is what formulas say."""

import json
import math
import subprocess
import sys
from pathlib import Path

import generations
import lazy_rescale
import pytest
import torch
from generations import (
    GENERATIONS, busy_cores, compare_splits, count, flash_attention_2, flash_attention_3,
    plain_standard_attention, split_k, split_q, verify_generations,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.cases import Case
from lazy_rescale import (
    count_rises, errors, exp2_coefficients, flash_attention_4, polynomial_exp2, rows_needed,
)

PHASE = Path(generations.__file__).parent
CPU = torch.device("cpu")
EXACT = {"standard": lambda Q, K, V, Br, Bc: plain_standard_attention(Q, K, V),
         **{name: loop for name, loop in GENERATIONS.items() if "polynomial" not in name}}


def inputs(Nq, Nk=None, d=4, dv=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=dtype)
            for s in ((Nq, d), (Nk or Nq, d), (Nk or Nq, dv or d))]


def attention(Q, K, V):
    return torch.softmax(torch.einsum("id,jd->ij", Q, K) / math.sqrt(Q.shape[1]), -1) @ V


# The loops


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 9), st.integers(1, 80),
       st.integers(1, 80))
def test_every_generation_is_softmax_attention_at_any_length_and_tile(Nq, Nk, dv, Br, Bc):
    Q, K, V = inputs(Nq, Nk, dv=dv)
    for name, loop in EXACT.items():
        found = loop(3 * Q, K, V, Br=Br, Bc=Bc)
        torch.testing.assert_close(found, attention(3 * Q, K, V), rtol=0, atol=1e-13, msg=name)


def test_the_two_stage_order_changes_no_bit():
    Q, K, V = inputs(100, 130, dtype=torch.float32)
    assert torch.equal(flash_attention_3(Q, K, V, 32, 24), flash_attention_2(Q, K, V, 32, 24))


def test_every_generation_passes_the_rule_of_the_repository():
    rows = verify_generations(Case(200), 64, 64, CPU, 0)
    assert all(row.passed for row in rows), rows
    assert {(r.name, r.dtype) for r in rows} == {
        *((name, "float32") for name in ("FA1", "FA2", "FA3", "FA4")),
        *((name, "bfloat16") for name in GENERATIONS)}


@pytest.mark.parametrize("tau", [0, 1, 8, 40])
def test_a_maximum_that_is_kept_too_low_changes_nothing(tau):
    Q, K, V = inputs(64)
    found = flash_attention_4(5 * Q, K, V, 16, 8, tau=tau)
    torch.testing.assert_close(found, attention(5 * Q, K, V), rtol=0, atol=1e-13)


def test_no_weight_exceeds_two_to_the_tau():
    seen = []

    def watched(x):
        seen.append(x.max().item())
        return torch.exp2(x)

    Q, K, V = inputs(64)
    flash_attention_4(9 * Q, K, V, 16, 8, tau=3.0, exp2=watched)
    assert 0 < max(seen) <= 3


# The polynomial


def test_the_polynomial_is_exact_at_whole_numbers_and_within_9e_5_between():
    x = torch.linspace(-126, 20, 200_001, dtype=torch.float64)
    relative = (polynomial_exp2(x) / 2**x - 1).abs()
    assert 8e-5 < relative.max() < 9e-5  # 8.8e-5 is published for degree 3
    whole = torch.arange(-126, 127)
    assert torch.equal(polynomial_exp2(whole.float()), 2.0 ** whole)
    assert polynomial_exp2(torch.tensor([-math.inf])).item() == 2.0**-126


def test_no_polynomial_of_its_degree_is_much_better():
    """De la Vallee Poussin: where the error alternates 4 times, no other 3 coefficients get below
    the smallest of these extremes.
    """
    f = torch.linspace(0, 1, 20_001, dtype=torch.float64)
    error = sum(c * f**i for i, c in enumerate(exp2_coefficients())) / 2**f - 1
    slope = error.diff()
    extremes = error[1:][torch.cat([slope[1:] * slope[:-1] < 0, torch.tensor([True])])]
    assert len(extremes) == 4 and (extremes[1:] * extremes[:-1] < 0).all()
    assert error.abs().max() < 1.05 * extremes.abs().min()


# The counts


@pytest.mark.parametrize("N, d, Br, Bc", [(256, 32, 64, 128), (192, 16, 32, 64), (150, 8, 64, 40)])
def test_what_is_counted_is_what_closed_formulas_say(N, d, Br, Bc):
    Q, K, V = inputs(N, d=d, dtype=torch.float32)
    T = math.ceil(N / Bc)
    on_O = {"standard": 0, "FA1": 4 * N * d * T, "FA2": N * d * T + N * d,
            "FA3": N * d * (T - 1) + N * d, "FA4": 2 * N * d, "FA4, polynomial": 2 * N * d}
    columns = {"standard": 0, "FA1": 8 * T, "FA2": 5 * T, "FA3": 5 * T, "FA4": 3 * T + 3,
               "FA4, polynomial": 3 * T + 3}
    for name in ("standard", *GENERATIONS):
        row = count(name, Q, K, V, Br, Bc)
        a_score = {"standard": 6, "FA4, polynomial": 14}.get(name, 5)
        assert row.products == 4 * N * N * d, name
        assert row.on_O == on_O[name], name
        assert row.outside == a_score * N * N + columns[name] * N + on_O[name], name
        assert row.divisions == {"standard": N * N, "FA1": N * d * T}.get(name, N * d), name
        exps = {"standard": 0, "FA1": 2 * T, "FA4": 1, "FA4, polynomial": 1}.get(name, T) * N
        assert row.exp == exps + (0 if "polynomial" in name else N * N), name


def test_bytes_moved_are_those_of_the_two_orders():
    N, d, Br, Bc = 256, 32, 64, 128
    moved = {name: count(name, *inputs(N, d=d), Br, Bc).bytes_moved
             for name in ("standard", "FA1", "FA2", "FA4")}
    assert moved["standard"] == 2 * (4 * N * N + 4 * N * d)
    assert moved["FA2"] == moved["FA4"] == 2 * (2 * N * d + N // Br * 2 * N * d)
    start, of_a_block_of_keys = N * d + 2 * N, 3 * N * d + 4 * N
    assert moved["FA1"] == 2 * (2 * N * d + start + N // Bc * of_a_block_of_keys)


def test_queries_outside_fill_the_cores_that_heads_alone_leave_idle():
    rows = {(r.chip, r.N): r for r in busy_cores(128)}
    long = rows["A100-80GB", 16384]
    assert (long.batch, long.fa1_blocks, long.fa2_blocks) == (1, 16, 16 * 128)
    assert long.fa1_busy == 16 / 108 and long.fa2_busy == 2048 / (19 * 108)
    assert rows["910B3", 1024].fa1_busy == 256 / (13 * 20)
    assert all(r.fa1_busy <= 1 and r.fa2_busy <= 1 for r in rows.values())


def test_split_keys_exchange_maxima_sums_and_outputs_and_split_queries_nothing():
    Br, Bc, d = 48, 80, 16
    rows = {r.name: r for r in compare_splits(Case(256, d=d), Br, Bc, CPU, 0)}
    assert all(row.passed for row in rows.values()), rows
    assert rows["split K"].shared_bytes == 4 * 4 * Br * (d + 2)  # warps, float32, O and m and l
    assert rows["split Q"].shared_bytes == 0


@pytest.mark.parametrize("split", [split_k, split_q])
@pytest.mark.parametrize("warps", [1, 3, 4, 100])
def test_any_number_of_warps_gives_the_same(split, warps):
    Q, K, V = inputs(33, 50)
    torch.testing.assert_close(split(Q, K, V, warps, []), attention(Q, K, V), rtol=0, atol=1e-14)


# The rising maxima


@pytest.mark.parametrize("N, published", [(1024, 0.246), (4096, 0.099), (16384, 0.035)])
def test_the_maximum_rises_as_often_as_one_over_t_plus_one(N, published):
    row = count_rises(N)
    mean = sum(1 / (t + 1) for t in range(1, N // 128)) / (N // 128 - 1)
    assert abs(row.share / mean - 1) < 0.02  # 4 standard deviations: see rows_needed
    assert abs(row.share - published) < 0.02 * published
    assert row.share < row.warp_share <= 1
    # A warp's events are independent too: for these numbers of rows one deviation is below 0.5 %.
    assert abs(row.warp_share / row.warp_expected - 1) < 0.02
    assert row.tau_share["1"] == 0 < row.tau_share["5"] < row.share


def test_with_tau_0_every_rise_counts_whatever_the_deviation():
    row = count_rises(1024, tau=0.0)
    assert all(share == pytest.approx(row.share, rel=1e-3) for share in row.tau_share.values())


def test_the_number_of_rows_is_what_the_variance_asks_for():
    """With one event of p = 1/2 a row, 4 deviations of 0.5 / sqrt(rows) are to be 2 % of 1/2."""
    assert rows_needed([0.5]) == 40_000
    assert rows_needed([0.5] * 4) == 10_016  # a quarter, in whole warps


def test_tau_and_the_polynomial_cost_less_than_the_rounding_of_p():
    rows = {row.name: row for row in errors(Case(512), CPU)}
    exp2, lazy, poly, both = (rows[f"{kind}, {when}"] for kind in ("exp2", "polynomial")
                              for when in ("each rise", "tau = 8"))
    assert lazy.error < 2 * exp2.error < 1e-5 < poly.error < 1e-4
    for row in (exp2, lazy, poly, both):
        assert 1e-4 < row.error_bfloat16 < 2e-3
    assert poly.error_bfloat16 < 1.2 * exp2.error_bfloat16


def test_fewer_than_two_tiles_are_refused():
    with pytest.raises(ValueError, match="N must be at least 256"):
        count_rises(255)


# What a reader reads


def run(script, *arguments, cwd):
    return subprocess.run([sys.executable, PHASE / script, "--device", "cpu", *arguments], cwd=cwd,
                          capture_output=True, text=True)


def test_the_command_prints_the_tables_and_writes_the_rows(tmp_path):
    done = run("generations.py", "--seq-len", "96", "--json", "rows.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for said in ("FA4, polynomial", "50-73 % of an A100", "910B3", "split K", "in N^2 d / Bc"):
        assert said in done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["tool"] for row in rows} == {"verify", "count", "busy", "split"}


def test_a_wrong_loop_fails_and_a_wrong_value_is_refused(monkeypatch, capsys):
    wrong = lambda *inputs, Br, Bc: flash_attention_2(*inputs, Br, Bc) + 0.01  # noqa: E731
    monkeypatch.setitem(GENERATIONS, "FA2", wrong)
    monkeypatch.setattr(sys, "argv", ["generations.py", "--seq-len", "64", "--device", "cpu"])
    assert generations.main() == 1 and "FAIL" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["generations.py", "--bc", "0"])
    with pytest.raises(SystemExit) as ended:
        generations.main()
    assert ended.value.code == 2


def test_the_lazy_rescale_draws_and_prints_what_it_counts(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(lazy_rescale, "LENGTHS", (256, 512))
    monkeypatch.setattr(sys, "argv", ["lazy_rescale.py", "--device", "cpu", "--plot", str(tmp_path),
                                      "--json", str(tmp_path / "rows.json")])
    assert lazy_rescale.main() == 0
    assert "mean of 1/(t+1)" in capsys.readouterr().out
    assert (tmp_path / "rising_maxima.png").stat().st_size > 5000
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [r["N"] for r in rows if r["tool"] == "rises"] == [256, 512]
