"""What makes the tiled loop fast: one step at a time, the tile's size, and what is left.

    python fast_tiles.py                 three tables: the steps, the sizes, the parts of a tile
    python fast_tiles.py --plot DIR      and the curve over the sizes, with its valley

The steps start at the first article's loop and end at `flash_attention_forward`.
"""

import math
import sys
from dataclasses import dataclass
from os.path import dirname, realpath
from pathlib import Path

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, logarithmic, plotted, print_table
from common.timing import count_launches, ratio, time_in_turn
from flash_attention import flash_attention_forward, online_softmax_step, standard_attention
from lab.fused import fused_attention
from lab.show import ms, print_reasons

import torch


def article_step(m, l, O_block, S_block, V_block):
    """The lines of `plain_flash_attention`, each with a new tensor for its result."""
    m_new = torch.maximum(m, S_block.amax(-1, keepdim=True))
    correction = torch.exp(m - m_new)
    P_block = torch.exp(S_block - m_new)
    l = correction * l + P_block.sum(-1, keepdim=True)
    O_block = correction * O_block + P_block @ V_block
    return m_new, l, O_block


def in_place_step(m, l, O_block, S_block, V_block):
    """The same, written over what is no longer needed."""
    m_new = torch.maximum(m, S_block.amax(-1, keepdim=True))
    correction = torch.exp(m - m_new)
    P_block = S_block.sub_(m_new).exp_()
    l = l.mul_(correction).add_(P_block.sum(-1, keepdim=True))
    O_block = O_block.mul_(correction).baddbmm_(P_block, V_block)
    return m_new, l, O_block


def walk(step, Q, K, V, Br, Bc, scratch=None):
    """Dense attention of [B, N, d], a `step` for each tile; S_block in `scratch` or a new one."""
    O, scale = torch.empty_like(Q), 1 / math.sqrt(Q.shape[-1])
    for Q_block, O_rows in zip(Q.split(Br, 1), O.split(Br, 1)):  # [B, Br, d]
        m = torch.full_like(Q_block[..., :1], torch.finfo(Q.dtype).min)  # [B, Br, 1]
        l, O_block = torch.zeros_like(m), torch.zeros_like(Q_block)
        for K_block, V_block in zip(K.split(Bc, 1), V.split(Bc, 1)):  # [B, Bc, d]
            shape = (*Q_block.shape[:2], K_block.shape[1])
            out = None if scratch is None else scratch[: math.prod(shape)].view(shape)
            S_block = torch.bmm(Q_block, K_block.transpose(1, 2), out=out)  # [B, Br, Bc]
            S_block.mul_(scale)
            m, l, O_block = step(m, l, O_block, S_block, V_block)
        O_rows.copy_(O_block / l)
    return O


@dataclass
class StepRow:
    """faster: times as fast as the row above, with its quartiles. why: why not to be believed."""

    name: str
    shape: str
    tile: str
    seconds: float
    faster: float
    spread: tuple
    of_fused: float
    launches: int
    why: str = ""


def time_steps(case, device, seed=0):
    """Time each step from the article's loop to flash_attention_forward, in turn. StepRows."""
    Q, K, V = case.inputs(device, seed)
    Br, Bc, _ = case.tile("auto", "auto", device)
    scratch = Q.new_empty(Q.shape[0] * Br * Bc)
    steps = {
        "the article's loop": ((64, 64), lambda: walk(article_step, Q, K, V, 64, 64)),
        "larger tiles": ((Br, Bc), lambda: walk(article_step, Q, K, V, Br, Bc)),
        "in place": ((Br, Bc), lambda: walk(in_place_step, Q, K, V, Br, Bc)),
        "one scratch": ((Br, Bc), lambda: walk(in_place_step, Q, K, V, Br, Bc, scratch)),
        "exp2": ((Br, Bc), lambda: walk(online_softmax_step, Q, K, V, Br, Bc, scratch)),
        "flash_attention_forward": (
            (Br, Bc), lambda: flash_attention_forward(Q, K, V, "auto", "auto")),
        "standard": (None, lambda: standard_attention(Q, K, V)),
        "fused": (None, lambda: fused_attention(Q, K, V)),
    }
    rounds = time_in_turn({name: call for name, (_, call) in steps.items()}, device)
    rows, above = [], None
    for name, (tile, call) in steps.items():
        if tile is None:  # standard and fused: no step, so compared with the last one
            above = rounds["flash_attention_forward"]
        faster, spread = ratio(above or rounds[name], rounds[name])
        rows.append(StepRow(name, case.shape, "x".join(map(str, tile)) if tile else "-",
                            rounds.median(name), faster, spread,
                            ratio(rounds["fused"], rounds[name])[0], count_launches(call),
                            rounds.doubt(name, spread)))
        above = rounds[name]
    return rows


@dataclass
class SizeRow:
    """One tile size; tile is the size that fits into N. why: why not to be believed."""

    name: str
    shape: str
    tile: int
    seconds: float
    of_standard: float
    launches: int
    why: str = ""


