"""More than one device: each keeps its queries, and the keys and values go round a ring.

    python flash_ring.py --ranks 4              is it the same as in one process?
    python flash_ring.py --mode memory          what does a rank hold, send and compute?
    python flash_ring.py --mode speed           what does it cost, and what does overlap hide?
    python flash_ring.py --mode train           does a small GPT learn alike, its text split?
    python flash_ring.py --mode merge           the trap: parts that are merged in bfloat16
    python flash_ring.py --mode links           how long must a block be for a device's links?
    torchrun --nproc-per-node 4 flash_ring.py   the same in processes that torchrun starts

The softmax of parts of the keys is merged by m and l: see flash_decoding.py. Here the parts lie on
other devices and come one by one. Sources: Ring Attention (arXiv 2310.01889); DeepSpeed-Ulysses
(arXiv 2309.14509).
"""

import sys
from dataclasses import replace
from functools import partial
from itertools import product
from os.path import dirname, realpath
from pathlib import Path

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from flash_attention import flash_attention_forward, standard_attention
from flash_backward import flash_attention, flash_attention_backward
from flash_decoding import merge
from lab import processes, ring_show, ring_tools
from lab.autocast import as_autocast
from lab.ring_costs import ring_bytes, ulysses_bytes
from lab.ring_link import Link, place
from lab.tiles import AUTO
from lab.visible import Visible
from mini_gpt import TEXT, Training

import torch
from torch.autograd.function import once_differentiable

NAMES = ("ring", "zigzag", "ulysses")


def positions(rank, ranks, N, zigzag=False):
    """Return which of N positions are a rank's rows, [N / ranks]: a part in one piece, or with
    zigzag two pieces, as far from the front as from the end:

        4 ranks          0 0 1 1 2 2 3 3        zigzag   0 1 2 3 3 2 1 0

    Raises ValueError where the pieces are not equally long.
    """
    n, mine = ring_tools.piece(ranks, N, zigzag), (rank, 2 * ranks - 1 - rank)[: 1 + zigzag]
    return torch.cat([torch.arange(i * n, (i + 1) * n) for i in mine])


