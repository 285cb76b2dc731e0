"""FlashAttention, forward: attention without the N x N matrix, by tiling and the online softmax.

    python flash_attention.py --mode verify      is it the same as standard attention?
    python flash_attention.py --mode memory      what does it save?
    python flash_attention.py --mode speed       what does it cost, or gain?
    python flash_attention.py --mode trace       the recurrence, step by step

The heart is `online_softmax_step`, five lines; `flash_attention_forward` walks the tiles and calls
it. README.md beside this file is the lesson. Sources: FlashAttention (arXiv 2205.14135),
FlashAttention-2 (arXiv 2307.08691).
"""

import math
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `common`

from common import cli  # first: Ctrl-C is quiet from here on
from common.device import choose, describe, free_bytes  # before torch: see there
from common.memory import measure_peak
from common.report import console, track, write_json
from common.timing import count_launches, ratio, square_matmul, time_in_turn
from cases import VERIFY_CASES, Case, cases_of, dtype_name, parser, verify_cases
from fused import fused_attention, triton_attention
from judge import assert_agree, exact, judge
from show import fitted_exponents, plot, print_memory, print_speed, print_trace, print_verify
from tiles import choose_tile
from visible import Visible, refuse_gradients

import torch

LOG2_E = math.log2(math.e)


def standard_attention(Q, K, V, *, causal=False, q_start=None, window=None, scale=None,
                       attn_mask=None, score_mod=None, return_lse=False):
    """Return softmax(Q K^T * scale) V as the formula stands: the baseline, with two N x N matrices.

    Arguments, result and errors are those of `flash_attention_forward`. For float16 and bfloat16
    the scores are float32, and P is rounded to V's dtype before it meets V, as model code does.
    Autograd goes through it.
    """
    visible = Visible(Q, K, V, causal, q_start, window, scale, attn_mask, score_mod)
    rows = slice(0, visible.Nq)
    cols = visible.key_range(rows)
    K_cols, V_cols = visible.key_block(K, cols), visible.key_block(V, cols)  # [X, Nk, d or dv]
    S = visible.row_block(Q, rows) @ K_cols.transpose(1, 2) * visible.scale  # [X, G*Nq, Nk]
    S, V_cols = visible.restrict(S, V_cols, rows, cols)
    if visible.hides:  # the softmax of a row of only -inf is NaN, and so is its gradient
        dead = (S == -math.inf).all(-1, keepdim=True)  # [X, G*Nq, 1]
        S = S.masked_fill(dead, 0)
    P = torch.softmax(S, dim=-1).to(V.dtype)  # [X, G*Nq, Nk]
    if V.device.type == "cpu":
        P = P.to(visible.dtype)  # rounded; before torch 2.2 a CPU has no product of half types
    O = (P @ V_cols.to(P.dtype)).to(V.dtype)  # [X, G*Nq, dv]
    L = torch.logsumexp(S, dim=-1, keepdim=True) if return_lse else None  # [X, G*Nq, 1]
    if visible.hides:
        O = O.masked_fill(dead, 0)
        L = L.masked_fill(dead, -math.inf) if return_lse else None
    O = O.view(*Q.shape[:-1], V.shape[-1])  # [..., Nq, dv]
    return (O, L.view(Q.shape[:-1])) if return_lse else O


def online_softmax_step(m, l, O_block, S_block, V_block):
    """Take one more tile into the softmax; what was summed is rescaled to the new maximum.

    m, l [X, Br, 1]: running maximum and running sum of exp. O_block [X, Br, dv]: running output,
    not yet divided by l. S_block [X, Br, Bc], V_block [X, Bc, dv]: the tile's scores and values.
    Returns the new m, l, O_block. S_block and the old l and O_block are overwritten.
    Source: FlashAttention-2, Algorithm 1, lines 9 and 10.
    """
    m_new = torch.maximum(m, S_block.amax(-1, keepdim=True))  # [X, Br, 1]
    correction = torch.exp(m - m_new)  # [X, Br, 1], at most 1
    P_block = exp_(S_block.sub_(m_new))  # [X, Br, Bc]
    l = l.mul_(correction).add_(P_block.sum(-1, keepdim=True))  # [X, Br, 1]
    O_block = O_block.mul_(correction).baddbmm_(P_block, V_block)  # [X, Br, dv]
    return m_new, l, O_block


def exp_(x):
    """Return exp(x), in place, as exp2(x log2(e)): on a CPU exp2 is that much cheaper than exp."""
    return x.mul_(LOG2_E).exp2_()


