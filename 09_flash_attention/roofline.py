"""The roofline: how fast memory lets attention run, on known chips and on this machine.

    python roofline.py                   what the chips allow; predicted and measured here
    python roofline.py --chip 910B2      one chip
    python roofline.py --plot DIR        and the picture

A chip that has done the FLOPs for each byte before the next byte arrives waits for memory. Below
that many FLOPs a byte (the ridge) the rate is bytes a second times FLOPs a byte, above it the peak.
What is moved: io_model.py. Source of the model: Williams, Waterman and Patterson, "Roofline: an
insightful visual performance model for multicore architectures", CACM 52 (4), 2009.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from os.path import dirname, realpath
from pathlib import Path

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, logarithmic, plotted, print_table
from common.timing import count_launches
from flash_attention import flash_attention_forward, standard_attention
from lab.bench import Candidate, benchmark
from lab.formulas import forward_bytes
from lab.machines import (
    CHIPS, KEPT, PUBLISHED_910B2, attainable, intensity, measured_chip, predicted)
from lab.show import print_reasons
from lab.traffic import square_tile

import torch

LENGTHS = (1024, 4096)  # that are timed
OVER, FAR = tuple(2**i for i in range(10, 17)), 65536  # that are drawn; the second article's 64K
ARTICLE_N, ARTICLE_CALL = 2048, 25e-6  # the first article's; seconds a call that explain its time


@dataclass
class RoofRow:
    """One algorithm on one chip: what the roofline allows. flop_a_byte; flops: FLOP/s."""

    chip: str
    name: str
    N: int
    flop_a_byte: float
    flops: float
    share: float


def roofs(chips, N, d):
    """Return a RoofRow for each chip and algorithm, with the chip's best tile."""
    found = []
    for chip in chips:
        for name in ("standard", "FA1", "FA2"):
            dense = intensity(name, N, d, chip)
            flops = attainable(chip, dense)
            found.append(RoofRow(chip.name, name, N, dense, flops, flops / chip.peak))
    return found


@dataclass
class PredictedRow:
    """Seconds of one call. By the roofline: products, memory, calls; outside of it: exponentials,
    fresh pages; and measured.
    """

    name: str
    shape: str
    launches: int
    products: float
    memory: float
    calls: float
    exp: float
    fresh: float
    seconds: float
    why: str

    @property
    def roofline(self):
        return self.products + self.memory + self.calls


def predictions(here, cases, tile, device, seed):
    """Time standard and flash attention on `device`, beside what the roofline of `here` says."""
    rows = []
    for case in cases:
        candidates = [Candidate("standard", standard_attention, forward_bytes("standard", case))]
        for name, (Br, Bc) in (("flash", tile), ("flash-auto", ("auto", "auto"))):
            Br, Bc, at_once = case.tile(Br, Bc, device)
            candidates.append(Candidate(
                name, partial(flash_attention_forward, Br=Br, Bc=Bc),
                forward_bytes("flash", case, Br, Bc, at_once), (Br, Bc)))
        for row in benchmark(case, candidates, device=device, seed=seed):
            if row.seconds is None:
                continue
            N, d = case.Nq, case.d
            kind = "standard" if row.name == "standard" else "FA2"
            spent = predicted(here, kind, N, d, row.launches, row.Br and (row.Br, row.Bc))
            matrix = N * N * max(here.width, 4)  # S, S * scale and P
            new = 3 * matrix * (kind == "standard" and device.type == "cpu" and matrix > KEPT)
            rows.append(PredictedRow(row.name, row.shape, row.launches, *spent.values(),
                                     N * N * here.exp, new * here.fresh, row.seconds, row.why))
    return rows


# The tables


def show_roofs(chips, rows):
    print_table("Chips", ["chip", "source", "TFLOP/s", "TB/s", "FLOP a byte", "chip KiB x cores"],
                [(c.name, c.source, f"{c.peak / 1e12:.4g}", f"{c.bandwidth / 1e12:.4g}",
                  f"{c.ridge:.0f}", f"{c.on_chip // 1024} x {c.cores}") for c in chips], left=2)
    print_table(f"The roofline, N={rows[0].N}, with the tile that suits the chip",
                ["chip", "name", "FLOP a byte", "TFLOP/s", "of peak"],
                [(r.chip, r.name, f"{r.flop_a_byte:.0f}", f"{r.flops / 1e12:.3g}",
                  f"{r.share:.0%}") for r in rows], left=2)


