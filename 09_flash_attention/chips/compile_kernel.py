"""How the size of on-chip memory chooses the tile: the kernels compiled for real chips without one.

    bash scripts/compile.sh 910b        the Ascend 910B3, by triton-ascend, in its own environment
    bash scripts/compile.sh hopper      Hopper (H100, H200), by Triton

The kernels are those of flash_triton*.py, as their launchers launch them: for each dtype, head size
and mask the table says whether a tile fits and what it takes on the chip. It ends with 1 where the
launcher finds no tile that fits, or in float16 the newest compiler takes a better one (910B), or
where one spills though another would not (Hopper). On two cores all of it takes well over ten
minutes; --kernel, --dtype and --head-dim choose.
Source of the paper's tile: FlashAttention (arXiv 2205.14135), Algorithm 1, line 1.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Optional

chips = Path(__file__).resolve().parent
sys.path[:0] = [str(chips.parent), str(chips)]  # for the lessons and `lab`; `python -I` has neither

from lab.cases import dtype_name
from lab.triton_tools import DTYPES, INTERPRETED, padded, tiles_from
from common import cli
from common.report import console, print_table, write_json
import ascend
import hopper
import run_ascend_ir
from launches import KERNELS, MASKS, ONE_TILE, PAGED, in_parallel, launches_of

import torch


# Ascend


MOST_NUMBERS = 128 * 128  # of a block: as float32 it is a third of UB, which holds several


@dataclass
class AscendRow:
    """Bytes planned in UB, L1 and L0C; where the compiler refuses, the memory and what it asks.

    single: it fits only with one buffer for each load, which then waits for the computation. best:
    the best tile that fits with two, or else with one. chosen: the launcher's, the first of its
    tiles that fits.
    """

    kernel: str
    compiler: str
    dtype: str
    d: int
    mask: str
    Br: int
    Bc: int
    ub: Optional[int] = None
    cbuf: Optional[int] = None
    cc: Optional[int] = None
    refused: str = ""
    single: bool = False
    best: bool = False
    chosen: bool = False
    chip: str = ascend.CHIP


def ascend_rows(compilers, thorough, kernel, dtype, d, mask):
    """Compile a kernel for the 910B3 by each compiler in the launcher's tiles until one fits, and
    for the dtype `thorough` by the last in those that would be better: AscendRows.
    """
    launch, rows = launches_of("npu", dtype, d, mask)[kernel], []
    own = list(dict.fromkeys(tile[:2] for tile in tiles_from(launch.tile)))
    own = own[: 1 if kernel in ONE_TILE else None]
    for folder in compilers:
        row = partial(ascend_row, ascend.compiler(folder), launch, kernel, release_of(folder),
                      dtype_name(dtype), d, mask)
        group = first_that_fits(row, own)
        last = group[-1]
        last.chosen = not last.refused
        if folder == compilers[-1] and dtype == thorough:
            group += first_that_fits(row, own[len(group) :] if last.single else [], with_two=True)
            base = (group[-1].Br, group[-1].Bc) if not group[-1].refused else (0, 0)
            tried = {(row.Br, row.Bc) for row in group}
            group += first_that_fits(row, [tile for tile in better_tiles(kernel, d, own[0], base)
                                           if tile not in tried], with_two=True)
            fits = [row for row in group if not row.refused]
            if fits:
                max(fits, key=lambda row: (
                    not row.single, order(kernel, (row.Br, row.Bc)))).best = True
        rows += group
    return rows


def ascend_row(compile_source, launch, kernel, compiler, dtype, d, mask, tile):
    row = AscendRow(kernel, compiler, dtype, d, mask, *tile)
    found = compile_source(launch.source((*tile, 4, 1)))
    if isinstance(found, str):
        row.refused = found
    else:
        row.ub, row.cbuf, row.cc = (found.get(space) for space in ascend.BYTES)
        row.single = "single" in found
    return row


def first_that_fits(row_of, tiles, with_two=False):
    """Return the rows of `tiles` up to the first that fits, or fits with two buffers."""
    rows = []
    for tile in tiles:
        rows.append(row_of(tile))
        if not rows[-1].refused and not (with_two and rows[-1].single):
            break
    return rows


def order(kernel, tile):
    """Return by what the best tile is the largest.

    First by the block that stays on the chip, of queries, or in dK_dV_kernel of keys: the larger it
    is, the fewer times the others are read. Then by that which passes: fewer steps.
    """
    return tile[::-1] if kernel == "dK_dV_kernel" else tuple(tile)


def better_tiles(kernel, d, first, base):
    """Return the tiles that would be better than `base`, the best first.

    None whose blocks have more than MOST_NUMBERS, and none that passes fewer than 64 rows at a
    time: a vector instruction takes 64 float32. Decoding has as many rows as there are queries, in
    the launcher's `first` tile, and no more keys than a page of 128.
    """
    if kernel in ONE_TILE:
        return []
    decoding = kernel in ("split_kernel", PAGED)
    sizes = [(stays, passes) for stays in ([first[0]] if decoding else (256, 128, 64, 32))
             for passes in ((128, 64) if decoding else (256, 128, 64))
             if stays * max(passes, padded(d)) <= MOST_NUMBERS
             and (stays, passes) > order(kernel, base)]
    return [order(kernel, size) for size in sizes]


def release_of(compiler):
    """'1.2.0' of a folder ascendnpu-ir-1.2.0."""
    return Path(compiler).name.rpartition("-")[2]


def show_ascend(args, problems):
    thorough = problems[0][1]
    rows = in_parallel("compile", partial(ascend_rows, args.compilers, thorough), problems)
    cells = []
    for r in rows:
        used = [f"{n} ({n / room:.0%})" if n is not None else "-" for n, room in
                zip((r.ub, r.cbuf, r.cc), ascend.BYTES.values())]
        verdict = r.refused or "fits" + ", with one buffer" * r.single + ", best" * r.best
        cells.append((r.kernel, r.dtype, r.d, r.mask, r.compiler, f"{r.Br}x{r.Bc}", *used,
                      verdict + ", launcher's" * r.chosen))
    print_table(f"Compiled for {ascend.CHIP}: bytes of a core's UB, L1 and L0C",
                ["kernel", "dtype", "d", "mask", "compiler", "Br x Bc", "UB", "L1", "L0C", ""],
                cells)
    print_paper_tile("UB", ascend.BYTES["ub"], args.head_dim)
    console.print(
        f"compiled and planned by the real compilers (triton-ascend {version('triton-ascend')}, "
        f"ascendnpu-ir {', '.join(map(release_of, args.compilers))}); not linked by CANN's hivmc "
        "and not run on a card, so nothing here speaks of time.")
    problems = {(r.kernel, r.compiler, r.dtype, r.d, r.mask) for r in rows}
    chosen = {(r.kernel, r.compiler, r.dtype, r.d, r.mask) for r in rows if r.chosen}
    held = problems == chosen and all(r.chosen for r in rows if r.best)
    ran = run_the_ir(args)
    return rows + ran, held and all(r.passed for r in ran)


def run_the_ir(args):
    """Run what the newest compiler reads, where the tools are: run_ascend_ir's Rows."""
    try:
        run_ascend_ir.tools()
    except cli.Refused as missing:
        console.print(f"\nwhat it compiles from was not run on this CPU: {missing}")
        return []
    return run_ascend_ir.show(args.compilers[-1], args.kernel,
                              [getattr(torch, name) for name in args.dtype], args.head_dim)


