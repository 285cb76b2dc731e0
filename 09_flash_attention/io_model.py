"""The IO model: what attention moves between the large memory and the chip, by formula and counted.

    python io_model.py                    what each step moves, and what the running loops move
    python io_model.py --memory 32768     the same with 32 KiB on the chip
    python io_model.py --cachegrind       and counted once more: in C, under a simulated cache

A chip computes on what lies in its own small memory; the rest is fetched from the large one (HBM,
GM). `lab/traffic.py` says what each step of an algorithm fetches and stores. `lab/scratchpad.py`
counts what running code fetches and stores: the repository's own loops, unchanged. roofline.py
says what that costs in time.
Sources: FlashAttention (arXiv 2205.14135), section 3.2; FlashAttention-2 (2307.08691).
"""

import sys
from dataclasses import dataclass
from functools import partial
from os.path import dirname, realpath
from pathlib import Path
from statistics import mode as most_common

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, logarithmic, plotted, print_table, track
from flash_attention import flash_attention_forward
from flash_backward import flash_attention_backward
from generations import flash_attention_1
from lab.bench import need_room
from lab.cachegrind import cachegrind, compiler
from lab.machines import CHIPS, best_tile
from lab.scratchpad import Scratchpad
from lab.show import slope
from lab.tiles import AUTO
from lab.traffic import GPT2, flop, moves, on_chip, square_tile, steps, total, traffic

import torch

LENGTHS = (256, 512, 1024)
FAR = 65536  # the second article's 64K


def algorithm_0(Q, K, V):
    """The paper's Algorithm 0: three operators, each from memory to memory. Q comes scaled."""
    S = Q @ K.transpose(-2, -1)  # [B, N, N]
    P = torch.softmax(S, dim=-1)  # [B, N, N]
    return P @ V  # [B, N, d]


def forward_calls(Q, K, V, Br, Bc, spare):
    """Return [(name, tile, call, arrays)] of what is counted forward.

    FA1 takes half the rows where there is no room to spare: its step holds three more O_blocks.
    """
    half = max(1, Br // 2) if spare < 3 * Br * Q.shape[-1] else Br
    arrays = {"Q": Q, "K": K, "V": V}
    return [("standard", (Br, Bc), partial(algorithm_0, Q, K, V), arrays),
            ("FA1", (half, Bc), partial(flash_attention_1, Q[0], K[0], V[0], half, Bc), arrays),
            ("FA2", (Br, Bc), partial(flash_attention_forward, Q, K, V, Br, Bc), arrays)]


def backward_calls(Q, K, V, dO, Br, Bc):
    """Return the same of what is counted backward; the forward came before.

    'ours' is flash_backward.py: queries outside, so that dK and dV are summed in memory.
    """
    O, m, l = flash_attention_forward(Q, K, V, Br, Bc, return_m_l=True)
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    standard = partial(torch.autograd.grad, algorithm_0(*leaves), leaves, dO)
    ours = partial(flash_attention_backward, dO, Q, K, V, O, m, l, Br, Bc)
    return [("standard", (Br, Bc), standard, {**dict(zip("QKV", leaves)), "dO": dO}),
            ("ours", (Br, Bc), ours, {"Q": Q, "K": K, "V": V, "dO": dO, "O": O, "m": m, "l": l})]


@dataclass
class CountedRow:
    """Bytes that one call of one head moved; formula_*: by lab/traffic.py; arrays: by array."""

    name: str
    backward: bool
    N: int
    memory: int
    Br: int
    Bc: int
    read: int
    written: int
    formula_read: int
    formula_written: int
    arrays: dict

    @property
    def moved(self):
        return self.read + self.written


def counted(N, d, memory, dtype=torch.float32, tile=None, backward=False, seed=0):
    """Run each algorithm of one head with `memory` bytes on the chip: CountedRows.

    tile: (Br, Bc); None: square, the largest power of two that fits. A backward gets half of the
    memory for it, since it holds twice as much, and so do half types: the chip widens them. Where
    N = d arrays are told apart by nothing: S and P count as O. Raises ValueError where none fits.
    """
    width, wide = dtype.itemsize, max(dtype.itemsize, 4)
    room = memory // wide // (2 if backward or width < wide else 1)
    Br, Bc = (min(n, N) for n in tile or (square_tile(room, d),) * 2)
    spare = room - on_chip(Br, Bc, d)
    if spare < 0:
        raise ValueError(f"memory must hold a {Br}x{Bc} tile, {on_chip(Br, Bc, d) * wide} bytes "
                         f"at d={d}, got {room * wide}")
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(1, N, d, generator=generator).to(dtype) for _ in range(3 + backward)]
    result = "dQ dK dV" if backward else "O"

    def name_of(x):
        size = x.untyped_storage().nbytes() // width
        column = x.shape[-1] == 1 and size == N
        return "m l" if column else {N * N: "N x N", N * d: result}.get(size, "tiles")

    calls = (backward_calls(*inputs, Br, Bc) if backward else
             forward_calls(*inputs, Br, Bc, spare))
    rows = []
    for name, (Br, Bc), call, arrays in calls:
        with Scratchpad(memory, name_of, **arrays) as chip:
            kept = call()  # noqa: F841  the result outlives the call: it has to be stored
        passes = traffic(name, N, d, Br, Bc, backward)
        rows.append(CountedRow(
            name, backward, N, memory, Br, Bc,
            sum(chip.read.values()), sum(chip.written.values()),
            round(sum(p.read for p in passes) * width),
            round(sum(p.written for p in passes) * width), dict(chip.read + chip.written)))
    return rows