def show_predictions(here, rows):
    print_table(
        f"Predicted and measured on {here.name}: ms",
        ["name", "Q", "products", "memory", "calls", "roofline", "exp", "fresh pages", "measured",
         "measured / all"],
        [(r.name, r.shape, *(f"{s * 1e3:.3g}" for s in (
            r.products, r.memory, r.calls, r.roofline, r.exp, r.fresh, r.seconds)),
          f"{r.seconds / (r.roofline + r.exp + r.fresh):.2f}{'?' * bool(r.why)}")
         for r in rows], left=2)
    print_reasons(rows)
    console.print(
        f"\nmeasured for it: a matmul, {here.peak / 1e9:.4g} GFLOP/s; a copy, "
        f"{here.bandwidth / 1e9:.3g} GB/s; a call on one number, {here.call * 1e6:.2g} us; an exp, "
        f"{here.exp * 1e9:.2g} ns; a byte of new memory, {here.fresh * 1e9:.2g} ns.\n"
        "Left out: the passes of each operator over a tile in the cache, and what a call on a tile "
        "costs more than one on a number.")


def show_published():
    chip = CHIPS["910B2"]
    print_table("A 910B2, one head, d=128, float16: us; measured by others (pto-isa), not here",
                ["N", "roofline", "hand-written kernel", "torch_npu's fused"],
                [(N, f"{sum(predicted(chip, 'FA2', N, 128).values()) * 1e6:.4g}", *theirs)
                 for N, theirs in PUBLISHED_910B2.items()])
    Q = torch.zeros(1, ARTICLE_N, 64)
    launches = count_launches(partial(flash_attention_forward, Q, Q, Q))
    loop = predicted(replace(CHIPS["910B3"], width=4, call=ARTICLE_CALL), "FA2", ARTICLE_N, 64,
                     launches, (64, 64))
    console.print(
        "\nThe roofline takes the products at their peak and everything else for nothing. By the "
        "kernel's published cycles its products take twice as long as at the peak, and the softmax "
        "can't all run beside them: overlap.py. Below N = 4096 starting the kernel counts."
        "\nIt takes S and P to stay on the chip. On a 910B the two units exchange them through a "
        "workspace in global memory, which the L2 cache (192 MiB) holds."
        f"\nArticle 1's 341 ms on a 910B3: N={ARTICLE_N} in 64x64 tiles is {launches} calls of our "
        f"loop; at {ARTICLE_CALL * 1e6:.0f} us each {loop['calls'] * 1e3:.0f} ms, and "
        f"{(loop['products'] + loop['memory']) * 1e3:.2g} ms for everything else.")


def draw(folder, chips, rows):
    """Draw the roof of each chip, and under it standard and flash attention over N."""
    with plotted(Path(folder) / "roofline.png", figsize=(7, 4.5)) as axes:
        reach = [2.0**i for i in range(2, 12)]
        for number, chip in enumerate(chips):
            axes.plot(reach, [attainable(chip, x) / 1e12 for x in reach], color=f"C{number}",
                      linewidth=1, label=chip.name)
            for name, marker in (("standard", "s"), ("FA1", "^"), ("FA2", "o")):
                points = [(r.flop_a_byte, r.flops / 1e12) for r in rows
                          if r.name == name and r.chip == chip.name]
                axes.plot(*zip(*points), marker, color=f"C{number}", markersize=4,
                          label=f"{name}, N = {OVER[0]} to {OVER[-1]}" if not number else None)
        logarithmic(axes, {4, 32, 256, 2048})
        axes.set(xlabel="FLOP a byte", ylabel="TFLOP/s", title="what memory allows (roofline)")
        axes.legend(fontsize="small")


def main():
    options = lesson.parser(__doc__, "device", "dtype", "seq-len", "head-dim", "br", "bc", "seed",
                            "json", "plot")
    options.add_argument("--memory", type=cli.whole_number(1), metavar="BYTES",
                         help="on the chip, in place of a chip's own (1 MiB for this machine)")
    options.add_argument("--chip", choices=[*CHIPS, "this"], help="one of them (all)")

    def check(args):
        asked = [CHIPS[args.chip]] if args.chip in CHIPS else CHIPS.values()
        least = args.memory or min(chip.on_chip for chip in asked)
        try:
            square_tile(least // 8, args.head_dim or 64)  # 8: the widest element
        except ValueError as refused:
            options.error(f"argument --{'memory' if args.memory else 'head-dim'}: {refused}")

    args, device, cases = lesson.begin(options, LENGTHS, check)
    here = measured_chip(device, cases[0].dtype, args.memory or 2**20)
    chips = [here if args.chip == "this" else CHIPS[args.chip]] if args.chip else [
        *CHIPS.values(), here]
    chips = [replace(chip, on_chip=args.memory or chip.on_chip) for chip in chips]
    rows = [row for N in OVER for row in roofs(chips, N, cases[0].d)]
    show_roofs(chips, [row for row in rows if row.N == FAR])
    timed = predictions(here, cases, lesson.tile(args), device, args.seed)
    show_predictions(here, timed)
    show_published()
    status = lesson.finish(args, device, [*(("roofline", row) for row in rows),
                                          *(("predicted", row) for row in timed)])
    if args.plot is not None:
        draw(args.plot, chips, rows)
    return status


if __name__ == "__main__":
    cli.serve(main)