# Hopper


# Beside the launcher's tile, in half types and without a mask, those that gpu_check.py times.
HOPPER_TILES = {
    "flash_attention_kernel": [(64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3),
                               (128, 128, 8, 2), (64, 16, 8, 2)],
    "dQ_kernel": [(64, 64, 4, 2), (64, 64, 8, 2), (128, 64, 8, 2), (128, 128, 8, 1)],
    "dK_dV_kernel": [(64, 64, 8, 2), (64, 128, 8, 2), (32, 128, 8, 2), (32, 64, 4, 2)],
}
SMALLEST = (32, 32, 8, 1), (16, 32, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1), (16, 16, 4, 1)


@dataclass
class HopperRow:
    """registers and spilled bytes of a thread, shared bytes of a block, matrix instructions."""

    kernel: str
    dtype: str
    d: int
    mask: str
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


def hopper_rows(kernel, dtype, d, mask):
    """Compile a kernel for Hopper: HopperRows. Where the launcher's tile spills, in small ones too,
    until one does not.
    """
    launch, rows = launches_of("hopper", dtype, d, mask)[kernel], []

    def compile_in(tile):
        found = hopper.compile_hopper(launch.source(tile), tile)
        rows.append(HopperRow(kernel, dtype_name(dtype), d, mask, *tile, *found,
                              tile == launch.tile))
        return not rows[-1].spilled

    if not compile_in(launch.tile) and kernel not in ONE_TILE:
        any(map(compile_in, SMALLEST))
    if dtype.itemsize == 2 and mask == "full":
        for tile in HOPPER_TILES.get(kernel, ()):
            if tile != launch.tile:
                compile_in(tile)
    return rows