def start(visible, rows, V):
    """Return m, l and O_block as they stand before the first tile.

    m is the lowest finite number and not -inf: where a tile hides a whole row, correction is then
    exp(0) = 1 and P_block exp(-inf) = 0, while -inf - -inf would be NaN.
    """
    shape = (visible.X, visible.G * (rows.stop - rows.start))
    m = V.new_full((*shape, 1), torch.finfo(visible.dtype).min, dtype=visible.dtype)
    return m, torch.zeros_like(m), m.new_zeros(*shape, V.shape[-1])


def score_blocks(visible, Q, K, V, rows, Bc, scratch):
    """Yield cols, S_block [X, G*Br, Bc], V_block [X, Bc, dv] of each tile that `rows` visits.

    scratch [X * G*Br * Bc]: every S_block is written there.
    """
    Q_block = visible.row_block(Q, rows, visible.scale)  # [X, G*Br, d]
    for cols in visible.key_blocks(rows, Bc):
        K_block, V_block = visible.key_block(K, cols), visible.key_block(V, cols)  # [X, Bc, ...]
        shape = (*Q_block.shape[:2], K_block.shape[1])
        S_block = scratch[: math.prod(shape)].view(shape)
        torch.bmm(Q_block, K_block.transpose(1, 2), out=S_block)
        S_block, V_block = visible.restrict(S_block, V_block, rows, cols)
        refuse_gradients(score_mod=S_block)
        yield cols, S_block, V_block


def flash_attention_forward(Q, K, V, Br=64, Bc=64, *, causal=False, q_start=None, window=None,
                            scale=None, attn_mask=None, score_mod=None, return_lse=False):
    """Return exact attention, tile by tile: no matrix larger than Br x Bc a head ever stands.

    Q [..., Nq, d], K [..., Nk, d], V [..., Nk, dv] -> O [..., Nq, dv] in Q's dtype: float16,
    bfloat16, float32 or float64; m, l, O and the scores are float32 for the first two. With
    [B, H, N, d], K and V may have fewer heads: query head h reads head h // (Hq / Hkv). Strided
    views are taken as they are.

    Br, Bc: rows of a query block and of a key/value block, 1 or more, or 'auto': see tiles.py.
    causal: query i sees key j where j <= q_start + i.
    q_start: the position of query 0 among the keys; None is Nk - Nq: the last sees the last key.
    window: (left, right): query i sees keys from q_start + i - left to q_start + i + right; a side
        that is None is unbounded.
    scale: what Q K^T is multiplied by; None is 1/sqrt(d).
    attn_mask: broadcasts to [..., Nq, Nk]; bool, True keeps; or float, added to the scaled scores.
    score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score with FlexAttention's meaning, called
        on whole tiles: its arguments broadcast. It comes after the scale and before the masks.
    return_lse: return (O, L), L [..., Nq] the natural log of the sum of exp of the scores, in
        float32, or float64 for float64.

    A row that sees no key gives O = 0 and L = -inf. Raises ValueError for shapes, numbers, devices
    and an input that wants a gradient (this is the forward alone), TypeError for dtypes.
    Source: FlashAttention-2, Algorithm 1: query blocks outside, key blocks inside.
    """
    visible = Visible(Q, K, V, causal, q_start, window, scale, attn_mask, score_mod)
    refuse_gradients(Q=Q, K=K, V=V, attn_mask=attn_mask)
    heads, dv = Q.shape[:-2].numel(), V.shape[-1]
    Br, Bc = choose_tile(Br, Bc, heads, visible.Nq, visible.Nk, dv, Q.dtype, Q.device.type)
    O = Q.new_empty(*Q.shape[:-1], dv)
    L = Q.new_empty(*Q.shape[:-1], 1, dtype=visible.dtype) if return_lse else None
    scratch = Q.new_empty(heads * Br * Bc, dtype=visible.dtype)
    for rows in visible.query_blocks(Br):
        m, l, O_block = start(visible, rows, V)
        for _, S_block, V_block in score_blocks(visible, Q, K, V, rows, Bc, scratch):
            m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block)
        visible.store(O, rows, O_block.div_(l.masked_fill(l == 0, 1)))  # l = 0: saw no key
        if return_lse:
            visible.store(L, rows, m + l.log())
    return (O, L.squeeze(-1)) if return_lse else O


# The tools: each returns rows and prints nothing.


