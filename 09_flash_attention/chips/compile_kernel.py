"""How the size of on-chip memory chooses the tile: the kernel compiled for real chips without one.

    bash scripts/compile.sh 910b        the Ascend 910B3, by triton-ascend, in its own environment
    bash scripts/compile.sh hopper      Hopper (H100, H200), by Triton

The kernel is that of flash_triton.py. For each dtype, head size and tile the table says whether it
fits and what it takes on the chip. It ends with 1 where the launcher finds no tile that fits, or
its first is not the best that the newest compiler takes (910B), or where one spills (Hopper).
Source of the paper's tile: FlashAttention (arXiv 2205.14135), Algorithm 1, line 1.
"""

import itertools
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the lessons and `lab`

from lab.cases import dtype_name
from common import cli
from common.report import console, print_table, track, write_json
from flash_triton import DTYPES, INTERPRETED, SMALLER, flash_attention_kernel, padded, tile_of

import torch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TRITON_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def source(dtype, d, tile, causal):
    """Return the kernel as Triton compiles it in a launch on contiguous Q, K, V of head size d."""
    constants = dict(d=d, dv=d, D=padded(d), DV=padded(d), Br=tile[0], Bc=tile[1], CAUSAL=causal,
                     FILL="ascend" in triton.backends.backends, q_d=1, k_d=1, v_d=1)
    types = {name: f"*{TRITON_DTYPES[dtype]}" for name in "QKVO"}
    types.update(L="*fp32", scale="fp32")
    names = flash_attention_kernel.arg_names
    signature = {name: types.get(name, "i32") for name in names if name not in constants}
    if "ascend" in triton.backends.backends:  # Triton 3.2
        return ASTSource(flash_attention_kernel, signature, constants)
    signature.update(dict.fromkeys(constants, "constexpr"))
    aligned = [name for name in (*"QKVOL", *signature) if re.fullmatch("[QKVOL]|[qkv]_[bhn]", name)]
    return ASTSource(flash_attention_kernel, {name: signature[name] for name in names},
                     {(names.index(name),): value for name, value in constants.items()},
                     {(names.index(name),): [["tt.divisibility", 16]] for name in aligned})


# Ascend


