"""FlashAttention, forward: exact attention without the N x N matrix, by tiling and online softmax.

    python flash_attention.py --mode verify      is it the same as standard attention?
    python flash_attention.py --mode memory      what does it save?
    python flash_attention.py --mode speed       what does it cost, or gain?
    python flash_attention.py --mode trace       the recurrence, step by step

First the whole algorithm, on one screen. Below it the same for heads, masks, strides and half
types, then the tools. Sources: FlashAttention (arXiv 2205.14135), FlashAttention-2 (2307.08691).
"""

import sys
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
import lab  # noqa: F401  it lets torch load where torch_npu can't
import torch


def plain_flash_attention(Q, K, V, Br=64, Bc=64):
    """Return softmax(Q K^T / sqrt(d)) V for Q [Nq, d], K [Nk, d], V [Nk, dv]."""
    O = []
    for Q_block in Q.split(Br):  # [Br, d]
        m = torch.full_like(Q_block[:, :1], -torch.inf)  # [Br, 1], running maximum of the scores
        l = O_block = 0  # [Br, 1], [Br, dv], running sums: of exp(S - m), of exp(S - m) V
        for K_block, V_block in zip(K.split(Bc), V.split(Bc)):  # [Bc, d], [Bc, dv]
            S_block = Q_block @ K_block.T / Q.shape[1] ** 0.5  # [Br, Bc]
            m_new = torch.maximum(m, S_block.amax(dim=1, keepdim=True))  # [Br, 1]
            correction = torch.exp(m - m_new)  # [Br, 1], from the old maximum to the new one
            P_block = torch.exp(S_block - m_new)  # [Br, Bc]
            l = correction * l + P_block.sum(dim=1, keepdim=True)  # [Br, 1]
            O_block = correction * O_block + P_block @ V_block  # [Br, dv]
            m = m_new
        O.append(O_block / l)
    return torch.cat(O)  # [Nq, dv]


from dataclasses import dataclass
from functools import partial

from common import cli
from common.report import console, print_table
from lab import lesson
from lab.autocast import without_autocast
from lab.bench import Candidate, benchmark, profile, verify
from lab.cases import VERIFY_CASES, Case
from lab.formulas import forward_bytes
from lab.fused import fused_attention
from lab.served import kernels_of, measurable
from lab.show import print_growth, print_memory, print_speed, print_verify
from lab.tiles import choose_tile, exp_
from lab.visible import Visible, fill, refuse_gradients, refuse_transforms, same


@without_autocast
def standard_attention(Q, K, V, *, causal=False, q_start=None, window=None, scale=None,
                       attn_mask=None, score_mod=None, return_lse=False, dropout_p=0.0, seed=0):
    """Return softmax(Q K^T * scale) V as the formula stands: the baseline, with two N x N matrices.

    Arguments, result and errors are those of `flash_attention_forward`. For float16 and bfloat16
    the scores are float32, and P is rounded to V's dtype before it meets V, as model code does.
    Autograd goes through it. NaN or inf in a key that some query sees reaches every gradient.
    """
    visible = Visible(Q, K, V, causal, q_start, window, scale, attn_mask, score_mod, dropout_p,
                      seed)
    rows = slice(0, visible.Nq)
    cols = visible.key_range(rows)
    K_cols, V_cols = visible.key_block(K, cols), visible.key_block(V, cols)  # [X, Nk, d or dv]
    Q_rows = visible.row_block(Q, rows)  # [X, G*Nq, d]
    unseen = visible.hidden_keys(Q_rows, K_cols)  # [X, Nk, 1]
    K_cols, V_cols = fill(K_cols, unseen, 0), fill(V_cols, unseen, 0)
    S = Q_rows @ K_cols.transpose(1, 2) * visible.scale  # [X, G*Nq, Nk]
    S = visible.restrict(S, rows, cols, unseen)
    blind = visible.blind_rows(S)  # [X, G*Nq, 1]
    S = fill(S, blind, 0)
    drop = visible.dropping(rows, cols).get("drop", same)
    P = visible.rounded(drop(torch.softmax(S, dim=-1)), V.dtype)  # [X, G*Nq, Nk]
    O = fill(P @ visible.rounded(V_cols, V.dtype), blind, 0)  # [X, G*Nq, dv]
    O = O.to(V.dtype).view(*Q.shape[:-1], V.shape[-1])  # [..., Nq, dv]
    if not return_lse:
        return O
    L = fill(torch.logsumexp(S, dim=-1, keepdim=True), blind, -torch.inf)  # [X, G*Nq, 1]
    return O, L.view(Q.shape[:-1])


