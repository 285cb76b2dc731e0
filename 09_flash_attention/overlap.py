"""Overlap: the products of one block run while the softmax of another does, on two units of a core.

    python overlap.py               a timeline, and what taking turns gains on two chips
    python overlap.py --plot DIR    and the timeline as a picture

Attention needs two units that can't do each other's work: one for products (cube, tensor cores) and
one for the rest (vector, multi-function unit). A block's stages depend on each other, so with one
block a unit waits while the other works. With two blocks they take turns: FlashAttention-3 (arXiv
2407.08608), section 3. Here that is simulated from published rates; nothing is run on a device.
"""

import math
import sys
from dataclasses import dataclass
from os.path import dirname, realpath
from pathlib import Path

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, plotted, print_table
from lab.machines import CHIPS, PUBLISHED_910B2

MOST = 2**22  # keys: a second or two


@dataclass(frozen=True)
class Core:
    """One core of a chip. stages: (name, unit, seconds) of one step, Br queries against Bc keys, in
    the order in which they need each other; the first two make P. theirs: measured TFLOP/s.
    """

    chip: str
    Br: int
    Bc: int
    d: int
    stages: tuple
    theirs: str

    @property
    def cores(self):
        return CHIPS[self.chip].cores

    @property
    def flop(self):
        """FLOPs of the two products of a step."""
        return 4 * self.Br * self.Bc * self.d


def ascend():
    """A core of a 910B2, by the cycles that pto-isa states for its hand-written kernel
    (kernels/manual/common/flash_atten/README.md); the clock follows from peak / cores / 8192.
    """
    hertz = CHIPS["910B2"].peak / CHIPS["910B2"].cores / 8192
    cycles = (("Q K^T", "cube", 2487), ("softmax", "vector", 2489), ("P V", "cube", 1617),
              ("update O", "vector", 834))
    return Core("910B2", 128, 256, 128, tuple((*stage, n / hertz) for *stage, n in cycles),
                "168.5 by hand, 150.8 torch_npu")


def hopper():
    """A core of an H100 by FlashAttention-3, section 3.1: its peak in products, and 3.9 T/s of
    exponentials. Nothing else is counted, so it is an upper bound.
    """
    chip, Br, Bc, d = CHIPS["H100-SXM"], 128, 128, 128
    product, exp = 2 * Br * Bc * d / chip.peak * chip.cores, Br * Bc / 3.9e12 * chip.cores
    return Core(chip.name, Br, Bc, d, (("Q K^T", "tensor cores", product),
                                       ("softmax", "special", exp),
                                       ("P V", "tensor cores", product)),
                "661; 582 without overlap")


@dataclass(frozen=True)
class Slot:
    """What a unit does from start to end, in seconds. step: of which step it is a stage."""

    unit: str
    stage: str
    step: int
    start: float
    end: float


def simulate(stages, steps, turns):
    """Return the Slots of so many steps on one core.

    A stage starts when its unit is free and the stage before it has ended. One after another, all
    share one unit. In turns, Q K^T and P of the next step are issued before P V of this one, the
    order of `flash_attention_3`.
    """
    first, second = stages[:2], stages[2:]
    if turns:
        issued = [(0, first)] + [(step + later, part) for step in range(steps)
                                 for later, part in ((1, first), (0, second))
                                 if step + later < steps]
    else:
        issued = [(step, stages) for step in range(steps)]
    free, ready, slots = {}, {}, []
    for step, part in issued:
        for stage, unit, seconds in part:
            worker = unit if turns else "one"
            start = max(free.get(worker, 0.0), ready.get(step, 0.0))
            free[worker] = ready[step] = start + seconds
            slots.append(Slot(unit, stage, step, start, start + seconds))
    return slots


def seconds(core, steps, turns):
    """Return how long one core needs for so many steps."""
    return max(slot.end for slot in simulate(core.stages, steps, turns))


@dataclass
class RateRow:
    """TFLOP/s of the whole chip in the long run, and the share of its peak in products."""

    chip: str
    serial_tflops: float
    serial_share: float
    turns_tflops: float
    turns_share: float
    theirs: str


def rates(core, steps=64):
    """Return what a chip full of such cores reaches, its start and end aside: a RateRow."""
    peak, found = CHIPS[core.chip].peak, []
    for turns in (False, True):
        step = (seconds(core, 2 * steps, turns) - seconds(core, steps, turns)) / steps
        found += [core.flop * core.cores / step / 1e12, core.flop * core.cores / step / peak]
    return RateRow(core.chip, *found, core.theirs)


@dataclass
class TimeRow:
    """Microseconds of one head of N queries and keys. by_hand, fused: published, None where not."""

    N: int
    rounds: int
    serial: float
    turns: float
    turns_tflops: float
    by_hand: float
    fused: float


