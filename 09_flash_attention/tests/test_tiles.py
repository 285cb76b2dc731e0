"""tiles.py: the tile that is chosen keeps the scratch small and the launches few."""

import pytest
import torch
from lab.cases import Case
from common.memory import measure_peak
from common.timing import count_launches
from fast_tiles import (
    article_step, in_place_step, plot_sizes, time_parts, time_sizes, time_steps, walk,
)
from flash_attention import flash_attention_forward, online_softmax_step, standard_attention
from hypothesis import given
from hypothesis import strategies as st
from lab.tiles import SCORES_BYTES, choose_tile

CPU = torch.device("cpu")


@given(st.integers(1, 64), st.integers(0, 20000), st.integers(0, 20000), st.integers(1, 256),
       st.sampled_from([torch.float16, torch.float32, torch.float64]),
       st.sampled_from(["cpu", "cuda", "npu"]), st.sampled_from(["auto", 1, 64, 5000]),
       st.sampled_from(["auto", 1, 64, 5000]))
def test_a_chosen_tile_fits_the_problem_and_the_budget(heads, Nq, Nk, dv, dtype, device, Br, Bc):
    Q, K = (torch.empty(heads, N, 1, dtype=dtype, device="meta") for N in (Nq, Nk))
    rows, cols, at_once = choose_tile(Br, Bc, Q, K, dv, device)
    assert at_once == heads or device == "cpu" and "auto" == Br == Bc
    assert 1 <= rows <= max(Nq, 1) and 1 <= cols <= max(Nk, 1)
    assert Br == "auto" or rows == min(Br, max(Nq, 1))
    assert Bc == "auto" or cols == min(Bc, max(Nk, 1))
    if "auto" == Br == Bc:
        scores = at_once * rows * cols * max(dtype.itemsize, 4)
        result = heads * Nq * dv * dtype.itemsize
        least = at_once * max(dtype.itemsize, 4)  # one score a head
        assert scores <= max(4 * result if device != "cpu" else 0, SCORES_BYTES, least)


@pytest.mark.parametrize("N", [4096, 16384])
def test_peak_with_chosen_tiles_stays_below_eight_times_the_result(N):
    Q, K, V = Case(N, heads=4, d=16).inputs(CPU, 0)
    peak = measure_peak(lambda: flash_attention_forward(Q, K, V, "auto", "auto"), CPU)
    result = 4 * N * 16 * 4
    assert peak.total - peak.without_result == result and peak.without_result < 8 * result


def test_chosen_tiles_need_a_fiftieth_of_the_launches():
    Q, K, V = Case(2048).inputs(CPU, 0)
    small, chosen = (count_launches(lambda t=tile: flash_attention_forward(Q, K, V, t, t))
                     for tile in (64, "auto"))
    assert 50 * chosen <= small


def test_one_query_over_many_keys_takes_them_in_few_tiles():
    Q, K = torch.empty(8, 1, 64, device="meta"), torch.empty(8, 65536, 64, device="meta")
    assert choose_tile("auto", "auto", Q, K, 64, "cpu") == (1, 65536, 8)


@pytest.mark.parametrize("step", [article_step, in_place_step, online_softmax_step])
@pytest.mark.parametrize("scratch", [None, torch.empty(2 * 16 * 24, dtype=torch.float64)])
def test_every_step_of_the_ladder_gives_the_same(step, scratch):
    Q, K, V = Case(50, batch=2, dtype=torch.float64).inputs(CPU, 0)
    O = walk(step, Q, K, V, 16, 24, scratch)
    torch.testing.assert_close(O, standard_attention(Q, K, V), rtol=0, atol=1e-13)


def test_the_tables_of_fast_tiles_name_what_they_time(tmp_path):
    steps = time_steps(Case(64), CPU)
    assert [r.name for r in steps][-3:] == ["flash_attention_forward", "standard", "fused"]
    assert steps[0].faster == 1 and steps[-1].of_fused == 1 and steps[-1].launches == 1
    sizes = time_sizes(Case(64), CPU)
    assert [r.name for r in sizes] == ["32", "64", "auto", "standard", "fused"]
    plot_sizes(tmp_path / "tiles.png", "title", sizes)
    assert [p.name for p in tmp_path.iterdir()] == ["tiles.png"]
    parts = {r.name for r in time_parts(Case(64), CPU)}
    assert {"Q K^T", "P V", "exp2", "flash", "fused"} <= parts
