"""gpu_check.py, whose parts run anywhere: on a CPU in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # Triton looks as it loads: see conftest.py
try:
    import flash_triton_decoding  # noqa: F401
except ImportError as missing:  # no package for this platform, or an old one
    pytest.skip(str(missing), allow_module_level=True)
finally:
    del os.environ["TRITON_INTERPRET"]

import gpu_check
from common import timing

CPU = torch.device("cpu")


def small(**options):
    given = {"Nq": 32, "batch": 1, "heads": 2, "d": 64, "dtype": torch.bfloat16, **options}
    return gpu_check.Case(**given)


@pytest.mark.usefixtures("interpreted")
def test_each_kind_of_work_is_compared_with_the_backends_and_written_as_csv_and_plot(
        tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gpu_check, "IN_A_ROW", 1)
    monkeypatch.setattr(timing, "MAX_ROUNDS", 2)
    cases = {"decode": small(Nq=1, Nk=48, kv_heads=1), "window": small(causal=True, window=(9, 0)),
             "backward": small(causal=True), "forward": small()}
    rows = [row for work, case in cases.items()
            for row in gpu_check.compare_backends(work, case, CPU)]
    gpu_check.print_speed(rows)
    gpu_check.write_speed(tmp_path, rows, "this CPU")
    out = capsys.readouterr().out
    assert cases.keys() == gpu_check.SPEED_CASES.keys()
    for work in cases:
        assert {"triton", "MATH"} <= {r.name for r in rows if r.work == work and r.seconds}, out
        assert (tmp_path / f"{work}.png").stat().st_size > 1000
    assert "CUDNN_ATTENTION: " in out
    lines = (tmp_path / "speed.csv").read_text().splitlines()
    assert len(lines) == 1 + len(rows) == 22 and lines[0].startswith("work,name,d,causal,N,batch")
    of = {(r.work, r.name): r for r in rows}
    flash, trained = of["forward", "FLASH_ATTENTION"], of["backward", "FLASH_ATTENTION"]
    assert flash.tflops == pytest.approx(4 * 2 * 32 * 32 * 64 / flash.seconds / 1e12)
    assert trained.tflops == pytest.approx(  # 3.5 times the forward's, over the kept half
        3.5 * 4 * 2 * (32 * 33 / 2) * 64 / trained.seconds / 1e12)
    read = of["decode", "triton, pages"]
    assert read.gb_per_s == pytest.approx(2 * 48 * 64 * 2 / read.seconds / 1e9) and not read.tflops
    tiles = gpu_check.compare_tiles(cases["forward"], CPU)
    assert dict(tiles)[64, 64, 4, 1] == 1 and len(tiles) > 4


@pytest.mark.usefixtures("interpreted")
def test_gradients_and_other_strides_are_verified_too_and_a_wrong_kernel_fails(monkeypatch):
    case = small(Nq=20, heads=None, dtype=torch.float32, causal=True)
    monkeypatch.setattr(gpu_check, "WITH_GRADIENTS", [20])
    assert [row.passed for row in gpu_check.verify(case, CPU)] == [True] * 5
    monkeypatch.setattr(gpu_check, "flash_attention_triton", lambda Q, K, V, **masks: V * Q * K)
    assert [row.passed for row in gpu_check.verify(case, CPU)] == [False] * 5


@pytest.mark.usefixtures("interpreted")
def test_decoding_is_verified_split_and_from_pages():
    case = small(Nq=1, Nk=300, kv_heads=1, dtype=torch.float32, d=32)
    rows = gpu_check.verify(case, CPU)
    assert [(row.name, row.passed) for row in rows] == [
        ("triton", True), ("triton, split", True), ("triton, pages", True)]


def test_it_says_where_a_kernel_is_slower_than_the_lesson_asks(capsys):
    def row(name, N, times, work="backward"):
        return SimpleNamespace(work=work, name=name, d=64, N=N, causal=False, ratio_to_triton=times)

    gpu_check.print_held([row("FLASH_ATTENTION", 2048, 1.12), row("MATH", 8192, 1.1),
                          row("FLASH_ATTENTION", 1024, 2), row("triton", 8192, 1),
                          row("MATH", 8192, None), row(gpu_check.FLEX, 8192, 2)])
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 1 and "backward: below 0.9 of FLASH_ATTENTION at d=64" in out


def test_without_a_gpu_it_is_one_line_and_exit_2():
    done = subprocess.run([sys.executable, Path(gpu_check.__file__), "--device", "cpu"], text=True,
                          capture_output=True)
    assert done.returncode == 2 and "needs a CUDA GPU" in done.stderr
    assert len(done.stderr.splitlines()) == 1