@dataclass
class VerifyRow:
    """Largest absolute differences: flash - standard, and each from the float64 oracle.

    name: 'flash', or 'triton' where that kernel stands in the place of flash.
    """

    shape: str
    dtype: str
    causal: bool
    max_diff: float
    error_flash: float
    error_standard: float
    passed: bool
    name: str = "flash"


def compare_and_verify(cases=VERIFY_CASES, Br=64, Bc=64, *, device="cpu", seed=0):
    """Compare flash with standard attention, and both with float64 on the CPU: a VerifyRow a case,
    and one more for the Triton kernel where it runs.

    `judge.py` says when a case passes: flash's error is at most twice standard's. Raises Refused
    where the score matrices of the two references don't fit into memory.
    """
    rows = []
    for case in cases:
        flash = partial(flash_attention_forward, Br=Br, Bc=Bc, **case.masks)
        rows.append(verify_row("flash", case, flash, device, seed))
        triton, _ = triton_attention(case, torch.device(device))
        if triton:
            rows.append(verify_row("triton", case, triton, device, seed))
    return rows


def verify_row(name, case, attend, device, seed):
    """Compare attend(Q, K, V) as `compare_and_verify` does: a VerifyRow."""
    (*lead, Nq, _), (*_, Nk, _), _ = case.shapes
    need, room = 3 * 8 * math.prod(lead) * Nq * Nk, free_bytes(torch.device("cpu"))
    if need > room:
        raise cli.Refused(f"verify {case.shape} needs {need / 2**30:.0f} GiB for float64 on "
                          f"the CPU, {room / 2**30:.0f} GiB are free: take a smaller one")
    Q, K, V = case.inputs(device, seed)
    found, standard = attend(Q, K, V), standard_attention(Q, K, V, **case.masks)
    return VerifyRow(case.shape, dtype_name(case.dtype), case.causal,
                     *judge(found, standard, exact(Q, K, V, case)), name)


@dataclass
class MemoryRow:
    """Bytes; theory_bytes is what the function of that name counts. None: not run, no room."""

    name: str
    shape: str
    peak_bytes: Optional[int]
    peak_bytes_without_result: Optional[int]
    theory_bytes: int


def profile_memory(cases, Br=64, Bc=64, *, device="cpu", seed=0):
    """Measure the peak memory of the `candidates`: a MemoryRow each, for each case.

    A candidate whose theoretical peak exceeds the free memory is not run.
    """
    device, rows = torch.device(device), []
    for case in cases:
        tile = case.tile(Br, Bc, device)
        for name, call in candidates(case, case.inputs(device, seed), *tile).items():
            rows.append(memory_row(name, case, call, theory_bytes(name, case, *tile), tile, device))
    return rows


def memory_row(name, case, call, theory, tile, device):
    """Measure one candidate, if there is room for it: a MemoryRow."""
    need, peak = theory, (None, None)
    if device.type == "cpu" and name == "flash":
        tiles = math.ceil(case.Nq / tile[0]) * math.ceil(case.shapes[1][-2] / tile[1])
        need += tiles * 2**17  # the profiler's events: 100 KiB a tile
    if need < free_bytes(device):
        if device.type != "cpu":
            call()  # an accelerator's workspaces are allocated in the first call
        peak = measure_peak(call, device)
    return MemoryRow(name, case.shape, *peak, theory)


def theory_bytes(name, case, Br, Bc):
    """Return the bytes that attention has to hold at its highest moment, the result included.

    standard: S and P. flash: a tile each of S_block, O_block and the scaled Q_block, five columns
    (m, m_new, correction, l, row sums) or, where causal or window cut a tile, its mask and two
    columns; for half types the float32 copies of K_block and V_block. fused, triton: L.
    """
    (*lead, Nq, d), (*_, Nk, _), (*kv_lead, _, dv) = case.shapes
    heads, kv_heads, width = math.prod(lead), math.prod(kv_lead), case.dtype.itemsize
    wide = max(width, 4)
    columns = max(5 * heads * Br, 2 * heads * Br + Br * Bc if case.hides else 0)
    tile = heads * (Br * Bc + Br * d + Br * dv) + columns
    beside = {
        "standard": heads * Nq * Nk * (2 * wide + (width if width < wide else 0)),
        "flash": wide * (tile + (kv_heads * Bc * (d + dv) if width < wide else 0)),
        "fused": heads * Nq * 4,
        "triton": heads * Nq * 4,
    }
    return heads * Nq * dv * width + beside[name]