@dataclass
class Claim:
    """One claim in words: who says it, what they say, what comes out here, and why."""

    claim: str
    source: str
    says: str
    here: str
    why: str


def article_claims():
    """Return what the second article says of traffic."""
    n, d, width = FAR, 64, 2
    its = {N: 6 * (2 * N * N + N * d) * width for N in (1024, n)}
    ours = {N: total(traffic("standard", N, d)) * width for N in its}
    work, A100 = flop("standard", n, d), CHIPS["A100-80GB"]
    return [
        Claim("trips between HBM and chip", "article 2", "6", "6",
              "Q K in, S out; S in, P out; P V in, O out"),
        Claim("traffic, n=1024", "article 2", "25 MB", f"{its[1024] / 1e6:.1f} MB",
              f"its 6 (2 n^2 + n d); read by read, 4 n^2 + 4 n d: {ours[1024] / 1e6:.1f} MB"),
        Claim("traffic, n=64K", "article 2", "96 GB",
              f"{its[n] / 1e9:.0f} GB = {its[n] / 2**30:.0f} GiB",
              f"its formula counts n^2 twelve times, they move four times: {ours[n] / 1e9:.0f} GB"),
        Claim("time to move it at 2 TB/s", "article 2", "40 ms", f"{its[n] / 2e12 * 1e3:.1f} ms",
              f"{ours[n] / 2e12 * 1e3:.0f} ms for the traffic read by read"),
        Claim("arithmetic at 312 TFLOP/s", "article 2", "under 1 ms",
              f"{work / A100.peak * 1e3:.1f} ms",
              f"4 n^2 d = {work / 1e12:.2f} TFLOP; moving takes "
              f"{ours[n] / 2e12 / (work / A100.peak):.0f} times as long all the same"),
    ]


