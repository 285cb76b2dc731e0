"""Candidates that fail, figures that are not to be believed, exponents that nothing carries."""

import json
import sys

import articles
import flash_attention
import pytest
import torch
from common import timing
from common.timing import Rounds
from lab import bench, show
from lab.bench import Candidate, SpeedRow, benchmark, profile, verify
from lab.cases import Case

CPU = torch.device("cpu")


def overflow(Q, K, V, **masks):
    raise RuntimeError("ub overflow, requires 3145728 bits\nwhile 1572864 bits available!")


def no_memory(Q, K, V, **masks):
    raise RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB")


# A candidate that raises


def test_a_candidate_that_raises_has_a_row_that_says_why_and_the_others_stand():
    case = Case(32)
    candidates = [*flash_attention.candidates(case), Candidate("kernel", overflow)]
    *others, failed = verify(case, candidates, device=CPU)
    assert all(row.passed for row in others) and not failed.passed
    assert failed.name == "kernel" and failed.max_diff is None
    assert failed.why == ("RuntimeError: ub overflow, requires 3145728 bits while 1572864 bits "
                          "available!")
    for tool in (profile, benchmark):
        *others, failed = tool(case, candidates, device=CPU)
        assert not any(row.failed for row in others) and failed.failed and "overflow" in failed.why
        assert all(row.peak_bytes if tool is profile else row.seconds for row in others)


def test_a_candidate_without_room_is_no_failure():
    case, candidates = Case(32), [*flash_attention.candidates(Case(32)),
                                  Candidate("kernel", no_memory)]
    for tool in (profile, benchmark):
        row = tool(case, candidates, device=CPU)[-1]
        assert (row.why, row.failed) == ("no room", False)


@pytest.mark.parametrize("mode", ["verify", "memory", "speed"])
def test_a_failed_candidate_ends_with_1_its_table_and_its_json(mode, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(flash_attention, "flash_attention_forward", overflow)
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["flash_attention.py", "--mode", mode, "--seq-len", "32",
                                      "--device", "cpu", "--json", str(file)])
    assert flash_attention.main() == 1
    out = capsys.readouterr().out
    assert "failed: flash 1x32x64: RuntimeError: ub overflow" in out
    if mode != "verify":
        assert "| standard " in out and "| fused " in out
    rows = json.loads(file.read_text())["rows"]
    assert ["ub overflow" in row["why"] for row in rows] == [row["name"] == "flash" for row in rows]


# Figures that say when not to be believed


def test_a_median_of_wide_quartiles_or_beside_other_work_is_doubted():
    rounds = Rounds(calm=[1.0, 1.1, 1.0, 1.2, 1.0], wild=[1.0, 3.0, 1.0, 3.0, 1.0])
    assert rounds.doubt("calm") == "" and "quartiles 1e+03 to 3e+03 ms" in rounds.doubt("wild")
    assert rounds.doubt("calm", (1.0, 1.4)) == ""
    assert rounds.doubt("calm", (1.0, 1.6)) == "quartiles of the ratio 1 to 1.6"
    rounds.others = 0.38
    assert rounds.doubt("calm") == "other work took 38% of the cores"


@pytest.mark.parametrize("after, share", [
    ((120.0, 0.0, 10.0), 0.5),  # 20 s of two cores, half of them ours, none idle
    ((120.0, 0.0, 20.0), 0.0),  # all ours
    ((120.0, 10.0, 10.0), 0.0),  # half idle: nobody was in the way
    ((100.0, 0.0, 0.0), 0.0)])  # no time passed
def test_other_work_counts_where_no_core_is_idle(after, share):
    assert timing._others((100.0, 0.0, 0.0), after) == pytest.approx(share)
    assert timing._others(None, None) == 0


def test_a_doubted_time_is_marked_and_its_share_of_a_doubted_matmul_is_left_out(monkeypatch,
                                                                              capsys):
    def crowded(calls, device):
        rounds = Rounds((name, [1.0, 2.0, 1.0, 2.0, 1.0]) for name in calls)
        rounds.others = 0.5
        return rounds

    monkeypatch.setattr(bench, "time_in_turn", crowded)
    rows = flash_attention.benchmark_speed([Case(16)])
    assert all(row.why and row.matmul_share is None and not row.failed for row in rows)
    show.print_speed("Speed", rows)
    out = capsys.readouterr().out
    assert "1000 ?" in out
    assert "? not to be believed: standard 1x16x64, flash 1x16x64, fused 1x16x64: other" in out


@pytest.mark.parametrize("points, said", [
    ([(512, 1.0), (1024, 4.0), (2048, 16.0)], "2.00"),
    ([(512, 1.0), (1024, 4.0)], "- (2 lengths"),
    ([(512, 1.0), (640, 2.0), (768, 3.0)], "- (3 lengths"),
    ([(512, 1.0), (1024, 40.0), (2048, 16.0)], "- (the points lie on no line)"),
    ([], "- (0 lengths")])
def test_an_exponent_needs_points_that_can_carry_it(points, said):
    assert show.fitted_exponent(points).startswith(said)


def test_a_doubted_row_carries_no_exponent(capsys):
    cases = [Case(N) for N in (512, 1024, 2048)]
    rows = [SpeedRow("flash", case.shape, None, None, case.Nq / 512, why=why)
            for case, why in zip(cases, ("", "", "quartiles 1 to 2 ms"))]
    show.print_growth(cases, rows)
    assert "flash - (2 lengths that can be believed" in capsys.readouterr().out


def test_what_takes_minutes_is_announced(monkeypatch, capsys):
    monkeypatch.setattr(timing, "time_call", lambda call, device: 100.0)
    timing.time_in_turn({"flash": None}, CPU, budget=0)
    assert capsys.readouterr().err == "timing flash: about 8 minutes\n"


def test_a_reason_follows_from_the_figure_that_it_stands_beside(monkeypatch):
    def measured(faster, why=""):
        rows = [SpeedRow(name, "1x2048x64", 64, 64, 1.0, faster, (1, 1), 1, 1, 100, why=why)
                for name in ("standard", "flash", "fused")]
        monkeypatch.setattr(articles, "benchmark_speed", lambda *a, **o: rows)
        return articles.times(CPU)[-1].why

    assert "no N x N matrix to write" in measured(2.0)
    assert "cost more than the N x N matrices" in measured(0.5)
    assert measured(2.0, "quartiles 1 to 3 ms") == "not to be believed: quartiles 1 to 3 ms"