@dataclass
class SpeedRow:
    """ratio_to_standard: times as fast as standard, ratio_spread its quartiles over the rounds.

    launches: operator calls. matmul_share: tflops over those of a large matmul in the same rounds.
    None: not run, no room.
    """

    name: str
    shape: str
    Br: Optional[int]
    Bc: Optional[int]
    seconds: Optional[float] = None
    ratio_to_standard: Optional[float] = None
    ratio_spread: Optional[tuple] = None
    tflops: Optional[float] = None
    matmul_share: Optional[float] = None
    launches: Optional[int] = None


def candidates(case, inputs, Br, Bc):
    """Return {name: call}: standard, flash and fused attention, and Triton's kernel off the CPU."""
    found = {
        "standard": lambda: standard_attention(*inputs, **case.masks),
        "flash": lambda: flash_attention_forward(*inputs, Br, Bc, **case.masks),
        "fused": lambda: fused_attention(*inputs, **case.masks),
    }
    device = inputs[0].device
    triton = device.type != "cpu" and triton_attention(case, device)[0]
    if triton:
        found["triton"] = lambda: triton(*inputs)
    return found


def benchmark_speed(cases, Br=64, Bc=64, *, device="cpu", seed=0):
    """Time the `candidates` in turn: a SpeedRow each, for each case.

    seconds is the median of the rounds, ratio_to_standard the median of the ratios round by round;
    tflops counts the kept score pairs only. Each must first agree with standard attention, by
    `judge.assert_agree`: RuntimeError where it does not.
    """
    device, rows = torch.device(device), []
    for case in cases:
        inputs, tile = case.inputs(device, seed), case.tile(Br, Bc, device)
        found = candidates(case, inputs, *tile)
        room = free_bytes(device)
        calls = {name: call for name, call in found.items()
                 if theory_bytes(name, case, *tile) < room}
        if "standard" in calls:
            expected = calls["standard"]()
            for name, call in calls.items():
                assert_agree(name, call(), expected)
            del expected
        rows += speed_rows(case, found, calls, tile, kept_flop(case), device)
    return rows


def kept_flop(case):
    """Return the FLOPs of Q K^T and P V over the score pairs that causal and window keep."""
    shapes = case.shapes
    pairs = Visible(*(torch.empty(s, device="meta") for s in shapes), **case.masks).kept_pairs()
    return 2 * pairs * math.prod(shapes[0][:-2]) * (shapes[0][-1] + shapes[2][-1])


def speed_rows(case, names, calls, tile, flop, device):
    """Time `calls` in turn, beside a large matmul; return a SpeedRow for each of `names`."""
    matmul, matmul_flop = square_matmul(case.dtype, device)
    seconds = time_in_turn({**calls, "matmul": matmul}, device)
    matmul_tflops = matmul_flop / statistics.median(seconds["matmul"]) / 1e12
    rows = []
    for name in names:
        row = SpeedRow(name, case.shape, *(tile if name == "flash" else (None, None)))
        if name in calls:
            row.seconds = statistics.median(seconds[name])
            row.tflops = flop / row.seconds / 1e12
            row.matmul_share = row.tflops / matmul_tflops
            row.launches = count_launches(calls[name])
        if name in calls and "standard" in calls:
            row.ratio_to_standard, row.ratio_spread = ratio(seconds["standard"], seconds[name])
        rows.append(row)
    return rows


@dataclass
class TraceRow:
    """The state of one query row after one tile. l is the second article's d."""

    query: int
    keys: str
    scores: list
    m: float
    correction: float
    l: float


def trace(Q, K, V, Br=2, Bc=2, *, causal=False, scale=None):
    """Walk the tiles of one small [N, d] attention: a TraceRow a query and tile; and return O."""
    visible = Visible(Q, K, V, causal, scale=scale)
    steps, scratch = [], Q.new_empty(Br * Bc)
    for rows in visible.query_blocks(Br):
        m, l, O_block = start(visible, rows, V)
        for cols, S_block, V_block in score_blocks(visible, Q, K, V, rows, Bc, scratch):
            m_old, scores = m, S_block.clone()
            m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block)
            correction = torch.exp(m_old - m)
            for i, query in enumerate(range(rows.start, rows.stop)):
                steps.append(TraceRow(
                    query, f"{cols.start}-{cols.stop - 1}", scores[0, i].tolist(),
                    m[0, i].item(), correction[0, i].item(), l[0, i].item()))
    steps.sort(key=lambda step: step.query)  # a query row is easier to follow through its tiles
    return steps, flash_attention_forward(Q, K, V, Br, Bc, causal=causal, scale=scale)


