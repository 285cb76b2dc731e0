"""The kernel compiled without a chip: what is read from the compilers, and what the tables hold."""

import json
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

import ascend
import compile_kernel
import hopper
import run_ascend_ir
from ascend import planned_bytes, refusal
from launches import KERNELS, ONE_TILE

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


GAVE_UP = """[ERROR] Cannot find hivmc under $PATH
[NOTE] Cbuf overflow detected; automatically set enable-auto-multi-buffer to false and retrying \
compilation.
[NOTE] Due to Cbuf overflow, set enable-auto-multi-buffer to false; compilation then succeeded.
[ERROR] Failed to run BiShengIR pipeline
"""


@pytest.mark.parametrize("said, found", [
    (SAID, "ub overflow: 393216 bytes, 200%"), ("[ERROR] Cannot find hivmc under $PATH", {}),
    (GAVE_UP, {"single": True}), ("x: error: no such op", "x: error: no such op")])
def test_a_compile_that_only_hivmc_stops_fits_if_need_be_with_one_buffer(
        monkeypatch, tmp_path, said, found):
    program = tmp_path / "bishengir-compile"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{said}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setattr(ascend, "compile_with", lambda run, path, source: run(
        [program], capture_output=True))
    assert ascend.plan(tmp_path, False, None) == found


def show_910b(monkeypatch, capsys, compiled, ran=()):
    """Run `compile_kernel.py 910b`; compiled(tile, mask, folder) is its compiler."""
    monkeypatch.setattr(compile_kernel, "INTERPRETED", False)
    monkeypatch.setattr(compile_kernel, "version", lambda package: "3.2.0")
    monkeypatch.setattr(compile_kernel, "in_parallel", lambda title, rows_of, problems: [
        row for problem in problems for row in rows_of(*problem)])
    monkeypatch.setattr(compile_kernel, "launches_of", lambda platform, dtype, d, mask: {
        kernel: SimpleNamespace(tile=(128, 128, 4, 1), source=lambda tile: (tile[:2], mask))
        for kernel in KERNELS})
    monkeypatch.setattr(ascend, "compiler", lambda folder: lambda source: compiled(*source, folder))
    monkeypatch.setattr(run_ascend_ir, "tools", lambda: None)
    monkeypatch.setattr(run_ascend_ir, "show", lambda *_: list(ran))
    monkeypatch.setattr(sys, "argv", ["compile_kernel.py", "910b", "--head-dim", "64", "--dtype",
                                      "float16", "--kernel", "flash_attention_kernel",
                                      "dK_dV_kernel", "--compilers", "npu-1.0", "npu-1.2"])
    return compile_kernel.main(), capsys.readouterr().out


def rows_of(out, said):
    """Return [kernel, mask, compiler, tile] of the rows that say so."""
    cells = [[cell.strip() for cell in line.split("|")[1:]] for line in out.splitlines()
             if said in line]
    return [[row[0], row[3], row[4], row[5]] for row in cells if len(row) > 5]


def fits_up_to(room, tile):
    plan = {"ub": 98304, "cbuf": 131072, "cc": 65536}
    return "ub overflow: 198720 bytes, 101%" if tile[0] * tile[1] > room else plan


def test_the_table_for_ascend_shows_bytes_shares_and_refusals(monkeypatch, capsys):
    def compiled(tile, mask, folder):
        if mask == "full" and sorted(tile) == [64, 256]:
            return "ub overflow: 198720 bytes, 101%"
        return fits_up_to(4096 if "1.0" in folder else 8192 if mask == "window" else 16384, tile)

    code, out = show_910b(monkeypatch, capsys, compiled)
    assert "98304 (50%) | 131072 (25%) | 65536 (50%)" in " ".join(out.split())
    assert "ub overflow: 198720 bytes, 101%" in out and "not run on a card" in out
    assert "64x192 at d=64" in out
    chosen = rows_of(out, "launcher's")
    assert chosen[:2] == [["flash_attention_kernel", "full", "1.0", "64x64"],
                          ["flash_attention_kernel", "full", "1.2", "128x128"]]
    assert ["flash_attention_kernel", "window", "1.2", "128x64"] in chosen
    best = {(kernel, mask): tile for kernel, mask, _, tile in rows_of(out, "best")}
    # With causal 256x64 fits, and keeps more on the chip; keys stay there in dK_dV_kernel.
    assert best == {("flash_attention_kernel", "full"): "128x128",
                    ("flash_attention_kernel", "causal"): "256x64",
                    ("flash_attention_kernel", "window"): "128x64",
                    ("dK_dV_kernel", "full"): "128x128", ("dK_dV_kernel", "causal"): "64x256",
                    ("dK_dV_kernel", "window"): "64x128"}
    assert code == 1 and "NOT HELD" in out


