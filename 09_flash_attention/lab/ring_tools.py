"""What flash_ring.py measures. Every rank makes the same calls, in the same order.

A form is (name, attend, places): attend(Q, K, V) of a rank's rows, and which rows those are,
places[rank].
"""

import math
import os
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist

from common.memory import measure_peak
from common.timing import quartiles, time_in_turn
from lab.bench import Candidate, need_room, verify
from lab.cases import Case
from lab.processes import RankFault, gather
from lab.ring_link import Link, place
from lab.ring_show import MergeRow, OverlapRow, RankRow, RingRow, TimeRow, TrainRow

ALLOWED = 1e-4  # between two losses in float32, the sum of some hundred logarithms


def results_of(attend, Q, K, V, dO=None):
    """Return [O], or with dO [dQ, dK, dV]."""
    leaves = [x.detach().requires_grad_(dO is not None) for x in (Q, K, V)]
    O = attend(*leaves)
    return [O] if dO is None else torch.autograd.grad(O, leaves, dO)


def rows_of(inputs, places):
    """Return this rank's rows of the inputs."""
    mine = places[place()[0]]
    return [x[..., mine.to(x.device), :] for x in inputs]


def whole(attend, places, *inputs):
    """Let each rank compute its rows of the inputs; return the results of all rows, on the CPU."""
    try:
        mine = results_of(attend, *rows_of(inputs, places))
        parts = gather([x.detach().cpu() for x in mine])
    except Exception as fault:  # of this rank alone: it can't become a row of a table
        raise RankFault from fault
    order = torch.cat(places).argsort()
    return [torch.cat(some, dim=-2)[..., order, :] for some in zip(*parts)]


def piece(ranks, N, zigzag):
    """Return how long the pieces are that N rows are cut into: one a rank, with zigzag two.

    Raises ValueError where they are not equally long.
    """
    pieces = 2 * ranks if zigzag else ranks
    if N % pieces:
        raise ValueError(f"N must be a multiple of {pieces} for {ranks} ranks"
                         f"{', zigzag' * zigzag}, got {N}")
    return N // pieces


def check_cases(cases, ranks, zigzag):
    """Check cases, {mode: some or None}: that they can be cut into pieces, and that the ranks of
    this machine can each hold the whole case: in `verify` its N x N matrices, and in `speed` what
    is drawn in float32 and then converted. Raises ValueError and Refused.
    """
    here, cpu = int(os.environ.get("LOCAL_WORLD_SIZE", ranks)), torch.device("cpu")
    for mode, case in ((mode, case) for mode, some in cases.items() for case in some or ()):
        piece(ranks, case.Nq, zigzag)
        *lead, N, _ = case.shapes[0]
        each = {"verify": 8 * 8 * math.prod(lead) * N * N,
                "speed": 2 * 4 * sum(map(math.prod, case.shapes))}.get(mode, 0)
        need_room(f"{mode} {case.shape} on {here} ranks", here * each, cpu)


def verify_forms(case, standard, forms, *, device, seed):
    """Compare each form with standard attention in one process and both with float64: RingRows."""
    candidates, rows = [Candidate("standard", partial(results_of, standard))], []
    candidates += [Candidate(name, partial(whole, *form)) for name, *form in forms]
    for names, factor in ((["O"], 2), (["dQ", "dK", "dV"], 3)):
        found = verify(case, candidates, device=device, seed=seed, dO=factor == 3, factor=factor)
        rows += [RingRow(**vars(row), of=of, ranks=place()[1])
                 for row, of in zip(found, cycle(names))]
    return rows


def measure_rank(form, own, formula, *, device, seed):
    """Return the RankRows of all ranks for one form: what each holds, sends and computes.

    own: the case of a rank's rows. formula: the bytes of a forward and of a backward.
    """
    (name, attend, places), (rank, ranks), sent = form, place(), [Link.sent]

    def noted(*inputs):
        O = attend(*inputs)
        sent.append(Link.sent)
        return O

    inputs = own.inputs(device, seed + rank, dO=True)
    peak = measure_peak(lambda: results_of(noted, *inputs), device).total
    counted = sent[1] - sent[0], Link.sent - sent[1]
    kept = [int((rows + 1).sum()) for rows in places]  # the row at position i sees i + 1 keys
    pairs, rows = (sum(kept) // ranks, "all, of its heads") if name == "ulysses" else (
        kept[rank], spans(places[rank].tolist()))
    return gather(RankRow(name, own.shape, rank, peak, *counted, *formula, pairs, rows,
                          counted == formula))


def spans(rows):
    """Show rows in one piece or more: '0-3, 12-15'."""
    starts = [0, *(i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1), len(rows)]
    return ", ".join(f"{rows[a]}-{rows[b - 1]}" for a, b in zip(starts, starts[1:]))


