"""The pictures of the lesson's ideas: the walk over the tiles, the loop orders, memories, a core.

    python draw.py                           all of them, into results/
    python draw.py --only walk --plot DIR    one of them, into DIR: walk.png and walk.gif

Orders, tiles and bytes come from the lesson's own code: `lab/visible.py`, `play.py`,
`lab/formulas.py`, `lab/traffic.py`. Sizes that no code has stand in ON_A_910B3, with their source.
"""

import sys
from io import BytesIO
from os.path import dirname, realpath
from pathlib import Path

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.files import whole_file
from common.report import console, plotted, track
from lab.cases import Case
from lab.formulas import forward_bytes
from lab.machines import CHIPS
from lab.sheet import GB, KIB, KINDS, MIB, arrow, bare, box, size_text, write
from lab.traffic import SQUARE, on_chip, square_tile, traffic
from lab.visible import Visible
from play import play

import torch
from PIL import Image

N, D, TILE = 4096, 64, 64  # of what is held: the first article's
MOVED_N, MOVED_CHIP = 1024, 64 * KIB  # of what is moved: io_model.py's
BLOCKS, ROWS = 4, 2  # of the walk and the orders: blocks of Q, and of K; rows of a block
# {memory: (bytes of one, how many)}. Source: CANN's platform_config/Ascend910B3.ini.
ON_A_910B3 = {"L0A": (64 * KIB, 20), "L0B": (64 * KIB, 20), "L0C": (128 * KIB, 20),
              "UB": (192 * KIB, 40), "L1": (512 * KIB, 20), "L2": (192 * MIB, 1),
              "HBM": (64 * GB, 1)}


