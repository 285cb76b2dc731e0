"""What is moved: formulas against running code, the paper's figures, and the command."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import io_model
import pytest
import torch
from flash_attention import flash_attention_forward
from io_model import article_claims, claims, counted, crossover
from lab.cachegrind import read_in_c
from lab.machines import CHIPS, Chip, attainable, best_tile, intensity, predicted
from lab.scratchpad import LINE, Scratchpad
from lab.traffic import GPT2, flop, moves, on_chip, square_tile, total, traffic

KIB = 1024
LESSON = Path(io_model.__file__)


def command(name, *options):
    return subprocess.run([sys.executable, LESSON.with_name(name), *options], text=True,
                          capture_output=True, timeout=120)


def by_name(rows):
    return {row.name: row for row in rows}


@pytest.fixture(scope="module")
def over_memory():
    """{bytes on the chip: {name: CountedRow}}, N = 512, d = 64, float32."""
    return {M: by_name(counted(512, 64, M * KIB)) for M in (32, 64, 128)}


# Formula and count


@pytest.mark.parametrize("M", [32, 64, 128])
def test_the_running_loop_moves_what_the_formula_says_to_the_byte(over_memory, M):
    for name in ("standard", "FA2"):
        row = over_memory[M][name]
        assert (row.read, row.written) == (row.formula_read, row.formula_written)


def test_the_bytes_are_those_that_were_counted_elsewhere(over_memory):
    assert [round(rows["FA2"].read / 1e6, 3) for rows in over_memory.values()] == [
        8.520, 4.325, 2.228]


@pytest.mark.parametrize("N, tile, dtype", [
    (128, (16, 64), torch.float32), (192, (16, 32), torch.float32), (96, (32, 8), torch.float64)])
def test_so_it_does_for_other_tiles_and_another_dtype(N, tile, dtype):
    row = by_name(counted(N, 32, 32 * KIB, dtype, tile))["FA2"]
    assert (row.read, row.written) == (row.formula_read, row.formula_written)
    assert (row.Br, row.Bc) == tile


def test_half_types_move_half_the_bytes():
    row = by_name(counted(256, 64, 64 * KIB, torch.float16))["FA2"]
    assert (row.read, row.written) == (row.formula_read, row.formula_written)
    assert row.written == 256 * 64 * 2


def test_one_column_or_one_row_has_a_formula_too():
    assert by_name(counted(1, 64, 64 * KIB))["FA2"].moved == 4 * 4 * 64
    assert crossover("FA1", 1) >= on_chip(1, 1, 1)


def test_with_a_tail_it_reads_what_the_formula_says():
    row = by_name(counted(200, 32, 32 * KIB, tile=(16, 32)))["FA2"]
    assert row.read == row.formula_read


@pytest.mark.parametrize("M", [32, 64, 128])
def test_keys_outside_move_what_the_formula_says_within_2_percent(over_memory, M):
    row = over_memory[M]["FA1"]
    assert abs(row.moved / (row.formula_read + row.formula_written) - 1) < 0.02


def test_gradients_move_what_the_formulas_say_to_the_byte():
    for row in counted(256, 64, 64 * KIB, backward=True):
        assert (row.read, row.written) == (row.formula_read, row.formula_written), row.name


def test_a_tile_that_does_not_stay_on_the_chip_moves_more():
    Q, K, V = torch.randn(3, 1, 128, 64)
    formula = 4 * total(traffic("FA2", 128, 64, 32, 32))
    for M, fits in ((64, True), (16, False)):
        with Scratchpad(M * KIB, lambda x: "tiles", QKV=Q) as chip:
            O = flash_attention_forward(Q, K, V, 32, 32)
        assert (sum((chip.read + chip.written).values()) == formula) == fits, O.shape
    assert chip.written["tiles"] > O.nbytes


def test_no_score_leaves_the_chip_in_flash_attention(over_memory):
    rows = over_memory[64]
    assert "N x N" not in rows["FA2"].arrays and "tiles" not in rows["FA2"].arrays
    assert rows["standard"].arrays["N x N"] == 4 * 512 * 512 * 4  # S and P, out and in


def test_standard_attention_moves_the_same_whatever_the_chip_holds(over_memory):
    assert len({rows["standard"].moved for rows in over_memory.values()}) == 1


def test_traffic_times_memory_is_constant(over_memory):
    """The rest is Q and O, which move once whatever M is: 1 of 16 parts where N / Br is 8."""
    products = [M * rows["FA2"].read for M, rows in over_memory.items()]
    assert max(products) < 1.05 * min(products)


def test_a_small_chip_makes_keys_outside_move_more_than_standard(over_memory):
    assert over_memory[32]["FA1"].moved > over_memory[32]["standard"].moved
    assert over_memory[128]["FA1"].moved < over_memory[128]["standard"].moved
    assert crossover("FA1", 64) == pytest.approx(3 * 64**2, rel=0.05)
    assert crossover("FA2", 64) < crossover("FA1", 64)


def test_a_memory_without_room_for_a_tile_is_refused():
    with pytest.raises(ValueError, match="M must hold a 1 x 1 tile, 261 elements at d = 64, got 2"):
        counted(64, 64, 8)
    with pytest.raises(ValueError, match="memory must hold a 64x64 tile, 82944 bytes at d=64"):
        counted(64, 64, 64 * KIB, tile=(64, 64))


# The counted memory by itself


def lines_of(count):
    return torch.zeros(count * LINE // 4)


def test_what_was_used_least_recently_goes_out():
    a, b, c = lines_of(1), lines_of(1), lines_of(1)
    with Scratchpad(3 * LINE, lambda x: "made", a=a, b=b, c=c) as chip:
        for x in (a, b, a, c, a, b):  # and a sum each: c's throws out b, a stays, b comes again
            x.sum()
    assert (chip.read["a"], chip.read["b"], chip.read["c"]) == (LINE, 2 * LINE, LINE)


def test_a_changed_line_is_written_once_and_what_is_deleted_never():
    a = lines_of(4)
    with Scratchpad(64 * LINE, lambda x: "made", a=a) as chip:
        (a + 1).sum()
        a.add_(1).mul_(2)
    assert chip.written == {"a": 4 * LINE} and chip.read["a"] == 4 * LINE


def test_an_operator_that_overwrites_does_not_read():
    a, b = lines_of(2), lines_of(2)
    with Scratchpad(64 * LINE, lambda x: "made", a=a, b=b) as chip:
        a.zero_()
        torch.add(b, 1, out=a)
        torch.zeros_like(a)
        a[:16].copy_(b[:16])
    assert chip.read["a"] == 0 and chip.read["b"] == 2 * LINE


# The papers' figures


def test_figure_2_of_the_paper_comes_out_of_its_passes():
    whole = total(moves([(1, *step) for step in GPT2], 1024, 64))
    assert whole == 18 * 1024**2 + 12 * 1024 * 64
    assert abs(whole * 1024 * 2 / 1e9 - 40.3) < 0.1
    tile = best_tile("FA1", 192 * KIB // 2, 64)
    flash = sum(total(traffic("FA1", 1024, 64, *tile, backward)) for backward in (False, True))
    assert tile == (64, 384) and abs(flash * 1024 * 2 / 1e9 - 4.4) < 0.25


def test_64K_tokens_have_32_249_and_455_flop_a_byte_on_an_A100():
    found = [intensity(name, 65536, 64, CHIPS["A100-40GB"]) for name in ("standard", "FA1", "FA2")]
    assert [round(x) for x in found] == [32, 249, 455]


def test_six_trips_make_the_articles_figures():
    trips = [(step.array, side) for step in traffic("standard", 1024, 64)
             for side in ("read", "written") if getattr(step, side)]
    assert [array for array, _ in trips] == ["Q", "K", "S", "S", "P", "P", "V", "O"]
    said = {c.claim: c.here for c in article_claims()}
    assert said["traffic, n=1024"] == "26.0 MB" and said["traffic, n=64K"].endswith("= 96 GiB")


def test_the_slopes_are_measured(over_memory):
    rows = [row for M in (64, 32, 128) for row in over_memory[M].values()]
    rows += [row for N in (128, 256) for row in counted(N, 64, 64 * KIB)]
    said = {c.claim: c.here for c in claims(rows, 64)}
    assert -1.0 <= float(said["traffic of flash over M"][2:]) <= -0.9
    assert 1.8 <= float(said["traffic of flash over N"][2:]) <= 2.0
    assert said["traffic of standard over M"] == "none"


def test_flop_of_a_step_of_training():
    assert [sum(flop(name, 8, 2, b) for b in (False, True)) for name in ("standard", "FA1")] == [
        12 * 64 * 2, 14 * 64 * 2]


# The roofline


def test_a_chip_waits_for_memory_below_its_ridge_alone():
    chip = Chip("c", peak=100.0, bandwidth=10.0, on_chip=KIB, cores=1, source="s", call=2.0)
    assert chip.ridge == 10
    assert [attainable(chip, x) for x in (1, 10, 20)] == [10, 100, 100]
    spent = predicted(chip, "standard", 4, 4, launches=3)
    assert spent == {"products": 0, "memory": total(traffic("standard", 4, 4)) * 2 / 10, "calls": 6}


def test_the_tile_of_a_chip_fits_into_it():
    for chip in CHIPS.values():
        M = chip.on_chip // 2
        assert on_chip(*best_tile("FA2", M, 64), 64) <= M < on_chip(
            best_tile("FA2", M, 64)[0] + 1, 64, 64)
        B = square_tile(M, 64)
        assert on_chip(B, B, 64) <= M < on_chip(2 * B, 2 * B, 64)
        assert chip.source


# In C, under valgrind


@pytest.mark.skipif(not (shutil.which("valgrind") and shutil.which("cc")),
                    reason="needs valgrind and a C compiler")
@pytest.mark.parametrize("M, B", [(32, 16), (64, 32), (128, 64)])
def test_a_simulated_cache_reads_what_the_formula_says(M, B):
    formula = 4 * sum(p.read for p in traffic("FA2", 512, 64, B, B))
    assert read_in_c(512, 64, B, M * KIB) == pytest.approx(formula, rel=0.1)


@pytest.mark.skipif(not (shutil.which("valgrind") and shutil.which("cc")),
                    reason="needs valgrind and a C compiler")
def test_in_c_a_tail_is_read_once_too():
    found = read_in_c(500, 64, 32, 64 * KIB)
    formula = 4 * sum(p.read for p in traffic("FA2", 500, 64, 32, 32))
    assert found == pytest.approx(formula, rel=0.1)


# The command


def test_the_steps_are_those_of_the_length_that_is_named():
    done = command("io_model.py", "--seq-len", "16", "128", "--memory", "65536", "--head-dim", "32")
    assert "What moves, of one head, N=128, d=32, 64x64 tiles" in done.stdout


def test_the_command_writes_what_it_counted(tmp_path):
    done = command("io_model.py", "--seq-len", "64", "128", "--memory", "16384", "--head-dim", "32",
                   "--json", tmp_path / "io.json", "--plot", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "io.json").read_text())["rows"]
    flash = [r for r in rows if r["tool"] == "counted" and r["name"] == "FA2"]
    assert {(r["N"], r["memory"]) for r in flash} == {
        (64, 16384), (128, 16384), (128, 8192), (128, 32768)}
    assert all(r["read"] == r["formula_read"] for r in flash)
    assert "| standard           | S = Q K^T " in done.stdout
    assert (tmp_path / "traffic.png").stat().st_size > 0


def test_the_roofline_command_sets_the_measured_time_beside_the_predicted(tmp_path):
    done = command("roofline.py", "--device", "cpu", "--seq-len", "64", "--chip", "910B3",
                   "--json", tmp_path / "r.json", "--plot", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert {r["chip"] for r in rows if r["tool"] == "roofline"} == {"910B3"}
    timed = [r for r in rows if r["tool"] == "predicted"]
    assert [r["name"] for r in timed] == ["standard", "flash", "flash-auto"]
    assert all(r["seconds"] > 0 and r["products"] + r["memory"] > 0 for r in timed)
    assert "measured by others" in done.stdout and (tmp_path / "roofline.png").exists()


@pytest.mark.parametrize("name, options, says", [
    ("io_model.py", ["--memory", "100"], "argument --memory: M must hold a 1 x 1 tile"),
    ("io_model.py", ["--memory", "32768", "--br", "64", "--bc", "64", "--seq-len", "64"],
     "argument --br: memory must hold a 64x64 tile"),
    ("io_model.py", ["--memory", "none"], "argument --memory"),
    ("io_model.py", ["--br", "16", "--bc", "auto"], "argument --br: a number is taken for --br"),
    ("io_model.py", ["--seq-len", "1000000"], "counting at N = 1000000 needs"),
    ("roofline.py", ["--head-dim", "25000"], "argument --head-dim: M must hold a 1 x 1 tile"),
    ("roofline.py", ["--chip", "910"], "argument --chip"),
    ("roofline.py", ["--memory", "16"], "argument --memory: M must hold a 1 x 1 tile"),
])
def test_wrong_values_are_one_line_and_exit_2(name, options, says):
    done = command(name, *options)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and says in done.stderr