def online_softmax_step(m, l, O_block, S_block, V_block, drop=same):
    """Take one more tile into the softmax; what was summed is rescaled to the new maximum.

    m, l [X, Br, 1]: running maximum and running sum of exp. O_block [X, Br, dv]: running output,
    not yet divided by l. S_block [X, Br, Bc], V_block [X, Bc, dv]: the tile's scores and values.
    drop: what dropout makes of P_block; l sums what it was before.
    Returns the new m, l, O_block. S_block and the old l and O_block are overwritten.
    Source: FlashAttention-2, Algorithm 1, lines 9 and 10.
    """
    m_new = torch.maximum(m, S_block.amax(-1, keepdim=True))  # [X, Br, 1]
    correction = torch.exp(m - m_new)  # [X, Br, 1], at most 1
    P_block = exp_(S_block.sub_(m_new))  # [X, Br, Bc]
    l = l.mul_(correction).add_(P_block.sum(-1, keepdim=True))  # [X, Br, 1]
    O_block = O_block.mul_(correction).baddbmm_(drop(P_block), V_block)  # [X, Br, dv]
    return m_new, l, O_block


@without_autocast
def flash_attention_forward(Q, K, V, Br=64, Bc=64, *, causal=False, q_start=None, window=None,
                            scale=None, attn_mask=None, score_mod=None, return_lse=False,
                            return_m_l=False, dropout_p=0.0, seed=0):
    """Return exact attention, tile by tile: no matrix larger than Br x Bc a head ever stands.

    Q [..., Nq, d], K [..., Nk, d], V [..., Nk, dv] -> O [..., Nq, dv] in Q's dtype: float16,
    bfloat16, float32 or float64; m, l, O and the scores are float32 for the first two. With
    [B, H, N, d], K and V may have fewer heads: query head h reads head h // (Hq / Hkv). Strided
    views are taken as they are.

    Br, Bc: rows of a query block and of a key/value block, 1 or more, or 'auto': see lab/tiles.py.
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
    return_m_l: return (O, m, l), [..., Nq] each: L = m + log(l), which loses log(l) beside a large
        m. What rebuilds weights from it takes exp(score - m) / l.
    dropout_p: the chance of a weight to be 0, while the others are divided by 1 - dropout_p. Which
        ones is a function of seed and of where they stand alone: see lab/dropout.py.

    A row that sees no key gives O = 0, l = 0 and L = -inf. NaN or inf in V reaches each query of a
    tile in which some query sees that key (0 * NaN is NaN): it is up to the tile which these are.
    Raises ValueError for shapes, numbers, devices and an input that wants a gradient (this is the
    forward alone), TypeError for dtypes.
    Source: FlashAttention-2, Algorithm 1: query blocks outside, key blocks inside.
    """
    visible = Visible(Q, K, V, causal, q_start, window, scale, attn_mask, score_mod, dropout_p,
                      seed)
    refuse_transforms(Q, K, V, attn_mask)
    refuse_gradients(Q=Q, K=K, V=V, attn_mask=attn_mask)
    O = Q.new_empty(*Q.shape[:-1], V.shape[-1])
    m_l = [Q.new_empty(*Q.shape[:-1], 1, dtype=visible.dtype)
           for _ in range(2 * (return_lse or return_m_l))]
    for part in visible.parts(Br, Bc, (Q, O, *m_l), (K, V)):
        attend_in_tiles(*part)
    m_l = [x.squeeze(-1) for x in m_l]
    return (O, *m_l) if return_m_l else (O, m_l[0] + m_l[1].log()) if return_lse else O