def peak_of_one(attend, case, *, device, seed):
    """Return the peak of a forward and a backward of the whole case in one process: rank 0's."""
    peak = None
    if place()[0] == 0:
        inputs = case.inputs(device, seed, dO=True)
        peak = measure_peak(lambda: results_of(attend, *inputs), device).total
    return gather(peak)[0]


def in_step(calls, device):
    """Time calls in turn, as many rounds on every rank, each until the last rank is ready."""
    def until_all(call):
        call()
        gather(None)

    with torch.no_grad():
        return time_in_turn({name: partial(until_all, call) for name, call in calls.items()},
                            device, budget=0)


def time_forms(case, one, forms, *, device, seed):
    """Time a forward of each form on all ranks, in turn with `one` on rank 0 alone: TimeRows."""
    inputs, (rank, ranks) = case.inputs(device, seed), place()
    calls = {"one rank alone": lambda: rank or one(*inputs, causal=True)}
    for name, attend, places in forms:
        calls[name] = partial(attend, *rows_of(inputs, places))
    rounds = in_step(calls, device)
    alone = rounds.median("one rank alone")
    return [TimeRow(name, case.shape, ranks, rounds.median(name), alone / rounds.median(name),
                    rounds.doubt(name)) for name in calls]


def measure_overlap(attend, one, round_trip, own, *, device, seed):
    """Time a forward round the ring with overlap and without, and its two halves alone: OverlapRows
    of the link as it is, and of one on which a block takes as long to send as to compute.

    one: the attention of one block. round_trip: the ring's, which only sends. own: a rank's case.
    """
    (Q, K, V), (_, ranks) = own.inputs(device, seed), place()
    pace, rows = 0.0, []

    def compute():
        for _ in range(ranks):
            one(Q, K, V)

    def send():
        for _ in round_trip(K, V, None):
            pass

    def on(call, overlap=True):
        Link.overlap, Link.pace = overlap, pace
        call()
        Link.overlap, Link.pace = True, 0.0

    calls = {"computing": partial(on, compute), "sending": partial(on, send),
             "in_turn": partial(on, partial(attend, Q, K, V), False),
             "overlapped": partial(on, partial(attend, Q, K, V))}
    before = Link.sent
    send()
    size = Link.sent - before
    for name in ("as it is", "slowed down"):
        rounds = in_step(calls, device)
        low, hidden, high = quartiles((a - b) / c for a, b, c in zip(
            *(rounds[name] for name in ("in_turn", "overlapped", "sending"))))
        seconds = {name: rounds.median(name) for name in calls}
        rows.append(OverlapRow(name, size / seconds["sending"] / 1e9, **seconds, hidden=hidden,
                               hidden_spread=(low, high), why=next(
                                   filter(None, map(rounds.doubt, calls)), "")))
        pace = max(gather(seconds["computing"])) / ranks * (ranks - 1) / size
    return rows


def train(one, split, attend, mine, steps):
    """Let two trainings of mini_gpt.py take as many steps, the second with its text split over the
    ranks: TrainRows.

    attend: the attention of the ranks. mine: the positions of this rank's rows, [N / ranks].
    """
    ([name, model],), (_, ranks) = split.models.items(), place()
    model.wpe.register_forward_pre_hook(lambda wpe, _: (mine,))  # they are not 0, 1, 2, ...
    for block in model.blocks:
        block.attn.attend = attend

    def average(*_):  # over the ranks, since each has the mean over its own rows
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.div_(ranks))

    split.optimizers[name].register_step_pre_hook(average)
    rows = []
    for step in range(1, steps + 1):
        one.step()
        x, y = split.next_batch()
        loss = split.learn(name, x[:, mine], y[:, mine]) / ranks
        dist.all_reduce(loss)
        losses = one.losses[name][-1], loss.item()
        rows.append(TrainRow(step, split.N, ranks, *losses,
                             abs(losses[0] - losses[1]) <= ALLOWED))
    return rows


def merge_hop_by_hop(attend, merge, N=4096, ranks=(1, 2, 4, 8, 16, 32, 64), seed=0):
    """Return MergeRows: 256 queries and N keys in so many parts, merged one after another."""
    Q, K, V = Case(256, Nk=N).inputs("cpu", seed)
    exact, rows = attend(*(x.double() for x in (Q, K, V))), []
    wide, half = torch.float32, torch.bfloat16
    for P in ranks:
        parts = [attend(Q, *part, return_m_l=True)
                 for part in zip(K.chunk(P, dim=-2), V.chunk(P, dim=-2))]
        errors = []
        for dtypes in ((wide, wide, wide), (half, wide, wide), (half, half, half)):
            state = [x.to(dtype) for x, dtype in zip(parts[0], dtypes)]
            for part in parts[1:]:
                merged = merge(*(torch.stack((x, y.to(x.dtype))) for x, y in zip(state, part)))
                state = [x.to(dtype) for x, dtype in zip(merged, dtypes)]
            error = state[0].to(half).double() - exact
            errors.append((error.square().mean() / exact.square().mean()).sqrt().item())
        rows.append(MergeRow(P, N, *errors))
    return rows