# The command line


def run(title, tool, cases, args, device):
    """Return the rows of `tool`, run case by case so that progress can be shown."""
    return [row for case in track(title, cases)
            for row in tool([case], args.br, args.bc, device=device, seed=args.seed)]


def tiles(args):
    """Show the tile that was asked for."""
    return "auto" if args.br == args.bc == "auto" else f"{args.br}x{args.bc}"


def show_verify(cases, args, device):
    rows = run("verify", compare_and_verify, cases, args, device)
    print_verify(f"Verify: largest differences, tiles {tiles(args)}", "flash",
                 [row for row in rows if row.name == "flash"])
    kernel = [row for row in rows if row.name == "triton"]
    if kernel:
        print_verify("Verify: largest differences of the Triton kernel, in its own tiles",
                     "triton", kernel)
    say_of_triton(cases, device)
    return rows


def say_of_triton(cases, device):
    """Say why the Triton kernel is not among the rows, where it is not."""
    for why_not in dict.fromkeys(triton_attention(case, device)[1] for case in cases):
        if why_not:
            console.print(f"\ntriton: {why_not}")


def show_memory(cases, args, device):
    rows = run("memory", profile_memory, cases, args, device)
    print_memory(f"Memory: peak of one call in MiB, tiles {tiles(args)}", rows)
    say_of_triton(cases, device)
    return rows


def show_speed(cases, args, device):
    rows = run("speed", benchmark_speed, cases, args, device)
    print_speed("Speed: median of calls in turn", rows)
    say_of_triton(cases, device)
    if len({case.Nq for case in cases}) > 1:
        console.print("\ntime grows as N to the power of: " + ", ".join(
            f"{name} {exponent:.2f}" for name, exponent in fitted_exponents(cases, rows).items()))
    return rows


def show_trace(cases, args, device):
    """Print the article's [2, 1, 3], one score a tile, then a small attention; both on the CPU."""
    scores = torch.tensor([[2.0], [1.0], [3.0]])
    steps, P = trace(torch.ones(1, 1), scores, torch.eye(3), 1, 1, scale=1.0)
    print_trace("Trace: the softmax of [2, 1, 3], one score at a time", steps)
    probabilities = ", ".join(f"{p:.3f}" for p in P[0].tolist())
    console.print(f"\nexp(score - m) / l with the last m and l: {probabilities}")
    Q, K, V = (x[0] for x in Case(6, d=4).inputs("cpu", args.seed))
    more, O = trace(Q, K, V, causal=args.causal)
    print_trace("Trace: 6 queries, 6 keys, d = 4, 2x2 tiles", more)
    if args.causal:
        console.print("\ntiles: # wholly seen, / on the edge, . not visited\n")
        console.print(Visible(Q, K, V, causal=True).drawing(2, 2), markup=False)
    difference = (O - standard_attention(Q, K, V, causal=args.causal)).abs().max().item()
    console.print(f"\nlargest difference of O from standard attention: {difference:.1e}")
    return steps + more


SHOW = {"trace": show_trace, "verify": show_verify, "memory": show_memory, "speed": show_speed}


def main():
    return command_line(__doc__.splitlines()[0], SHOW, "one attention call")


def command_line(description, show, what, prefix=""):
    """Run the modes that the command line asks for; return 0, or 1 where a comparison failed.

    show: {mode: function of (cases, args, device) that prints and returns rows}. what, prefix: as
    in `plot`.
    """
    options = parser(description)
    options.add_argument("--mode", choices=[*show, "all"], default="verify", help="(verify)")
    args = options.parse_args()
    device = choose(args.device)
    cases, suite = cases_of(args, options, device), verify_cases(args, options, device)
    console.print(f"device: {describe(device)}")
    rows = []
    for mode in show if args.mode == "all" else [args.mode]:
        shown = show[mode](suite if mode == "verify" else cases, args, device)
        rows += [(mode, row) for row in shown]
    if args.json:
        write_json(args.json, device, rows)
    if args.plot:
        plot(rows, Path(args.plot), f"{device}, tiles {tiles(args)}", what, prefix)
    return 0 if all(row.passed for mode, row in rows if mode == "verify") else 1


if __name__ == "__main__":
    cli.serve(main)
