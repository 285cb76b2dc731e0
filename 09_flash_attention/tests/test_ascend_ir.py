"""run_ascend_ir.py: what shows where linalg IR runs on a CPU, and what the kernels give there."""

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

import run_ascend_ir
from common.cli import Refused

ROOT = Path(__file__).resolve().parents[2]
try:
    missing = run_ascend_ir.tools() and ""
except Refused as refused:
    missing = str(refused)
needs_tools = pytest.mark.skipif(bool(missing), reason=missing)

# Y = 2 X for n numbers, 4 a program, in the words of triton-ascend.
DOUBLE = """
module {
  func.func @double(%arg0: memref<?xi8>, %arg1: memref<?xi8>,
      %arg2: memref<?xf32> {tt.tensor_kind = 0 : i32},
      %arg3: memref<?xf32> {tt.tensor_kind = OUT : i32}, %arg4: i32,
      %arg5: i32, %arg6: i32, %arg7: i32, %arg8: i32, %arg9: i32, %arg10: i32) {
    %c4 = arith.constant 4 : index
    %zero = arith.constant 0.0 : f32
    %two = arith.constant dense<2.0> : tensor<4xf32>
    %p = arith.index_cast %arg8 : i32 to index
    %n = arith.index_cast %arg4 : i32 to index
    %at = arith.muli %p, %c4 : index
    %left = arith.subi %n, %at : index
    %rows = arith.minsi %left, %c4 : index
    %x = memref.reinterpret_cast %arg2 to offset: [%at], sizes: [4], strides: [1]
        : memref<?xf32> to memref<4xf32, strided<[1], offset: ?>>
    %alloc = memref.alloc() : memref<4xf32>
    %some = arith.cmpi slt, %rows, %c4 : index
    scf.if %some {
      linalg.fill ins(%zero : f32) outs(%alloc : memref<4xf32>)
    } {hivm.unlikely_condition}
    %from = memref.subview %x[0] [%rows] [1]
        : memref<4xf32, strided<[1], offset: ?>> to memref<?xf32, strided<[1], offset: ?>>
    %to = memref.subview %alloc[0] [%rows] [1] : memref<4xf32> to memref<?xf32, strided<[1]>>
    memref.copy %from, %to
        : memref<?xf32, strided<[1], offset: ?>> to memref<?xf32, strided<[1]>>
    %block = bufferization.to_tensor %alloc restrict writable : memref<4xf32>
    %doubled = arith.mulf %block, %two : tensor<4xf32>
    %y = memref.reinterpret_cast %arg3 to offset: [%at], sizes: [4], strides: [1]
        : memref<?xf32> to memref<4xf32, strided<[1], offset: ?>>
    %part = tensor.extract_slice %doubled[0] [STORED] [1] : tensor<4xf32> to tensor<?xf32>
    %out = memref.subview %y[0] [STORED] [1]
        : memref<4xf32, strided<[1], offset: ?>> to memref<?xf32, strided<[1], offset: ?>>
    bufferization.materialize_in_destination %part in writable %out
        : (tensor<?xf32>, memref<?xf32, strided<[1], offset: ?>>) -> ()
    return
  }
}
"""


def double(monkeypatch, X, Y, n, stored="%rows", out=1):
    ir = DOUBLE.replace("STORED", stored).replace("OUT", str(out))
    monkeypatch.setattr(run_ascend_ir, "linalg", lambda compiler, source: ir)
    tiles = {}
    run_ascend_ir.run("", tiles, SimpleNamespace(
        arguments={"X": X, "Y": Y, "n": n, "Br": 4}, constants=lambda: {"Br": 4}, programs=(2,),
        source=lambda: None, tile=(4, 4, 4, 1), name="double",
        kernel=SimpleNamespace(__name__="double")))
    assert tiles == {"double": "4x4"}


@needs_tools
def test_the_programs_of_a_grid_fill_the_results_in_place(monkeypatch):
    X, wide = torch.randn(6), torch.zeros(3, 6)
    double(monkeypatch, X, wide[1], 6)
    assert wide[1].equal(2 * X)


@needs_tools
def test_a_masked_lane_that_counts_shows_as_nan(monkeypatch):
    X, Y = torch.randn(8), torch.zeros(8)
    double(monkeypatch, X, Y, 6, stored="%c4")  # two lanes that the load has masked are stored
    assert Y[:6].equal(2 * X[:6]) and Y[6:].isnan().all()


@needs_tools
@pytest.mark.parametrize("size, stored, out, said", [
    (6, "%c4", 1, "Y: written outside of it"), (8, "%rows", 0, "Y: an input was written")])
def test_a_write_where_none_belongs_is_found(monkeypatch, size, stored, out, said):
    with pytest.raises(RuntimeError, match=said):
        double(monkeypatch, torch.randn(8), torch.zeros(size), 6, stored, out)


def test_without_the_tools_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(run_ascend_ir, "TOOLS", ("mlir-opt-no-such",))
    with pytest.raises(Refused, match="mlir-opt-no-such: apt-get install mlir-19-tools"):
        run_ascend_ir.tools()


@needs_tools
@pytest.mark.skipif(not (ROOT / ".venv-910b/complete").exists(),
                    reason="needs triton-ascend: bash scripts/compile.sh 910b installs it")
def test_what_triton_ascend_makes_of_the_kernels_is_right():
    done = subprocess.run(
        [ROOT / ".venv-910b/bin/python", run_ascend_ir.__file__, "--head-dim", "64", "--dtype",
         "float32", "--compiler", ROOT / ".venv-910b/ascendnpu-ir-1.2.0"], text=True,
        capture_output=True)
    assert done.returncode == 0 and done.stdout.count("pass") >= 12, done.stdout + done.stderr


def test_without_triton_ascend_the_script_ends_with_2_in_one_line():
    done = subprocess.run([sys.executable, run_ascend_ir.__file__], text=True, capture_output=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