def meeting(rank, source, n, causal, zigzag):
    """Return (rows, cols, triangle): which of a rank's n queries see which of the n keys of rank
    `source`, in a triangle or all of them; None where none sees any.

    Causal: those that come later see those that come earlier. With zigzag either all queries see
    the first half of the keys, or the second half of the queries sees all keys: equal work.
    """
    every = slice(0, n)
    if not causal or rank == source:
        return every, every, causal
    if zigzag:
        halves = (every, slice(0, n // 2)), (slice(n // 2, n), every)
        return *halves[source > rank], False
    return (every, every, False) if source < rank else None


def round_trip(K, V, group):
    """Yield (source, K, V): the keys and values of each rank, this rank's own first. The next ones
    are under way while the caller works with these.
    """
    rank, ranks = place(group)
    for hop in range(ranks):
        arrived = Link.pass_on((K, V), group) if hop < ranks - 1 else None
        yield (rank - hop) % ranks, K, V
        if arrived:
            K, V = arrived()


def ring_forward(Q, K, V, causal, zigzag, scale, group, dtype):
    """Return O [..., n, dv], m and l [..., n] of this rank's queries over all keys, in `dtype`."""
    (rank, _), n, Q = place(group), Q.shape[-2], Q.to(dtype)
    for source, K_block, V_block in round_trip(K, V, group):
        met = meeting(rank, source, n, causal, zigzag)
        if not met:
            continue
        rows, cols, triangle = met
        part = flash_attention_forward(
            Q[..., rows, :], K_block[..., cols, :].to(dtype), V_block[..., cols, :].to(dtype),
            AUTO, AUTO, causal=triangle, scale=scale, return_m_l=True)
        if source == rank:
            O, m, l = part
            continue
        so_far = O[..., rows, :], m[..., rows], l[..., rows]
        O[..., rows, :], m[..., rows], l[..., rows] = merge(*map(torch.stack, zip(so_far, part)))
    return O, m, l


def ring_backward(dO, Q, K, V, O, m, l, causal, zigzag, scale, group):
    """Return dQ, dK and dV of this rank's rows, in the dtype of m.

    P = exp(S - m) / l needs no other rank once m and l are those of all keys, and neither does
    D = rowsum(dO * O). The sums dK and dV go round behind their K and V, and one hop further: home.
    """
    (rank, _), n, dtype, arrived = place(group), Q.shape[-2], m.dtype, None
    Q, O, dO = (x.to(dtype) for x in (Q, O, dO))
    dQ = torch.zeros_like(Q)
    for source, K_block, V_block in round_trip(K, V, group):
        met, part = meeting(rank, source, n, causal, zigzag), None
        if met:
            rows, cols, triangle = met
            dQ_part, *part = flash_attention_backward(
                dO[..., rows, :], Q[..., rows, :], K_block[..., cols, :].to(dtype),
                V_block[..., cols, :].to(dtype), O[..., rows, :], m[..., rows], l[..., rows],
                AUTO, AUTO, causal=triangle, scale=scale)
            dQ[..., rows, :] += dQ_part
            del dQ_part
        sums = arrived() if arrived else part  # of its own keys a rank sees all
        if arrived and part:
            for so_far, more in zip(sums, part):
                so_far[..., cols, :] += more
        arrived = Link.pass_on(sums, group)
        del sums, part  # before those of the next block are made
    return dQ, *arrived()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Q, K, V, dtype, *call):
        O, m, l = ring_forward(Q, K, V, *call, dtype)
        O = O.to(Q.dtype)
        ctx.save_for_backward(Q, K, V, O, m, l)
        ctx.call = call
        return O

    @staticmethod
    @once_differentiable
    def backward(ctx, dO):
        gradients = ring_backward(dO, *ctx.saved_tensors, *ctx.call)
        return *(x.to(dO.dtype) for x in gradients), *[None] * 5


def ring_attention(Q, K, V, *, causal=False, zigzag=False, scale=None, group=None):
    """Return exact attention of this rank's queries over the keys of all ranks, differentiable.

    Q [..., n, d], K [..., n, d], V [..., n, dv] -> O [..., n, dv]: the rows `positions` names, n on
    each rank. Dtypes and heads as in `flash_attention_forward`; scores, m, l, and the sums O, dQ,
    dK and dV are float32 for half types. Every rank calls it, and its backward.

    zigzag: the rows are in that order. It changes nothing but with causal, where it gives all ranks
    equal work. group: the ranks; None is all.
    Raises ValueError and TypeError before anything is sent, for what `flash_attention_forward`
    refuses, for other rows in K than in Q, and for an odd n with zigzag. RuntimeError where another
    rank is lost.
    Source: Ring Attention (arXiv 2310.01889).
    """
    Q, K, V = as_autocast(Q, K, V)
    visible = Visible(Q, K, V, causal, scale=scale)
    if visible.Nk != visible.Nq:
        raise ValueError(f"K must have as many rows as Q on a rank, got K {tuple(K.shape)} and "
                         f"Q {tuple(Q.shape)}")
    if zigzag and visible.Nq % 2:
        raise ValueError(f"zigzag takes an even number of rows a rank, got Q {tuple(Q.shape)}")
    return _RingAttention.apply(Q, K, V, visible.dtype, causal, zigzag, visible.scale, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.back = join, cut, group
        return Link.exchange(x, cut, join, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx):
        return Link.exchange(dx, *ctx.back), None, None, None


def ulysses_attention(Q, K, V, *, causal=False, scale=None, group=None):
    """Return what `ring_attention` returns without zigzag, by exchanging heads for rows.

    Q [B, H, n, d] becomes [B, H/P, P n, d]: all rows of some heads, which need no other rank. O
    goes back the same way. Every rank calls it, and its backward.
    Raises ValueError where P does not divide the heads of Q and of K.
    Source: DeepSpeed-Ulysses (arXiv 2309.14509).
    """
    Q, K, V = as_autocast(Q, K, V)
    Visible(Q, K, V, causal, scale=scale)  # it checks them
    _, ranks = place(group)
    if Q.dim() != 4 or Q.shape[1] % ranks or K.shape[1] % ranks:
        raise ValueError(f"ulysses takes [B, H, n, d] with heads of Q and of K that {ranks} ranks "
                         f"divide, got Q {tuple(Q.shape)}, K {tuple(K.shape)}")
    Q, K, V = (_Exchange.apply(x, 1, 2, group) for x in (Q, K, V))  # [B, H/P, P n, d]
    O = flash_attention(Q, K, V, AUTO, AUTO, causal=causal, scale=scale)
    return _Exchange.apply(O, 2, 1, group)  # [B, H, n, dv]


# The tools: every rank calls them; each prints its table and returns the rows.


def forms(case, args):
    """Return (name, attend, places) of each form that suits the case: see lab/ring_tools.py."""
    known = {"ring": ring_attention, "zigzag": partial(ring_attention, zigzag=True),
             "ulysses": ulysses_attention}
    return [(name, partial(known[name], causal=case.causal),
             [positions(rank, args.ranks, case.Nq, name == "zigzag") for rank in range(args.ranks)])
            for name in args.attention if case.causal or name != "zigzag"]


def compare_and_verify(args, device, cases):
    """Compare all forms with standard attention in one process: RingRows."""
    dtypes = [getattr(torch, args.dtype)] if args.dtype else [
        torch.float64, torch.float32, torch.bfloat16][device.type == "npu" :]  # it has no float64
    rows = []
    for case, dtype, causal in product(cases, dtypes, (False, True)):
        case = replace(case, dtype=dtype, causal=causal)
        rows += ring_tools.verify_forms(case, partial(standard_attention, **case.masks),
                                        forms(case, args), device=device, seed=args.seed)
    ring_show.print_verify(rows)
    return rows


def profile_memory(args, device, cases):
    """Measure what a rank holds, sends and computes: RankRows."""
    found, where = [], {"device": device, "seed": args.seed}
    for case in (replace(case, causal=True) for case in cases):
        own, rows = replace(case, Nq=case.Nq // args.ranks), []
        for form in forms(case, args):
            formula = ulysses_bytes if form[0] == "ulysses" else ring_bytes
            rows += ring_tools.measure_rank(form, own, formula(case, args.ranks), **where)
        one = partial(flash_attention, Br=AUTO, Bc=AUTO, **case.masks)
        ring_show.print_ranks(rows, case, ring_tools.peak_of_one(one, case, **where))
        found += rows
    return found


def benchmark_speed(args, device, cases):
    """Time the forms, and what overlap hides: TimeRows, OverlapRows."""
    found, where = [], {"device": device, "seed": args.seed}
    for case in (replace(case, causal=True) for case in cases):
        one = partial(flash_attention_forward, Br=AUTO, Bc=AUTO)
        rows = ring_tools.time_forms(case, one, forms(case, args), **where)
        ring_show.print_times(rows)
        found += rows
        if args.ranks > 1:
            own = replace(case, Nq=case.Nq // args.ranks)
            rows = ring_tools.measure_overlap(ring_attention, one, round_trip, own, **where)
            ring_show.print_overlap(rows, case.shape)
            found += rows
    return found


def train(args, device, cases):
    """Train a small GPT in one process and with each text split over the ranks: TrainRows."""
    found = []
    for case in cases:
        shape = {"N": case.Nq, "n_layer": 2, "n_head": 4, "n_embd": 64}
        try:
            trainings = [Training(TEXT.read_text(), shape, ("flash",), batch=4, device=device,
                                  seed=args.seed) for _ in range(2)]
        except ValueError as refusal:
            raise processes.AllRefused(str(refusal)) from refusal
        mine = positions(*place(), case.Nq, zigzag=True).to(device)
        rows = ring_tools.train(*trainings, partial(ring_attention, zigzag=True), mine, args.steps)
        ring_show.print_training(rows)
        found += rows
    return found


def merge_trap(args, device, cases):
    """Merge parts of the keys hop by hop, in float32 and in bfloat16: MergeRows."""
    rows = ring_tools.merge_hop_by_hop(flash_attention_forward, merge, seed=args.seed)
    ring_show.print_merges(rows)
    if args.plot:
        ring_show.plot_merges(rows, Path(args.plot) / "ring_merge.png")
    return rows


# The command line

# {mode: (tool, rows a rank where --seq-len is not given; None: it needs no other rank)}
MODES = {"verify": (compare_and_verify, 64), "memory": (profile_memory, 1024),
         "speed": (benchmark_speed, 1024), "train": (train, 16), "merge": (merge_trap, None),
         "links": (ring_show.links, None)}
FIXED = ("batch", "dtype", "heads", "kv_heads", "head_dim", "seq_len")  # in the last three modes


def check(args, options):
    """Refuse what can't be served before a rank is started; fill in what depends on --ranks, and
    args.cases, {mode: its cases, None where it needs no other rank}.
    """
    device = processes.check(args, options)
    fixed = {"train": FIXED[:-1], "merge": FIXED, "links": FIXED}.get(args.mode, ())
    for name in (name for name in fixed if getattr(args, name)):
        options.error(f"argument --{name.replace('_', '-')}: --mode {args.mode} takes none")
    if args.plot and args.mode not in ("merge", "all"):
        options.error(f"argument --plot: merge is drawn, got --mode {args.mode}")
    if args.heads is None:
        args.heads, args.kv_heads = 2 * args.ranks, args.kv_heads or args.ranks
    for name in ("heads", "kv_heads"):
        if "ulysses" in args.attention and (getattr(args, name) or 0) % args.ranks:
            options.error(f"argument --{name.replace('_', '-')}: a multiple of {args.ranks} for "
                          f"ulysses is taken, got {getattr(args, name)}; or take --attention ring")
    args.cases = {
        mode: rows and lesson.cases_of(args, options, device, (rows * args.ranks,))
        for mode, (_, rows) in MODES.items() if args.mode in (mode, "all")}
    try:
        ring_tools.check_cases(
            args.cases, args.ranks, "zigzag" in args.attention or "train" in args.cases)
    except (ValueError, cli.Refused) as refusal:
        options.error(f"argument --seq-len: {refusal}")


def run(options):
    """Run the modes asked for, the ranks together or one alone; return the exit status."""
    args, device, _ = lesson.begin(options, check=partial(check, options=options))
    together, found = any(args.cases.values()), []
    if together:
        processes.join(device, args.patience)
    for mode, cases in args.cases.items():
        if cases or processes.is_first():
            found += [(mode, row) for row in MODES[mode][0](args, device, cases)]
    if together:
        processes.leave()
    return lesson.finish(args, device, found) if processes.is_first() else 0


def main():
    options = lesson.parser(
        __doc__, *"device dtype batch heads kv-heads seq-len head-dim seed json plot".split())
    processes.add_options(options)
    add = options.add_argument
    add("--mode", choices=[*MODES, "all"], default="verify", help="(verify)")
    add("--attention", nargs="+", choices=NAMES, default=NAMES, help=f"({' '.join(NAMES)})")
    add("--steps", type=cli.whole_number(1), default=10, help="of --mode train (10)")
    if processes.is_rank():
        return processes.as_rank(partial(run, options))
    args = options.parse_args()
    check(args, options)
    return processes.start_again(args, options) if any(args.cases.values()) else run(options)


if __name__ == "__main__":
    cli.serve(main)