def attend_in_tiles(visible, Br, Bc, queries, keys, step=None):
    """Fill O, and m and l where asked for. queries: Q, O(, m, l); keys: K, V. step: for a trace."""
    step = step or online_softmax_step
    (Q, O, *m_l), (K, V) = queries, keys
    scratch = Q.new_empty(visible.X * visible.G * Br * Bc, dtype=visible.dtype)
    for rows in visible.query_blocks(Br):
        # m is the lowest finite number and not -inf: where a tile hides a whole row, correction is
        # then exp(0) = 1 and P_block exp(-inf) = 0, while -inf - -inf would be NaN.
        shape = visible.X, visible.G * (rows.stop - rows.start)
        m = Q.new_full((*shape, 1), visible.finite[0], dtype=visible.dtype)  # [X, G*Br, 1]
        l, O_block = torch.zeros_like(m), m.new_zeros(*shape, V.shape[-1])  # [X, G*Br, 1 or dv]
        for cols, S_block, V_block in visible.score_blocks(Q, K, V, rows, Bc, scratch):
            dropping = visible.dropping(rows, cols)
            m, l, O_block = step(m, l, O_block, S_block, V_block, **dropping)
        O_block.div_(l.masked_fill(l == 0, 1))  # l = 0: saw no key
        visible.store((O, *m_l), rows, (O_block, m, l))
        del m, l, O_block  # or those of the next rows would stand beside them


# The tools: each returns rows and prints nothing.


def candidates(case, Br=64, Bc=64, device="cpu"):
    """Return standard, flash and fused attention, and Triton's kernel where it runs."""
    device, masks = torch.device(device), case.masks
    tile = case.tile(Br, Bc, device)
    found = [
        Candidate("standard", partial(standard_attention, **masks),
                  forward_bytes("standard", case)),
        Candidate("flash", partial(flash_attention_forward, Br=Br, Bc=Bc, **masks),
                  forward_bytes("flash", case, *tile), tile[:2]),
        Candidate("fused", partial(fused_attention, **masks), forward_bytes("fused", case)),
    ][: 2 if device.type == "npu" and case.dv not in (None, case.d) else 3]
    kernels, _ = kernels_of("flash_triton", case, device)
    if kernels:
        found.append(Candidate("triton", partial(kernels.flash_attention_triton, **masks),
                               forward_bytes("triton", case)))
    return found


def compare_and_verify(cases=VERIFY_CASES, Br=64, Bc=64, *, device="cpu", seed=0):
    """Compare flash, and Triton's kernel where it runs, with standard attention and float64."""
    return [row for case in cases for row in verify(
        case, [c for c in candidates(case, Br, Bc, device) if c.name != "fused"], device=device,
        seed=seed)]


def profile_memory(cases, Br=64, Bc=64, *, device="cpu", seed=0):
    """Measure the peak memory of the `candidates`: MemoryRows."""
    return [row for case in cases for row in profile(
        case, measurable(candidates(case, Br, Bc, device), device),
        device=torch.device(device), seed=seed)]


def benchmark_speed(cases, Br=64, Bc=64, *, device="cpu", seed=0):
    """Time the `candidates` in turn; TFLOP/s count the kept score pairs only: SpeedRows."""
    return [row for case in cases for row in benchmark(
        case, measurable(candidates(case, Br, Bc, device), device),
        device=torch.device(device), seed=seed, flop=case.flop)]


@dataclass
class TraceRow:
    """The state of one query row after one tile. l is the second article's d."""

    query: int
    keys: str
    scores: list
    m: float
    correction: float
    l: float


