"""The kernel compiled without a chip: what is read from the compilers, and what the tables hold."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

try:
    import flash_triton  # noqa: F401
except ImportError as missing:  # no package for this platform, or an old one
    pytest.skip(str(missing), allow_module_level=True)

import compile_kernel
from compile_kernel import planned_bytes, refusal
from flash_triton import tile_of

FOLDER = Path(compile_kernel.__file__).parent

# Two lines each, as the compiler writes them.
MODULE = """
    %7 = hivm.hir.pointer_cast(%c16384_i64) : memref<4x4x16x16xf32, #hivm.address_space<cc>>
    %3 = hivm.hir.pointer_cast(%c0_i64) : memref<32x64xf32, #hivm.address_space<ub>>
    %4 = hivm.hir.pointer_cast(%c8192_i64, %c8448_i64) : memref<32xf32, #hivm.address_space<ub>>
    %5 = hivm.hir.pointer_cast(%c9000_i64) : memref<64xi1, strided<[1]>, #hivm.address_space<ub>>
    %0 = hivm.hir.pointer_cast(%c57344_i64) : memref<4x4x16x16xf16, #hivm.address_space<cbuf>>
"""
SAID = """[ERROR] Cannot find hivmc under $PATH
loc("kernel.ttadapter.mlir":2:1): error: ub overflow, requires 3145728 bits while 1572864 bits \
available! (possible reason: tiling basic block is too large)
[ERROR] Failed to run BiShengIR pipeline
"""


def test_planned_bytes_is_the_highest_end_of_a_buffer_in_each_memory():
    assert planned_bytes(MODULE) == {
        "cc": 16384 + 4 * 4 * 16 * 16 * 4, "ub": 9000 + 8, "cbuf": 57344 + 4 * 4 * 16 * 16 * 2}


def test_a_refusal_keeps_the_compilers_own_figure():
    assert refusal(SAID) == "ub overflow: 393216 bytes, 200%"
    assert refusal("warning\nerror: something else\n") == "error: something else"


def show_910b(monkeypatch, capsys, compiled):
    """Run `compile_kernel.py 910b`; compiled(dtype, d, tile, causal, folder) is its compiler."""
    monkeypatch.setattr(compile_kernel, "INTERPRETED", False)
    monkeypatch.setattr(compile_kernel, "version", lambda package: "3.2.0")
    monkeypatch.setattr(compile_kernel, "source", lambda *arguments: arguments)
    monkeypatch.setattr(compile_kernel, "ascend_compiler",
                        lambda folder: lambda source: compiled(*source, folder))
    monkeypatch.setattr(sys, "argv", ["compile_kernel.py", "910b", "--head-dim", "64",
                                      "--dtype", "float16", "--compilers", "npu-1.0", "npu-1.2"])
    return compile_kernel.main(), capsys.readouterr().out


def test_the_table_for_ascend_shows_bytes_shares_and_refusals(monkeypatch, capsys):
    def compiled(dtype, d, tile, causal, folder):
        room = 16384 if "1.2" in folder else 4096
        if tile[0] * tile[1] > room or causal and tile[0] > 128:
            return "ub overflow: 198720 bytes, 101%"
        return {"ub": 98304, "cbuf": 131072, "cc": 65536}

    code, out = show_910b(monkeypatch, capsys, compiled)
    assert code == 0
    assert "98304 (50%) | 131072 (25%) | 65536 (50%)" in " ".join(out.split())
    assert "ub overflow: 198720 bytes, 101%" in out and "not run on a card" in out
    assert "64x192 at d=64" in out
    chosen = [[cell.strip() for cell in line.split("|")][3:6] for line in out.splitlines()
              if "launcher's |" in line]
    assert chosen == [["False", "1.0", "64x64"], ["False", "1.2", "256x64"],
                      ["True", "1.0", "64x64"], ["True", "1.2", "128x128"]]


def test_no_tile_that_fits_an_old_compiler_ends_with_1(monkeypatch, capsys):
    code, out = show_910b(monkeypatch, capsys, lambda dtype, d, tile, causal, folder: (
        "ub overflow: 198720 bytes, 101%" if "1.0" in folder or tile[0] * tile[1] > 16384 else
        {"ub": 1, "cbuf": 1, "cc": 1}))
    assert code == 1 and "NOT HELD" in out


def test_a_tile_of_the_launcher_that_is_not_the_best_ends_with_1(monkeypatch, capsys):
    code, out = show_910b(monkeypatch, capsys, lambda *_: {"ub": 1, "cbuf": 1, "cc": 1})
    assert code == 1 and "fits, launcher's" in out


def test_without_triton_ascend_one_line_says_which_script_installs_it():
    done = subprocess.run([sys.executable, FOLDER / "compile_kernel.py", "910b"], text=True,
                          capture_output=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "scripts/compile.sh 910b" in done.stderr


HOPPER = """
import json, sys, torch
sys.path.insert(0, {folder!r})
from compile_kernel import compile_hopper
from flash_triton import tile_of
print(json.dumps([
    (str(dtype), *compile_hopper(dtype, d, tile_of("hopper", dtype, d, d, causal), causal))
    for dtype in (torch.bfloat16, torch.float32) for d in (64, 128) for causal in (False, True)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's CUDA tools are Linux programs")
def test_on_hopper_the_launchers_tiles_spill_nothing_and_float32_takes_no_tf32():
    done = subprocess.run([sys.executable, "-c", HOPPER.format(folder=str(FOLDER))], text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 8
    for dtype, registers, spilled, shared, wgmma, tf32 in rows:
        assert 0 < registers <= 255 and spilled == 0 and not tf32
        assert 0 < shared <= compile_kernel.HOPPER_SHARED
        assert (wgmma > 0) == (dtype == "torch.bfloat16")


def test_the_tiles_for_hopper_do_not_hold_where_one_of_the_launcher_spills(monkeypatch, capsys):
    chosen = tile_of("hopper", torch.bfloat16, 128, 128, False)
    spilling = chosen
    monkeypatch.setattr(compile_kernel, "compile_hopper", lambda dtype, d, tile, causal: (
        254, 8 if tile == spilling else 0, 131072, 24, False))
    args = SimpleNamespace(head_dim=[128])
    rows, held = compile_kernel.show_hopper(args, [torch.bfloat16])
    assert not held and len(rows) == 2 * len(compile_kernel.HOPPER_TILES[2])
    assert "131072 (56%)" in capsys.readouterr().out
    spilling = "another"
    assert compile_kernel.show_hopper(args, [torch.bfloat16])[1]


# gpu_check.py, whose parts run anywhere


@pytest.mark.usefixtures("interpreted")
def test_gpu_check_compares_with_the_backends_and_writes_csv_and_plot(tmp_path, capsys):
    import gpu_check

    gpu_check.IN_A_ROW, device = 1, torch.device("cpu")
    cases = [gpu_check.Case(32, batch=1, heads=2, d=64, dtype=torch.bfloat16, causal=causal)
             for causal in (False, True)]
    rows = [row for case in cases for row in gpu_check.compare_backends(case, device)]
    gpu_check.print_speed(rows)
    gpu_check.write_speed(tmp_path, rows, "this CPU")
    out = capsys.readouterr().out
    ran = {row.name for row in rows if row.seconds}
    assert {"triton", "FLASH_ATTENTION", "MATH"} <= ran and "CUDNN_ATTENTION: " in out
    lines = (tmp_path / "speed.csv").read_text().splitlines()
    assert len(lines) == 1 + len(rows) == 11 and lines[0].startswith("name,d,causal,N,batch")
    assert (tmp_path / "speed.png").stat().st_size > 1000
    [flash] = [row for row in rows if row.name == "FLASH_ATTENTION" and not row.causal]
    assert flash.tflops == pytest.approx(4 * 2 * 32 * 32 * 64 / flash.seconds / 1e12)
    tiles = gpu_check.compare_tiles(cases[0], device)
    assert dict(tiles)[64, 64, 4, 1] == 1 and len(tiles) > 4


@pytest.mark.usefixtures("interpreted")
def test_gpu_check_verifies_other_strides_too_and_a_wrong_kernel_fails(monkeypatch):
    import gpu_check

    case = gpu_check.Case(20, d=64, dtype=torch.float32, causal=True)
    assert [row.passed for row in gpu_check.verify(case, torch.device("cpu"))] == [True, True]
    monkeypatch.setattr(gpu_check, "flash_attention_triton", lambda Q, K, V, causal: V * 0)
    assert [row.passed for row in gpu_check.verify(case, torch.device("cpu"))] == [False, False]


def test_gpu_check_says_where_the_kernel_is_slower_than_the_lesson_asks(capsys):
    import gpu_check

    def row(name, d, N, times):
        return SimpleNamespace(name=name, d=d, N=N, causal=False, ratio_to_triton=times)

    gpu_check.print_held([row("FLASH_ATTENTION", 64, 2048, 1.01), row("MATH", 128, 8192, 1.2),
                          row("CUDNN_ATTENTION", 128, 8192, 1.1), row("MATH", 64, 8192, 3),
                          row("FLASH_ATTENTION", 64, 1024, 2), row("triton", 128, 8192, 1)])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_gpu_check_without_a_gpu_is_one_line_and_exit_2():
    done = subprocess.run([sys.executable, FOLDER / "gpu_check.py", "--device", "cpu"], text=True,
                          capture_output=True)
    assert done.returncode == 2 and "needs a CUDA GPU" in done.stderr
    assert len(done.stderr.splitlines()) == 1