def times(core, N):
    """Return the times of one head on all cores: a TimeRow.

    The blocks of Br queries are shared out to the cores: each takes `rounds` of them, one after
    another, and the last round may leave cores idle.
    """
    steps, rounds = math.ceil(N / core.Bc), math.ceil(math.ceil(N / core.Br) / core.cores)
    serial, turns = (1e6 * rounds * seconds(core, steps, turns) for turns in (False, True))
    return TimeRow(N, rounds, serial, turns, 4 * N * N * core.d / turns / 1e6,
                   *PUBLISHED_910B2.get(N, (None, None)))


def timeline(core, turns, steps=4, width=80):
    """Draw the slots as text, a line a unit: steps 0, 2, ... in capitals, 1, 3, ... in small."""
    scale = width / seconds(core, steps, False)
    lines = {unit: [" "] * width for _, unit, _ in core.stages}
    for slot in simulate(core.stages, steps, turns):
        a, b = (round(x * scale) for x in (slot.start, slot.end))
        letter = slot.stage[0].lower() if slot.step % 2 else slot.stage[0].upper()
        lines[slot.unit][a:b] = letter * (b - a)
    return [f"{unit:7}|{''.join(line)}|" for unit, line in lines.items()]


def legend(core):
    return ", ".join(f"{name[0].upper()} is {name}" for name, *_ in core.stages)


def plot(path, core, steps=4):
    """Draw both schedules, a panel each: grey for one block, hatched for the other."""
    units = list(dict.fromkeys(unit for _, unit, _ in core.stages))
    with plotted(path, 2, 1, figsize=(7, 3.6), sharex=True) as panels:
        for panel, turns in zip(panels, (False, True)):
            for s in simulate(core.stages, steps, turns):
                odd, start, length = s.step % 2, s.start * 1e6, (s.end - s.start) * 1e6
                panel.barh(units.index(s.unit), length, left=start, edgecolor="black",
                           color="white" if odd else "lightgrey", hatch="///" * odd)
                panel.text(start + length / 2, units.index(s.unit), f"{s.stage[0].upper()}{s.step}",
                           ha="center", va="center", bbox={"color": "white", "pad": 1})
            panel.set(yticks=range(len(units)), yticklabels=units,
                      title="in turns" if turns else "one after another")
            panel.invert_yaxis()
        panels[1].set(xlabel=f"microseconds on one core of a {core.chip}; {legend(core)}")


def show(core, rate_rows, time_rows):
    console.print(f"\nOne core of a {core.chip}: {legend(core)}; every other step in small letters")
    for title, turns in (("one after another", False), ("in turns", True)):
        console.print(f"\n{title}\n" + "\n".join(timeline(core, turns)))
    print_table(
        "TFLOP/s in the long run, all cores, d = 128, float16",
        ["chip", "one after another", "of peak", "in turns", "of peak", "measured (theirs)"],
        [(r.chip, f"{r.serial_tflops:.1f}", f"{r.serial_share:.0%}", f"{r.turns_tflops:.1f}",
          f"{r.turns_share:.0%}", r.theirs) for r in rate_rows])
    print_table(
        f"One head on a {core.chip}, d = {core.d}: us, simulated and published",
        ["N", "rounds", "one after another", "in turns", "TFLOP/s", "by hand (theirs)",
         "in turns / by hand", "torch_npu (theirs)"],
        [(r.N, r.rounds, f"{r.serial:.1f}", f"{r.turns:.1f}", f"{r.turns_tflops:.1f}",
          *((r.by_hand, f"{r.turns / r.by_hand:.3f}", r.fused) if r.by_hand else "---"))
         for r in time_rows])
    console.print(
        "\nThe simulation knows the four stages alone. Their own cost model adds the start of the "
        "call, the filling of the pipeline and signals for each tile, which weigh most where N is "
        "small. Their cores also slow each other down: from 172.9 TFLOP/s a chip for one core to "
        "120.0 for eight, at 8192 keys.")


def main():
    options = lesson.parser(__doc__, "seq-len", "json", "plot")
    options.set_defaults(device="cpu")

    def check(args):
        if max(args.seq_len or [0]) > MOST:
            options.error(f"argument --seq-len: at most {MOST} is simulated, got {args.seq_len}")

    args, device, _ = lesson.begin(options, check=check)
    core = ascend()
    rate_rows = [rates(chip) for chip in (core, hopper())]
    time_rows = [times(core, N) for N in args.seq_len or PUBLISHED_910B2]
    show(core, rate_rows, time_rows)
    if args.plot:
        plot(Path(args.plot) / "overlap.png", core)
    return lesson.finish(args, device, [*(("rates", row) for row in rate_rows),
                                        *(("times", row) for row in time_rows)])


if __name__ == "__main__":
    cli.serve(main)