def trace(Q, K, V, Br=2, Bc=2, **options):
    """Walk the tiles of one small [N, d] attention: a TraceRow a query and tile; and return O."""
    visible, O, seen = Visible(Q, K, V, **options), Q.new_empty(len(Q), V.shape[1]), []
    Br, Bc, _ = choose_tile(Br, Bc, Q, K, V.shape[1], Q.device.type)

    def watched_step(m, l, O_block, S_block, V_block):
        scores, m_old = S_block.clone(), m
        m, l, O_block = online_softmax_step(m, l, O_block, S_block, V_block)
        seen.append([x[0].tolist() for x in (scores, m, torch.exp(m_old - m), l)])
        return m, l, O_block

    attend_in_tiles(visible, Br, Bc, (Q, O), (K, V), watched_step)
    tiles = [(rows, cols) for rows in visible.query_blocks(Br)
             for cols in visible.key_blocks(rows, Bc)]
    steps = [TraceRow(query, f"{cols.start}-{cols.stop - 1}", *row[:1], *(x for [x] in row[1:]))
             for (rows, cols), columns in zip(tiles, seen)
             for query, row in zip(range(rows.start, rows.stop), zip(*columns))]
    return sorted(steps, key=lambda step: step.query), O  # a query is followed through its tiles


# The command line


def show_verify(rows, args, cases):
    print_verify(f"Verify: largest differences, tiles {lesson.tile_text(args)}", rows)


def show_memory(rows, args, cases):
    print_memory(
        f"Memory: peak of one call in MiB, tiles {lesson.tile_text(args)}", rows,
        "formula: S and P (standard), a tile of S_block and O_block and five columns (flash), L "
        "(fused), m and l (triton), and the result. Beyond it stand the fused kernel's working "
        "buffers and further outputs, copies of half-precision inputs in float32, and on a GPU or "
        "NPU the workspaces of the products and the allocator's rounding.")


def show_speed(rows, args, cases):
    print_speed("Speed: median of calls in turn", rows)
    print_growth(cases, rows)


def show_trace(args, device):
    """Print the article's [2, 1, 3], one score a tile, then a small attention; both on the CPU."""
    scores = torch.tensor([[2.0], [1.0], [3.0]])
    steps, P = trace(torch.ones(1, 1), scores, torch.eye(3), 1, 1, scale=1.0)
    print_trace("Trace: the softmax of [2, 1, 3], one score at a time", steps)
    probabilities = ", ".join(f"{p:.3f}" for p in P[0].tolist())
    console.print(f"\nexp(score - m) / l with the last m and l: {probabilities}")
    small = {"d": args.head_dim or 4, **lesson.masks(args)}
    lengths = (args.mode == "trace" and args.seq_len) or [6]  # with `all` they are the other modes'
    for N in lengths:
        case = Case(N, dtype=getattr(torch, args.dtype or "float32"), **small)
        Q, K, V = (x[0] for x in case.inputs("cpu", args.seed))
        Br, Bc, _ = case.tile(args.br or 2, args.bc or 2, Q.device)
        more, O = trace(Q, K, V, Br, Bc, **case.masks)
        print_trace(f"Trace: {N} queries, {N} keys, d = {case.d}, {Br}x{Bc} tiles", more)
        if case.hides:
            console.print("\ntiles: # wholly seen, / on the edge, . not visited\n")
            console.print(Visible(Q, K, V, **case.masks).drawing(Br, Bc))
        difference = (O - standard_attention(Q, K, V, **case.masks)).abs().max().item()
        console.print(f"\nlargest difference of O from standard attention: {difference:.1e}")
        steps += more
    return steps


def print_trace(title, steps):
    print_table(title, ["query", "keys", "scores", "m", "correction", "l"],
                [(r.query, r.keys, " ".join(f"{s:6.3f}" for s in r.scores),
                  f"{r.m:.3f}" if abs(r.m) < 1e6 else f"{r.m:.1e}",
                  f"{r.correction:.3f}", f"{r.l:.3f}") for r in steps])


MODES = {
    "trace": show_trace,
    "verify": (compare_and_verify, show_verify),
    "memory": (profile_memory, show_memory),
    "speed": (benchmark_speed, show_speed),
}


def main():
    return lesson.run_modes(lesson.parser(__doc__), MODES, "one attention call",
                            unserved={"trace": ("batch", "heads", "kv_heads")},
                            kernels="flash_triton")


if __name__ == "__main__":
    cli.serve(main)