ASCEND = "Ascend910B3"
ASCEND_BYTES = {"ub": 192 * 1024, "cbuf": 512 * 1024, "cc": 128 * 1024}  # UB, L1, L0C of a core
ASCEND_TILES = list(itertools.product((64, 128, 256), (64, 128, 256)))
BITS = {"f16": 16, "bf16": 16, "f32": 32, "i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64}


@dataclass
class AscendRow:
    """Bytes planned in UB, L1 and L0C; where the compiler refuses, the memory and what it asks.

    best: the best tile that fits. chosen: the launcher's, the first of its tiles that fits.
    """

    compiler: str
    dtype: str
    d: int
    causal: bool
    Br: int
    Bc: int
    ub: Optional[int] = None
    cbuf: Optional[int] = None
    cc: Optional[int] = None
    refused: str = ""
    best: bool = False
    chosen: bool = False
    chip: str = ASCEND


def ascend_rows(compilers, dtypes, sizes):
    """Compile for the 910B3: AscendRows for each dtype, head size, and causal or not.

    By the last compiler in every tile, by the others in the launcher's until one fits.
    """
    rows, problems = [], list(itertools.product(dtypes, sizes, (False, True)))
    most = len(problems) * (9 + 3 * len(compilers))
    console.print(f"up to {most} compiles of a second or two each")
    for dtype, d, causal in track("compile", problems):
        own = list(dict.fromkeys(
            tile[:2] for tile in (tile_of("npu", dtype, d, d, causal), *SMALLER)))
        for compiler in compilers:
            newest, group = compiler is compilers[-1], []
            compile_tile = ascend_compiler(compiler)
            for tile in own + [t for t in ASCEND_TILES if newest and t not in own]:
                row = AscendRow(release_of(compiler), dtype_name(dtype), d, causal, *tile)
                found = compile_tile(source(dtype, d, tile, causal))
                if isinstance(found, str):
                    row.refused = found
                else:
                    row.ub, row.cbuf, row.cc = (found.get(space) for space in ASCEND_BYTES)
                    row.chosen = tile in own and not any(r.chosen for r in group)
                group.append(row)
                if row.chosen and not newest:
                    break
            # K and V are read once for each query block: the largest Br reads least. Then the
            # largest Bc, the fewest steps. Bc below 64 would leave vector lanes empty: they take 64
            # float32.
            fits = [row for row in group if not row.refused]
            if newest and fits:
                max(fits, key=lambda row: (row.Br, row.Bc)).best = True
            rows += sorted(group, key=lambda row: (row.Br, row.Bc))
    return rows


def release_of(compiler):
    """'1.2.0' of a folder ascendnpu-ir-1.2.0."""
    return Path(compiler).name.rpartition("-")[2]


PATH = os.environ["PATH"]


def ascend_compiler(folder):
    """Return compile(source) -> {memory: bytes}, or the compiler's refusal as a string.

    Before 1.2.0 a compiler keeps its plan to itself: {}.

    folder: holds the package ascendnpuir. It is triton-ascend's own way to the last step: hivmc,
    which is part of CANN, is not there. What stands in for a card is the answer to its name. Raises
    Refused where triton-ascend or the compiler is missing.
    """
    binaries = Path(folder).resolve() / "ascendnpuir" / "bin"
    if "ascend" not in triton.backends.backends or not binaries.is_dir():
        raise cli.Refused(f"it needs triton-ascend and ascendnpu-ir in {folder}: "
                          "bash scripts/compile.sh 910b installs them")
    os.environ.update(TRITON_ASCEND_ARCH=ASCEND, TRITON_ALWAYS_COMPILE="1",
                      PATH=f"{binaries}:{PATH}")
    # The backend's own globals: Triton loads a second copy of the module beside the imported one.
    backend = triton.backends.backends["ascend"].compiler.add_stages.__globals__
    backend["NPUUtils"] = lambda: SimpleNamespace(get_arch=lambda: ASCEND)
    said = subprocess.run([binaries / "bishengir-compile", "--help-hidden"], capture_output=True)
    keeps, seen = b"save-temps" in said.stdout, {}
    backend["subprocess"] = SimpleNamespace(run=partial(run_and_keep, seen, keeps))

    def compile_source(source):
        with tempfile.TemporaryDirectory() as folder:
            seen.update(folder=folder, said="")
            try:
                triton.compile(source, target=GPUTarget("npu", ASCEND, 0))
            except Exception as stopped:
                if "overflow" in seen["said"] or "Cannot find hivmc" not in seen["said"]:
                    return refusal(seen["said"] or str(stopped))
            return planned_bytes(Path(folder, "module.hivm.opt.mlir").read_text()) if keeps else {}

    return compile_source


def run_and_keep(seen, keeps, command, **options):
    """Run a compiler as subprocess.run does. What it says goes to seen["said"]; where it keeps its
    plan, that goes to seen["folder"].
    """
    if Path(command[0]).name == "bishengir-compile" and keeps:
        command = [*command, f"--save-temps={seen['folder']}"]
    for _ in range(3):  # both compilers crash now and then, on inputs that they take next time
        done = subprocess.run(command, **{**options, "check": False})
        seen["said"] = done.stderr.decode()
        if done.returncode >= 0:
            break
        seen["said"] = f"{Path(command[0]).name} ended by signal {-done.returncode}"
    done.check_returncode()
    return done


def refusal(said):
    """Return what the compiler refuses, 'ub overflow: 395328 bytes, 201%', or its last line."""
    overflow = re.search(r"(\w+) overflow, requires (\d+) bits while (\d+) bits", said)
    if overflow:
        memory, need, room = overflow.group(1), int(overflow.group(2)), int(overflow.group(3))
        return f"{memory} overflow: {need // 8} bytes, {need / room:.0%}"
    return said.strip().splitlines()[-1]


def planned_bytes(module):
    """Return {memory: bytes} of the compiler's plan: the highest end of a buffer in each memory."""
    plan = {}
    buffer = r"pointer_cast\(([^)]*)\).*?memref<((?:\d+x)*)(\w+)[^#\n]*#hivm\.address_space<(\w+)>"
    for addresses, dimensions, dtype, memory in re.findall(buffer, module):
        size = math.prod(int(n) for n in dimensions.split("x") if n) * BITS[dtype] // 8
        for address in re.findall(r"%c(\d+)_i64", addresses):
            plan[memory] = max(plan.get(memory, 0), int(address) + size)
    return plan


def show_ascend(args, dtypes):
    rows = ascend_rows(args.compilers, dtypes, args.head_dim)
    cells = []
    for r in rows:
        used = [f"{n} ({n / room:.0%})" if n is not None else "-" for n, room in
                zip((r.ub, r.cbuf, r.cc), ASCEND_BYTES.values())]
        verdict = r.refused or "fits" + ", best" * r.best
        cells.append((r.dtype, r.d, r.causal, r.compiler, f"{r.Br}x{r.Bc}", *used,
                      verdict + ", launcher's" * r.chosen))
    print_table(f"Compiled for {ASCEND}: bytes of a core's UB, L1 and L0C",
                ["dtype", "d", "causal", "compiler", "Br x Bc", "UB", "L1", "L0C", ""], cells)
    print_paper_tile("UB", ASCEND_BYTES["ub"], args.head_dim)
    console.print(
        f"compiled and planned by the real compilers (triton-ascend {version('triton-ascend')}, "
        f"ascendnpu-ir {', '.join(map(release_of, args.compilers))}); not linked by CANN's hivmc "
        "and not run on a card, so nothing here speaks of time or of results.")
    newest = release_of(args.compilers[-1])
    problems = {(r.compiler, r.dtype, r.d, r.causal): False for r in rows}
    problems.update({(r.compiler, r.dtype, r.d, r.causal): r.best or r.compiler != newest
                     for r in rows if r.chosen})
    return rows, all(problems.values())


# Hopper


HOPPER_SHARED = 227 * 1024  # bytes that a block may take
HOPPER_TILES = {
    2: [(64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2),
        (64, 16, 8, 2)],
    4: [(32, 16, 8, 2), (32, 32, 8, 2), (64, 16, 8, 2), (64, 32, 8, 2)],
}


@dataclass
class HopperRow:
    """registers and spilled bytes of a thread, shared bytes of a block, matrix instructions."""

    dtype: str
    d: int
    causal: bool
    Br: int
    Bc: int
    num_warps: int
    num_stages: int
    registers: int
    spilled: int
    shared: int
    wgmma: int
    tf32: bool
    chosen: bool
    chip: str = "Hopper, sm_90"


def hopper_rows(dtypes, sizes):
    """Compile for Hopper: a HopperRow for each dtype, head size, causal or not, and tile."""
    found = tuple(map(int, triton.__version__.split(".")[:2]))
    if "nvidia" not in triton.backends.backends or found < (3, 3):
        raise cli.Refused(f"it needs Triton 3.3 or newer for CUDA, found {triton.__version__}: "
                          "bash scripts/compile.sh hopper installs it")
    rows = []
    problems = list(itertools.product(dtypes, sizes, (False, True)))
    for dtype, d, causal in track("compile", problems):
        for tile in HOPPER_TILES[dtype.itemsize]:
            chosen = tile == tile_of("hopper", dtype, d, d, causal)
            rows.append(HopperRow(dtype_name(dtype), d, causal, *tile,
                                  *compile_hopper(dtype, d, tile, causal), chosen))
    return rows


def compile_hopper(dtype, d, tile, causal):
    """Compile to a cubin for sm_90: registers, spilled bytes, shared bytes, wgmma, uses tf32."""
    kernel = triton.compile(source(dtype, d, tile, causal), target=GPUTarget("cuda", 90, 32),
                            options={"num_warps": tile[2], "num_stages": tile[3]})
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        usage, code = (
            subprocess.run([tools / tool, option, cubin], capture_output=True, text=True,
                           check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c")))
    registers, spilled = (int(re.search(rf"{name}:(\d+)", usage).group(1))
                          for name in ("REG", "STACK"))
    tf32 = "tf32" in kernel.asm["ptx"]
    return registers, spilled, kernel.metadata.shared, code.count("HGMMA"), tf32


def show_hopper(args, dtypes):
    rows = hopper_rows(dtypes, args.head_dim)
    print_table(
        "Compiled for Hopper (sm_90): registers and spills of a thread, shared memory of a block",
        ["dtype", "d", "causal", "Br x Bc", "warps", "stages", "registers", "spilled bytes",
         "shared bytes", "wgmma", "tf32", ""],
        [(r.dtype, r.d, r.causal, f"{r.Br}x{r.Bc}", r.num_warps, r.num_stages, r.registers,
          r.spilled, f"{r.shared} ({r.shared / HOPPER_SHARED:.0%})", r.wgmma,
          "yes" if r.tf32 else "no",
          "launcher's" if r.chosen else "too much" if r.shared > HOPPER_SHARED else "")
         for r in rows])
    print_paper_tile("shared memory", HOPPER_SHARED, args.head_dim)
    console.print(f"compiled to a cubin by Triton {version('triton')} and its own ptxas; not run.")
    return rows, not any(r.tf32 or r.chosen and r.spilled for r in rows)


def print_paper_tile(memory, room, sizes):
    M = room // 4  # float32 numbers
    tiles = ((d, math.ceil(M / (4 * d))) for d in sizes)
    console.print(f"\nthe paper's Bc = ceil(M / 4d), Br = min(Bc, d), for M = {M} float32 in "
                  f"{memory}: " + ", ".join(f"{min(Bc, d)}x{Bc} at d={d}" for d, Bc in tiles))


def main():
    options = cli.Parser(description=__doc__)
    options.add_argument("chip", choices=["910b", "hopper"])
    options.add_argument("--dtype", nargs="+", default=[*map(dtype_name, DTYPES)],
                         choices=[*map(dtype_name, DTYPES)], help="one or more (all)")
    options.add_argument("--head-dim", nargs="+", type=cli.whole_number(1, 256), metavar="d",
                         default=[64, 128, 256], help="one or more (64 128 256)")
    options.add_argument("--compilers", nargs="+", metavar="DIR", default=["ascendnpu-ir"],
                         help="910b: folders that hold the package ascendnpuir, the newest last")
    options.add_argument("--json", type=cli.file_to_write, metavar="FILE",
                         help="write the rows there as well")
    args = options.parse_args()
    if INTERPRETED:
        raise cli.Refused("TRITON_INTERPRET is set, and the interpreter does not compile: unset it")
    show = show_ascend if args.chip == "910b" else show_hopper
    rows, held = show(args, [getattr(torch, name) for name in args.dtype])
    if not held:
        console.print("NOT HELD: a problem has no tile that fits, the launcher's first is not the "
                      "best, or a tile of it spills")
    if args.json:
        write_json(args.json, torch.device("cpu"), [("compile", row) for row in rows])
    return 0 if held else 1


if __name__ == "__main__":
    cli.serve(main)