def claims(rows, d):
    """Return what the papers say of traffic; rows: CountedRows forward, over N and over memory."""
    flash = [r for r in rows if r.name == "FA2"]
    memory, N = (most_common([getattr(r, field) for r in flash]) for field in ("memory", "N"))
    over_N = [(r.N, r.moved) for r in flash if r.memory == memory]
    over_M = [(r.memory, r.moved) for r in flash if r.N == N]
    standard = {r.moved for r in rows if r.name == "standard" and r.N == N}
    found = []
    if len(over_N) > 1:
        found.append(Claim("traffic of flash over N", "FA, Theorem 2", "N^2",
                           f"N^{slope(over_N)[0]:.2f}", "counted; Q and O add terms in N"))
    if len(over_M) > 1:
        found.append(Claim("traffic of flash over M", "FA, Theorem 2", "1/M",
                           f"M^{slope(over_M)[0]:.2f}", "counted; a tile has M / 4d rows"))
    found.append(Claim("traffic of standard over M", "FA, Theorem 2", "none",
                       "none" if len(standard) == 1 else f"{len(standard)} values",
                       "counted; its operators go from memory to memory"))
    A100 = CHIPS["A100-80GB"].on_chip // 2
    figure = total(moves([(1, *step) for step in GPT2], 1024, 64)) * 1024 * 2 / 1e9
    flash_1 = sum(total(traffic("FA1", 1024, 64, *best_tile("FA1", A100, 64), backward=b))
                  for b in (False, True)) * 1024 * 2 / 1e9
    work = {name: 1024 * sum(flop(name, 1024, 64, b) for b in (False, True)) / 1e9
            for name in ("standard", "FA1")}
    return found + [
        Claim("on-chip elements at which FA1 moves as much as standard", "FA, section 3.2",
              "d^2 << M", f"{crossover('FA1', d)} at d={d}",
              "Q and O pass N / Bc times, Bc = M / 4d: 12 N^2 d^2 / M = 4 N^2 at 3 d^2 = "
              f"{3 * d * d}; FA2: {crossover('FA2', d)}"),
        Claim("HBM of GPT-2's attention, standard", "FA, figure 2 (v2)", "40.3 GB",
              f"{figure:.1f} GB", "18 N^2 + 12 N d elements for each of 1024 heads"),
        Claim("the same, FlashAttention", "FA, figure 2 (v2)", "4.4 GB", f"{flash_1:.1f} GB",
              "Algorithms 1 and 4 as printed, Bc = 384 from 192 KiB"),
        Claim("its GFLOPs", "FA, figure 2 (v2)", "66.6, 75.2",
              f"{work['standard']:.0f}, {work['FA1']:.0f}",
              "12 and 14 N^2 d for each of 1024 heads: the column does not follow from them"),
    ]


def crossover(name, d, N=FAR):
    """Return the fewest on-chip elements with which `name` moves no more than standard."""
    low, high = max(4 * d, on_chip(1, 1, d)), N * d
    while low < high:
        M = (low + high) // 2
        moved = total(traffic(name, N, d, *best_tile(name, M, d)))
        low, high = (low, M) if moved <= total(traffic("standard", N, d)) else (M + 1, high)
    return low


# The tables


def show_steps(N, d, tile, width):
    print_table(
        f"What moves, of one head, N={N}, d={d}, {tile[0]}x{tile[1]} tiles",
        ["name", "step", "times", "reads", "writes", "MB"],
        [(f"{name}{', backward' * backward}", step, times, *arrays.split("->"),
          f"{total(moves([(times, step, arrays)], N, d)) * width / 1e6:.2f}")
         for backward in (False, True) for name in ("standard", "FA1", "FA2")
         for times, step, arrays in steps(name, N, *tile, backward)], left=2)


def show_counted(rows):
    print_table(
        "Counted on running code, of one head: MB to and from the chip",
        ["name", "N", "chip KiB", "tile", "read", "formula", "written", "formula", "off"],
        [(f"{r.name}{', backward' * r.backward}", r.N, f"{r.memory / 1024:.4g}",
          "-" if r.name == "standard" else f"{r.Br}x{r.Bc}",
          *(f"{n / 1e6:.3f}" for n in (r.read, r.formula_read, r.written, r.formula_written)),
          f"{r.moved / (r.formula_read + r.formula_written) - 1:.2%}") for r in rows])
    N, memory = max((r.N, r.memory) for r in rows)
    arrays = ("Q", "K", "V", "O", "m l", "N x N", "tiles")
    print_table(
        f"The same by array, N={N}, {memory / 1024:.4g} KiB: MB",
        ["name", *arrays],
        [(r.name, *(f"{r.arrays.get(a, 0) / 1e6:.3f}" for a in arrays))
         for r in rows if (r.N, r.memory, r.backward) == (N, memory, False)])
    say_why([r.moved / (r.formula_read + r.formula_written) for r in rows])


def say_why(off):
    """Say why counts differ from the formula; off: count / formula."""
    if max(off) > 1.02:
        console.print("\nMore moves than the formula says where the loop did not fit: for a moment "
                      "it holds more than the tile, and a column may leave its line part empty.")
    if min(off) < 0.98:
        console.print("\nA chip that holds an array whole moves less than the formulas say: they "
                      "are for d <= M <= N d, as Theorem 2 is.")


def show_claims(found):
    print_table("The claims", ["claim", "source", "says", "here", "why"],
                [(c.claim, c.source, c.says, c.here, c.why) for c in found], left=5)