def show_hopper(args, problems):
    hopper.check_triton()
    rows = in_parallel("compile", hopper_rows, problems)
    print_table(
        "Compiled for Hopper (sm_90): registers and spills of a thread, shared memory of a block",
        ["kernel", "dtype", "d", "mask", "Br x Bc", "warps", "stages", "registers",
         "spilled bytes", "shared bytes", "wgmma", "tf32", ""],
        [(r.kernel, r.dtype, r.d, r.mask, f"{r.Br}x{r.Bc}", r.num_warps, r.num_stages, r.registers,
          r.spilled, f"{r.shared} ({r.shared / hopper.SHARED:.0%})", r.wgmma,
          "yes" if r.tf32 else "no",
          "launcher's" if r.chosen else "too much" if r.shared > hopper.SHARED else "")
         for r in rows])
    print_paper_tile("shared memory", hopper.SHARED, args.head_dim)
    console.print(f"compiled to a cubin by Triton {version('triton')} and its own ptxas; not run.")
    spares = {(r.kernel, r.dtype, r.d, r.mask) for r in rows if not r.spilled}
    return rows, not any(
        r.tf32 or r.chosen and r.spilled and (r.kernel, r.dtype, r.d, r.mask) in spares
        for r in rows)


def print_paper_tile(memory, room, sizes):
    M = room // 4  # float32 numbers
    tiles = ((d, math.ceil(M / (4 * d))) for d in sizes)
    console.print(f"\nthe paper's Bc = ceil(M / 4d), Br = min(Bc, d), for M = {M} float32 in "
                  f"{memory}: " + ", ".join(f"{min(Bc, d)}x{Bc} at d={d}" for d, Bc in tiles))


def main():
    options = cli.Parser(description=__doc__)
    options.add_argument("chip", choices=["910b", "hopper"])
    options.add_argument("--kernel", nargs="+", default=KERNELS, choices=KERNELS,
                         help="one or more (all)")
    options.add_argument("--dtype", nargs="+", default=[*map(dtype_name, DTYPES)],
                         choices=[*map(dtype_name, DTYPES)],
                         help="one or more (all); 910b: the first is tried in better tiles too")
    options.add_argument("--head-dim", nargs="+", type=cli.whole_number(1, 256), metavar="d",
                         default=[64, 128, 256], help="one or more (64 128 256)")
    options.add_argument("--compilers", nargs="+", metavar="DIR", default=["ascendnpu-ir"],
                         help="910b: folders that hold the package ascendnpuir, the newest last")
    options.add_argument("--json", type=cli.file_to_write, metavar="FILE",
                         help="write the rows there as well")
    args = options.parse_args()
    if INTERPRETED:
        raise cli.Refused("TRITON_INTERPRET is set, and the interpreter does not compile: unset it")
    dtypes = [getattr(torch, name) for name in args.dtype]
    problems = [problem for problem in itertools.product(args.kernel, dtypes, args.head_dim, MASKS)
                if problem[0] not in ONE_TILE or problem[3] == "full"]
    show = show_ascend if args.chip == "910b" else show_hopper
    rows, held = show(args, problems)
    if not held:
        console.print("NOT HELD: a problem has no tile that fits, the launcher's first is not the "
                      "best, or a tile of it spills where another would not")
    if args.json:
        write_json(args.json, torch.device("cpu"), [("compile", row) for row in rows])
    return 0 if held else 1


if __name__ == "__main__":
    cli.serve(main)