def time_sizes(case, device, seed=0):
    """Time square tiles from 32 to 2048, the chosen tile, standard and fused in turn. SizeRows."""
    Q, K, V = case.inputs(device, seed)
    calls = {size: lambda size=size: flash_attention_forward(Q, K, V, size, size)
             for size in (32, 64, 128, 256, 512, 1024, 2048) if size <= case.Nq}
    calls["auto"] = lambda: flash_attention_forward(Q, K, V, "auto", "auto")
    calls["standard"] = lambda: standard_attention(Q, K, V)
    calls["fused"] = lambda: fused_attention(Q, K, V)
    rounds, rows = time_in_turn(calls, device), []
    for name, call in calls.items():
        Br, Bc, _ = case.tile(name if isinstance(name, int) else "auto", "auto", device)
        side = name if isinstance(name, int) else round(math.sqrt(Br * Bc))
        of_standard, spread = ratio(rounds["standard"], rounds[name])
        rows.append(SizeRow(str(name), case.shape, side, rounds.median(name), of_standard,
                            count_launches(call), rounds.doubt(name, spread)))
    return rows


@dataclass
class PartRow:
    """One operation on one tile, and what it takes in a call: seconds * tiles."""

    name: str
    shape: str
    seconds: float
    of_a_call: float
    why: str = ""


def time_parts(case, device, seed=0):
    """Time what a tile is made of, operation by operation, beside the fused kernel. PartRows."""
    Q, K, V = case.inputs(device, seed)
    Br, Bc, _ = case.tile("auto", "auto", device)
    tiles = math.ceil(case.Nq / Br) * math.ceil(case.Nq / Bc)
    Q_block, K_block, V_block = Q[:, :Br], K[:, :Bc], V[:, :Bc]
    S_block = -torch.rand(Q.shape[0], Br, Bc, device=device, dtype=Q.dtype)
    O_block, m = torch.zeros_like(Q_block), torch.zeros_like(Q_block[..., :1])
    parts = {
        "Q K^T": lambda: torch.bmm(Q_block, K_block.transpose(1, 2), out=S_block),
        "P V": lambda: O_block.baddbmm_(S_block, V_block, beta=0),
        "exp2": lambda: S_block.clamp_(-1, 0).exp2_(),
        "one pass: sub, mul": lambda: S_block.sub_(m),
        "maximum, sum": lambda: (S_block.amax(-1), S_block.sum(-1)),
    }
    calls = {**parts, "clamp": lambda: S_block.clamp_(-1, 0),
             "flash": lambda: flash_attention_forward(Q, K, V, "auto", "auto"),
             "fused": lambda: fused_attention(Q, K, V)}
    rounds = time_in_turn(calls, device)
    median = {name: rounds.median(name) for name in calls}
    median["exp2"] -= median.pop("clamp")  # which only keeps its argument in range
    return [PartRow(name, case.shape, s, s * tiles if name in parts else s, rounds.doubt(name))
            for name, s in median.items()]


def show_steps(rows):
    print_table(
        "What each step buys", ["step", "tiles", "ms", "times the row above", "quartiles",
                                "of fused", "launches"],
        [(r.name, r.tile, ms(r), f"{r.faster:.2f}",
          "{:.2f} to {:.2f}".format(*r.spread), f"{r.of_fused:.2f}", r.launches) for r in rows])
    print_reasons(rows)


def show_sizes(rows):
    print_table(
        "Tile sizes", ["tile", "ms", "times as fast as standard", "launches"],
        [(r.name, ms(r), f"{r.of_standard:.3g}", r.launches) for r in rows])
    print_reasons(rows)


def show_parts(rows):
    print_table(
        f"What a tile is made of, {rows[0].shape}", ["operation", "us a tile", "ms a call"],
        [(r.name, "-" if r.name in ("flash", "fused") else f"{r.seconds * 1e6:.4g}",
          f"{r.of_a_call * 1e3:.4g}" + " ?" * bool(r.why)) for r in rows])
    print_reasons(rows)
    call = {r.name: r.of_a_call * 1e3 for r in rows}
    floor = call["Q K^T"] + call["P V"] + call["exp2"]
    console.print(f"\nthe two products and exp2 alone: {floor:.4g} ms; the fused kernel, all "
                  f"included: {call['fused']:.4g} ms")


def plot_sizes(path, title, rows):
    """Draw SizeRows, time over the tile size, and write them to `path`."""
    *squares, auto, standard, fused = [(r.tile, r.seconds * 1e3) for r in rows]
    with plotted(path, figsize=(7, 4.5)) as axes:
        axes.plot(*zip(*squares), marker="o", label="flash, square tiles")
        axes.plot(*auto, marker="*", markersize=16, linestyle="", label="flash, auto")
        axes.axhline(standard[1], linestyle="--", color="grey", label="standard")
        axes.axhline(fused[1], linestyle=":", color="grey", label="fused")
        logarithmic(axes, [size for size, _ in squares])
        axes.set(xlabel="tile size", ylabel="time (ms)", title=title)
        axes.legend()


TABLES = {"steps": (time_steps, show_steps), "sizes": (time_sizes, show_sizes),
          "parts": (time_parts, show_parts)}


def main():
    names = "device batch seq-len head-dim seed json plot"
    args, device, cases = lesson.begin(lesson.parser(__doc__, *names.split()), lengths=(2048,))
    found = []
    for case in cases:
        for name, (tool, show) in TABLES.items():
            rows = tool(case, device, args.seed)
            show(rows)
            found += [(name, row) for row in rows]
            if args.plot and name == "sizes":
                plot_sizes(Path(args.plot) / f"tiles_{case.shape}.png",
                           f"time of one attention call, {case.shape} ({device})", rows)
    return lesson.finish(args, device, found)


if __name__ == "__main__":
    cli.serve(main)