def show_cachegrind(rows):
    print_table(
        f"Counted by valgrind on lab/loops.c, N={rows[0].N}: MB read",
        ["cache KiB", "tile", "read", "formula", "off"],
        [(f"{r.memory / 1024:.4g}", f"{r.B}x{r.B}", f"{r.read / 1e6:.3f}",
          f"{r.formula_read / 1e6:.3f}", f"{r.read / r.formula_read - 1:.2%}") for r in rows])
    say_why([r.read / r.formula_read for r in rows])


def draw(folder, rows):
    """Draw what was counted over the memory on the chip, for the length with the most sizes."""
    N = most_common([r.N for r in rows if r.name == "FA2"])
    with plotted(Path(folder) / "traffic.png", figsize=(7, 4.5)) as axes:
        for name, style in (("standard", "k--"), ("FA1", "s-"), ("FA2", "o-")):
            points = sorted((r.memory / 1024, r.moved / 1e6) for r in rows
                            if (r.name, r.N, r.backward) == (name, N, False))
            axes.plot(*zip(*points), style, label=name)
        logarithmic(axes, {r.memory // 1024 for r in rows if r.N == N})
        axes.set(xlabel="KiB on the chip", ylabel="MB to and from the chip",
                 title=f"counted traffic of one head, N={N}")
        axes.legend()


def refuse(options, args):
    """Refuse what can't be counted, before any work."""
    sizes = {name: getattr(args, name) for name in ("br", "bc")}
    if len({size in (None, AUTO) for size in sizes.values()}) > 1:
        options.error("argument --br: a number is taken for --br and --bc, or for neither, got "
                      f"{args.br} and {args.bc}")
    if args.cachegrind:
        compiler()
        if args.br or args.dtype not in (None, "float32"):
            options.error("argument --cachegrind: its tiles are its own, in float32; it takes no "
                          "--br, --bc, --dtype")
        if args.memory < 4096 or args.memory & (args.memory - 1):
            options.error("argument --memory: a simulated cache takes a power of 2 from 4096 on, "
                          f"got {args.memory}")
    N = max(args.seq_len or LENGTHS)
    need_room(f"counting at N = {N}", 16 * N * N, torch.device("cpu"))


def main():
    options = lesson.parser(__doc__, "dtype", "seq-len", "head-dim", "br", "bc", "seed", "json",
                            "plot")
    options.set_defaults(device="cpu")
    options.add_argument("--memory", type=cli.whole_number(1), default=65536, metavar="BYTES",
                         help="on the chip (65536)")
    options.add_argument("--cachegrind", action="store_true",
                         help="count in C as well; needs valgrind and a C compiler")
    args, device, _ = lesson.begin(options, check=partial(refuse, options))
    torch.set_num_threads(1)  # more would wait for each other over tiles this small
    lengths, d = sorted(set(args.seq_len or LENGTHS)), args.head_dim or 64
    dtype = getattr(torch, args.dtype or "float32")
    tile = None if args.br in (None, AUTO) else (args.br, args.bc)
    count = partial(counted, d=d, dtype=dtype, tile=tile, seed=args.seed)
    memory, N = args.memory, lengths[len(lengths) // 2]
    problems = [(n, memory, False) for n in lengths]
    problems += [(N, M, False) for M in (memory // 2, 2 * memory)] + [(N, memory, True)]
    try:
        rows = [row for n, M, backward in track("count", problems)
                for row in count(n, memory=M, backward=backward)]
    except ValueError as refused:
        options.error(f"argument --{'br' if tile else 'memory'}: {refused}")
    first = next(r for r in rows if (r.N, r.memory) == (N, memory))
    show_steps(N, d, (first.Br, first.Bc), dtype.itemsize)
    show_counted(rows)
    said = [*article_claims(), *claims([r for r in rows if not r.backward], d)]
    show_claims(said)
    found = [*(("counted", row) for row in rows), *(("claims", claim) for claim in said)]
    if args.cachegrind:
        cache = cachegrind(N, d, (memory // 2, memory, 2 * memory))
        show_cachegrind(cache)
        found += [("cachegrind", row) for row in cache]
    status = lesson.finish(args, device, found)
    if args.plot is not None:
        draw(args.plot, rows)
    return status


if __name__ == "__main__":
    cli.serve(main)