def test_the_best_tile_that_fits_ends_with_0_and_what_runs_wrong_with_1(monkeypatch, capsys):
    def compiled(tile, mask, folder):
        return fits_up_to(16384, tile) if 256 not in tile else "cc overflow: 196608 bytes, 150%"

    assert show_910b(monkeypatch, capsys, compiled)[0] == 0
    wrong = SimpleNamespace(passed=False)
    assert show_910b(monkeypatch, capsys, compiled, [wrong])[0] == 1


def test_two_buffers_are_better_than_a_larger_tile_with_one(monkeypatch, capsys):
    def compiled(tile, mask, folder):
        return {"ub": 1, "cbuf": 1, "cc": 1, **({"single": True} if min(tile) > 64 else {})}

    code, out = show_910b(monkeypatch, capsys, compiled)
    assert "fits, with one buffer, launcher's" in out
    assert {row[3] for row in rows_of(out, "best")} == {"256x64", "64x256"} and code == 1


def test_no_tile_that_fits_an_old_compiler_ends_with_1(monkeypatch, capsys):
    code, out = show_910b(monkeypatch, capsys, lambda tile, mask, folder: (
        "ub overflow: 198720 bytes, 101%" if "1.0" in folder or 256 in tile else
        {"ub": 1, "cbuf": 1, "cc": 1}))
    assert code == 1 and "NOT HELD" in out


def test_without_triton_ascend_one_line_says_which_script_installs_it():
    done = subprocess.run([sys.executable, FOLDER / "compile_kernel.py", "910b"], text=True,
                          capture_output=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "scripts/compile.sh 910b" in done.stderr


HOPPER = """
import json, sys, torch
sys.path.insert(0, {folder!r})
from launches import launches_of
from hopper import compile_hopper
launches = launches_of("hopper", torch.bfloat16, 128, "causal")
launches["float32"] = launches_of("hopper", torch.float32, 64, "full")["flash_attention_kernel"]
print(json.dumps([(name, *compile_hopper(launch.source(), launch.tile))
                  for name, launch in launches.items()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's CUDA tools are Linux programs")
def test_on_hopper_the_launchers_tiles_spill_nothing_and_float32_takes_no_tf32():
    done = subprocess.run([sys.executable, "-c", HOPPER.format(folder=str(FOLDER))], text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row[0] for row in rows} == {*KERNELS, "float32"}
    for name, registers, spilled, shared, wgmma, tf32 in rows:
        assert 0 < registers <= 255 and spilled == 0 and not tf32, name
        assert 0 < shared <= hopper.SHARED
        assert (wgmma > 0) == (name not in (*ONE_TILE, "float32")), name


@pytest.mark.parametrize("spilling, held", [
    ([(128, 64, 8, 3)], False),  # where a small tile would not
    ([(128, 64, 8, 3), *compile_kernel.SMALLEST], True), ([(64, 64, 4, 3)], True)])
def test_hopper_holds_where_a_launchers_tile_spills_only_if_all_do(
        monkeypatch, capsys, spilling, held):
    launch = SimpleNamespace(tile=(128, 64, 8, 3), source=lambda tile: tile)
    monkeypatch.setattr(compile_kernel, "launches_of", lambda *_: {"dQ_kernel": launch})
    monkeypatch.setattr(compile_kernel, "in_parallel", lambda title, rows_of, problems: [
        row for problem in problems for row in rows_of(*problem)])
    monkeypatch.setattr(compile_kernel, "HOPPER_TILES", {"dQ_kernel": [launch.tile]})
    monkeypatch.setattr(hopper, "check_triton", lambda: None)
    monkeypatch.setattr(hopper, "compile_hopper", lambda source, tile: (
        254, 8 if tile in spilling else 0, 131072, 24, False))
    args = SimpleNamespace(head_dim=[128])
    _, found = compile_kernel.show_hopper(args, [("dQ_kernel", torch.bfloat16, 128, "full")])
    assert found == held and "131072 (56%)" in capsys.readouterr().out