def visited(causal):
    """Return the tiles (block of Q, block of K) in the order in which the loop visits them."""
    visible = Visible(*[torch.zeros(1, BLOCKS * ROWS, 1)] * 3, causal)
    return [(rows.start // ROWS, cols.start // ROWS) for rows in visible.query_blocks(ROWS)
            for cols in visible.key_blocks(rows, ROWS)]


def walk_panel(axes, causal, step):
    """Draw the walk at tile number `step`; after the last one all rows of O are written."""
    tiles = visited(causal)
    row, col = tiles[step] if step < len(tiles) else (BLOCKS, None)
    begun = tiles[: step + 1]
    bare(axes, 9.7, 8.6, f"{'causal' if causal else 'no mask'}: {len(tiles)} of {BLOCKS**2} tiles")
    for j in range(BLOCKS):
        for name, y in (("K", 0.1), ("V", 1.2)):
            box(axes, 1.5 + j, y, f"{name}{j}", "chip" if j == col else "memory")
    for i in range(BLOCKS):
        y, here = 2.6 + i, "chip" if i == row else "later"
        box(axes, 0, y, f"Q{i}", "chip" if i == row else "memory")
        for j in range(BLOCKS):
            kind = "now" if (i, j) == (row, col) else "done" if (i, j) in begun else "later"
            box(axes, 1.5 + j, y, "S" if kind == "now" else "" if (i, j) in tiles else "x", kind)
        box(axes, 5.8, y, "m" * (i == row), here, width=0.5)
        box(axes, 6.4, y, "l" * (i == row), here, width=0.5)
        box(axes, 7.1, y, kind="later", width=1.5)
        if i <= row:
            share = sum(r == i for r, _ in begun) / sum(r == i for r, _ in tiles)
            box(axes, 7.1, y, kind=here if i == row else "done", width=1.5 * share)
            write(axes, 9, y + 0.5, f"O{i}", 9)
    counts = f"Q {len({r for r, _ in begun})}, K {len(begun)}, V {len(begun)}"
    write(axes, 0, 7, f"blocks read: {counts}\nblocks written: O {row}, S 0", ha="left", va="top")


def draw_walk(folder):
    """Draw the walk without a mask, then the causal one, as an animation; and a still of both."""
    dense, causal = visited(False), visited(True)
    steps = [(i, 0) for i in range(len(dense))] + [(len(dense), i) for i in range(len(causal) + 1)]
    frames, last = [], (dense.index((2, 1)), causal.index((2, 1)))
    with plotted(folder / "walk.png", 1, 2, figsize=(7, 3.5)) as panels:
        for step in [*track("walk", steps), last]:
            walk_panel(panels[0], False, step[0])
            walk_panel(panels[1], True, step[1])
            for x, kind, sign, text in ((0, "chip", "", "on the chip"), (2.7, "now", "", "at work"),
                                        (4.7, "done", "", "done"), (6.4, "later", "x", "skipped")):
                box(panels[1], x, 8.1, sign, kind, width=0.45, height=0.45)
                write(panels[1], x + 0.6, 8.32, text, ha="left")
            frames.append(BytesIO())
            panels[0].figure.savefig(frames[-1], dpi=100)
    *frames, still = (Image.open(frame).convert("RGB") for frame in frames)
    palette = still.quantize(32)
    first, *others = (frame.quantize(palette=palette, dither=0) for frame in frames)
    with whole_file(folder / "walk.gif") as part:
        first.save(part, save_all=True, append_images=others, loop=0,
                   duration=[700] * len(others) + [3500])  # ms


def order_of(name):
    """Return the Events of 'FA1' or 'FA2' on the blocks of the walk: what is read and written."""
    return play(name, *torch.randn(3, BLOCKS * ROWS, 4), ROWS, ROWS, False)[0]


def marks(event):
    """Yield (array, block, sign) of what is on the chip: R read, W written, '' neither."""
    rows = range(event.rows[0] // ROWS, event.rows[1] // ROWS)
    places = [("O", i) for i in rows]
    if event.step:
        places += [*(("Q", i) for i in rows), ("K", event.step["cols"][0] // ROWS)]
    for array, block in places:
        yield array, block, "R" * (array in event.read) + "W" * (array in event.written)


def draw_orders(folder):
    """Draw which block is read and written at which step, a panel an order."""
    with plotted(folder / "orders.png", 2, 1, figsize=(7, 7)) as panels:
        for axes, order, outside in zip(panels, ("FA1", "FA2"), ("K and V", "Q")):
            found = [(x, *m) for x, event in enumerate(order_of(order)) for m in marks(event)]
            bare(axes, 22, 13, f"{outside} outside (FlashAttention-{order[-1]})")
            axes.set_aspect("auto")
            for top, array, name in (0, "Q", "Q"), (4.3, "K", "K, V"), (8.6, "O", "m, l, O"):
                signs = [sign for _, a, _, sign in found if a == array]
                total = [sum(letter in sign for sign in signs) for letter in "RW"]
                write(axes, 19.8, top + 2, "read {}\nwritten {}".format(*total), ha="left")
                for i in range(BLOCKS):
                    write(axes, 2.3, top + i + 0.5, f"{name} {i}", ha="right")
                    axes.plot([2.5, 19.5], [top + i + 0.5] * 2, ":", color="#bbbbbb", zorder=0)
                for x, a, block, sign in found:
                    if a == array:
                        box(axes, 2.5 + x, top + block, sign, "now" if sign else "chip", size=8)
        write(panels[1], 0, 13.1, "Time goes to the right, a column is a tile; the first of "
              "FlashAttention-1 is its start. Counts are of blocks.\nR: read, W: written (by "
              "FlashAttention-2 O alone), light: stays on the chip.", ha="left", va="top")


# Chips


def draw_memories(folder):
    """Draw the sizes of the memories of two chips, and what attention wants to put there."""
    paper = {"color": "white", "pad": 1}  # under what is written
    wanted = {f"blocks of a {TILE}x{TILE} tile": on_chip(TILE, TILE, D) * 4,
              f"S and P, N = {N}": 2 * N * N * 4}
    A100, ticks = CHIPS["A100-40GB"], (32 * KIB, MIB, 32 * MIB, GB, 32 * GB)
    found = {**{("910B3", name): sizes for name, sizes in ON_A_910B3.items()},
             (A100.name, "SRAM"): (A100.on_chip, A100.cores), (A100.name, "HBM"): (40 * GB, 1)}
    rates = {(chip, "HBM"): CHIPS[chip].bandwidth for chip in ("910B3", A100.name)}
    rates[A100.name, "SRAM"] = 19e12  # of all cores: FlashAttention (2205.14135), section 2.1
    with plotted(folder / "memories.png", figsize=(7, 4.6)) as axes:
        for y, (names, (one, count)) in enumerate(found.items()):
            axes.barh(y, one * count, height=0.7, **KINDS["done"], hatch="///")
            axes.barh(y, one, height=0.7, **KINDS["chip"])
            many = f" x {count} = {size_text(one * count)}" if count > 1 else ""
            rate = f", {rates[names] / 1e12:.4g} TB/s" if names in rates else ""
            write(axes, one * count * 1.4, y, size_text(one) + many + rate, ha="left", bbox=paper)
        for (text, count), style in zip(wanted.items(), ("--", "-")):
            axes.axvline(count, linestyle=style, color="black", zorder=0)
            write(axes, count, -1, f"{text}:\n{size_text(count)}", bbox=paper)
        axes.set(xscale="log", xlim=(4 * KIB, 8000 * GB), ylim=(len(found) - 0.4, -1.6),
                 xticks=ticks, xticklabels=[*map(size_text, ticks)],
                 yticks=range(len(found)), yticklabels=[" ".join(names) for names in found],
                 xlabel="bytes, logarithmic; plain: one of them, hatched: all of them together")
        axes.set_title("Sizes of memories", size=10)
        axes.minorticks_off()


def draw_core(folder):
    """Draw the memories and units of a core, and the four steps of a tile on their way."""
    size = {name: size_text(one) for name, (one, _) in ON_A_910B3.items()}
    with plotted(folder / "core.png", figsize=(7, 4.6)) as axes:
        bare(axes, 20.1, 12.2, "A core of a 910B3: the four steps of a tile")
        for x, width, name in ((0, 6.3, "cube core"), (8.5, 3.4, "GM"),
                               (14.1, 5.9, "one of two vector cores")):
            box(axes, x, 0.7, kind="frame", width=width, height=11.4)
            write(axes, x + width / 2, 0.35, name, 9)
        for x in (7.7, 12.2):
            box(axes, x, 0.7, kind="done", width=0.5, height=11.4)
            write(axes, x + 0.25, 9.1, f"L2 {size['L2']}", 7, rotation=90)
        rate = CHIPS["910B3"].bandwidth / 1e12
        write(axes, 10.2, 11.4, f"HBM, {size['HBM']}\n{rate:.4g} TB/s", 7)
        box(axes, 8.65, 3, kind="later", width=3.1, height=6.1)
        write(axes, 10.2, 3.35, "workspace")
        for x, y, width, height, text, kind in (
                *((8.8, y, 2.8, 1.4, name, "memory") for y, name in (
                    (1.2, "Q  K  V"), (3.8, "P_block"), (5.6, "S_block"), (7.4, "P_block V"),
                    (9.4, "O  m  l"))),
                (0.3, 1.1, 5.6, 4.1, f"L1  {size['L1']}", "chip"),
                (0.3, 6, 1.6, 1.5, f"L0A\n{size['L0A']}", "chip"),
                (2.1, 6, 1.6, 1.5, f"L0B\n{size['L0B']}", "chip"),
                (4.3, 6, 1.6, 4, f"L0C\n{size['L0C']}", "chip"),
                (0.3, 8.3, 3.4, 1.7, "cube unit:\nproducts", "now"),
                (14.4, 3.8, 1.8, 6.9, f"UB\n{size['UB']}", "chip"),
                (17.2, 5.6, 2.5, 3.2, "vector unit:\nmax, exp2,\nsum, rescale", "now")):
            box(axes, x, y, text, kind, width, height, 8)
        for start, end in (((1.1, 5.2), (1.1, 6)), ((2.9, 5.2), (2.9, 6)), ((1.1, 7.5), (1.1, 8.3)),
                           ((2.9, 7.5), (2.9, 8.3)), ((3.7, 9.1), (4.3, 9.1)),
                           ((16.2, 6.4), (17.2, 6.4)), ((17.2, 8), (16.2, 8))):
            arrow(axes, start, end)
        for x, start, end, y, text in (
                (7, 8.8, 5.9, 1.6, "1 Q, K"), (7, 8.8, 5.9, 2.3, "3 V"), (7, 8.8, 5.9, 4.5, "3"),
                (7, 5.9, 8.8, 6.3, "1"), (7, 5.9, 8.8, 8.1, "3"), (13.4, 14.4, 11.6, 4.5, "2"),
                (13.4, 11.6, 14.4, 6.3, "2"), (13.4, 11.6, 14.4, 8.1, "4"),
                (13.4, 14.4, 11.6, 10.1, "4")):
            arrow(axes, (start, y), (end, y))
            write(axes, x, y - 0.27, text)


def draw_split(folder):
    """Draw cores that share out the queries, and cores that share out the keys of one query."""
    with plotted(folder / "split.png", 2, 1, figsize=(7, 5.6)) as (many, one):
        bare(many, 12.9, 4.8, "Many queries: the cores share out Q")
        bare(one, 12.9, 4.8, "One query (decoding): the cores share out K and V")
        for axes in (many, one):
            write(axes, 6, 0.35, "keys", 9)
        for i in range(BLOCKS):
            box(many, 0, 0.7 + i, f"Q_block {i}", width=1.7)
            box(many, 2, 0.7 + i, f"core {i}: all keys, block after block", "chip", width=8)
            box(many, 10.9, 0.7 + i, f"O_block {i}", width=1.9)
            arrow(many, (10, 1.2 + i), (10.9, 1.2 + i))
            box(one, 2 + 2 * i, 0.7, f"core {i}", "chip", width=2)
            box(one, 2.1 + 2 * i, 2.2, f"m{i}, l{i}, O{i}", width=1.8)
            arrow(one, (3 + 2 * i, 1.7), (3 + 2 * i, 2.2))
            arrow(one, (3 + 2 * i, 3.2), (3 + 2 * i, 3.7))
        box(one, 0, 0.7, "1 query", width=1.7)
        box(one, 2, 3.7, "merge: the largest m, and the sums rescaled to it", "now", width=8)
        arrow(one, (10, 4.2), (10.9, 4.2))
        box(one, 10.9, 3.7, "O", width=1.9)


# Bytes


def held():
    """Return {name: bytes at the highest moment} of one head, N x D in float32, result included."""
    return {name: forward_bytes(name, Case(N, d=D), TILE, TILE) for name in ("standard", "flash")}


def draw_held(folder):
    """Draw to scale what both hold at their highest moment: an area is a number of bytes."""
    total, tile = held(), TILE / N
    with plotted(folder / "held.png", figsize=(7, 2.7)) as axes:
        bare(axes, 4.1, 1.35, f"What is held, to scale: N = {N}, d = {D}, tiles {TILE}x{TILE}")
        for x, name in ((0, "S"), (1.1, "P")):
            box(axes, x, 0.15, f"{name}: N x N\n{size_text(N * N * 4)}", "chip")
        for x, (name, count), left in zip((2.2, 3), total.items(), (0, 2.9)):
            box(axes, x, 0.15, kind="now", width=D / N)
            write(axes, x, 0.08, f"O: {size_text(N * D * 4)}")
            write(axes, left, 1.25, f"{name}: {size_text(count)}", 10, ha="left")
        for y, text in ((0.25, "S_block"), (0.45, "O_block"), (0.65, "5 columns")):
            box(axes, 3.35, y, kind="now", width=tile if "block" in text else 5 / N, height=tile)
            write(axes, 3.45, y + tile / 2, text, ha="left")


def moved():
    """Return {name: {array: bytes to and from the chip}}, with tiles that fit MOVED_CHIP bytes."""
    B, found = square_tile(MOVED_CHIP // 4, D), {}
    for name in ("standard", "FA1", "FA2"):
        arrays = found[name] = dict.fromkeys(("Q", "K", "V", "O", "m, l", "S, P"), 0)
        for p in traffic(name, MOVED_N, D, B, B):
            array = "S, P" if p.array in SQUARE else "m, l" if p.array in "ml" else p.array
            arrays[array] += 4 * (p.read + p.written)
    return found


def draw_moved(folder):
    """Draw the bytes that three loops move, a bar each, split by array."""
    B, found = square_tile(MOVED_CHIP // 4, D), moved()
    styles = (("white", ""), ("#b5d3ea", "///"), ("#7aa6c9", "..."), ("#e6e6e6", "xx"),
              ("white", "+++"), ("#0b3c6b", ""))
    with plotted(folder / "moved.png", figsize=(7, 3)) as axes:
        left = [0] * len(found)
        for array, (color, hatch) in zip(found["FA1"], styles):
            widths = [arrays[array] / 1e6 for arrays in found.values()]
            axes.barh([*found], widths, 0.6, left, label=array, color=color, hatch=hatch,
                      edgecolor="black")
            left = [sum(both) for both in zip(left, widths)]
        for y, total in enumerate(left):
            write(axes, total + 0.3, y, f"{total:.1f} MB", 9, ha="left")
        axes.invert_yaxis()
        axes.set(xlabel="MB to and from the chip", xlim=(0, 1.15 * max(left)))
        axes.set_title(f"Moved by one head: N = {MOVED_N}, d = {D}, tiles {B}x{B}", size=10)
        axes.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.22), fontsize=8)


PICTURES = {"walk": draw_walk, "orders": draw_orders, "held": draw_held, "moved": draw_moved,
            "memories": draw_memories, "core": draw_core, "split": draw_split}


def main():
    options = lesson.parser(__doc__, "plot")
    options.set_defaults(device="cpu", plot=lesson.RESULTS)
    options.add_argument("--only", choices=PICTURES, help="one of them")
    args, _, _ = lesson.begin(options)
    for name in [args.only] if args.only else PICTURES:
        PICTURES[name](Path(args.plot))
        console.print(f"{Path(args.plot) / name}.png")
    return 0


if __name__ == "__main__":
    cli.serve(main)
