"""What exactness is traded against: four approximations of attention at equal FLOPs.

    python approximate.py               error, FLOPs, memory, time, beside exact attention
    python approximate.py --plot DIR    and the error over the share of FLOPs

Each approximation is told which share of exact attention's FLOPs it may spend, and needs no
training. Each one bets on where the weight of a row lies; the four inputs are chosen to show it.
"""

import sys
from dataclasses import dataclass
from os.path import dirname, realpath
from pathlib import Path
from typing import Optional

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.memory import measure_peak
from common.report import console, logarithmic, mib, plotted, print_table, track
from common.timing import ratio, time_in_turn
from flash_attention import flash_attention_forward, standard_attention
from lab.bench import need_room
from lab.show import ms, print_reasons

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LENGTH, BLOCK = 2048, 64  # BLOCK: queries that share their keys in window and block-sparse
SHARE, SHARES = 1 / 8, (1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of exact attention's FLOPs
GOOD = 0.1  # an error


def window(Q, K, V, share):
    """Bet: the weight lies near the query. Exact attention to share * N neighbouring keys.

    Source: Longformer (arXiv 2004.05150), section 3.1.
    """
    reach = round(share * len(K) - BLOCK) // 2  # a block of queries visits BLOCK + 2 reach keys
    return flash_attention_forward(Q, K, V, BLOCK, "auto", window=(reach, reach))


def block_sparse(Q, K, V, share):
    """Bet: some blocks speak for all. Exact attention to a query's own block and random others.

    Source: BigBird (arXiv 2007.14062), section 2, without its global tokens.
    """
    blocks, generator = len(K) // BLOCK, torch.Generator().manual_seed(0)
    order = torch.rand(blocks, blocks, generator=generator).fill_diagonal_(1)
    seen = order.topk(round(share * blocks)).indices.to(K.device)  # [blocks, share * blocks]
    K_seen, V_seen = (x.view(blocks, BLOCK, -1)[seen].flatten(1, 2) for x in (K, V))  # copies
    Q_blocks = Q.view(blocks, BLOCK, -1)  # [blocks, BLOCK, d], against [blocks, share * N, d]
    return flash_attention_forward(Q_blocks, K_seen, V_seen, BLOCK, "auto").flatten(0, 1)


def low_rank(Q, K, V, share):
    """Bet: neighbouring keys are alike. Exact attention to share * N means of neighbours.

    Source: Linformer (arXiv 2006.04768), softmax(Q (E K)^T) F V. There E and F [k, N] are learned;
    here both take means, which needs no training.
    """
    k = round(share * len(K))
    K_means, V_means = (x.view(k, len(x) // k, -1).mean(dim=1) for x in (K, V))  # [k, d]
    return standard_attention(Q, K_means, V_means)


def random_features(Q, K, V, share):
    """Bet: the scores are small. exp(q k) is the mean over random w of f(q) f(k), where
    f(x) = exp(w x - |x|^2 / 2); so K and V are summed up once, for all queries.

    Source: Performer (arXiv 2009.14794), positive features, w not made orthogonal.
    """
    N, d = K.shape
    r = round(share * 4 * N * d / (8 * d + 2))  # features: 4 products of 2 N r d, one of 2 N r
    W = torch.randn(d, r, generator=torch.Generator().manual_seed(0)).to(K.device)
    Q, K = Q * d**-0.25, K * d**-0.25
    S_Q, S_K = (x @ W - x.square().sum(dim=1, keepdim=True) / 2 for x in (Q, K))  # [N, r]
    f_Q, f_K = torch.exp(S_Q - S_Q.amax(dim=1, keepdim=True)), torch.exp(S_K - S_K.amax())
    return f_Q @ (f_K.T @ V) / (f_Q @ f_K.sum(dim=0)[:, None])


def mean_of_values(Q, K, V, share):
    """Spend nothing: each key has the same weight."""
    return V.mean(dim=0).expand(len(Q), -1)


EXACT = {"standard": lambda Q, K, V, share: standard_attention(Q, K, V),
         "flash": lambda Q, K, V, share: flash_attention_forward(Q, K, V, "auto", "auto")}
METHODS = {"window": window, "block-sparse": block_sparse, "low rank": low_rank,
           "random features": random_features}
ALL = {**EXACT, **METHODS, "mean of V": mean_of_values}


def inputs(N, d, seed=0):
    """Return {kind: (Q, K, V)}, each [N, d], on the CPU.

    random: standard normal, so every key has some weight. one key, one key near: each query is
    twice a key, anywhere or at most 8 places away; at d = 64 that key has nearly all the weight.
    smooth: each tensor changes slowly from row to row.
    """
    generator = torch.Generator().manual_seed(seed)
    Q, K, V = (torch.randn(N, d, generator=generator) for _ in range(3))
    anywhere = torch.randint(N, (N,), generator=generator)
    near = torch.arange(N) + torch.randint(-8, 9, (N,), generator=generator)
    knots = torch.randn(3, d, N // 64 + 1, generator=generator)
    smooth = torch.nn.functional.interpolate(knots, N, mode="linear", align_corners=True).mT
    return {"random": (Q, K, V), "one key": (2 * K[anywhere], K, V),
            "one key near": (2 * K[near.clamp(0, N - 1)], K, V), "smooth": tuple(smooth)}


class Products(TorchDispatchMode):
    """Count the FLOPs of the matrix products that are run while it is on."""

    flop = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func._schema.name[6:] in ("mm", "addmm", "bmm", "baddbmm", "baddbmm_"):
            self.flop += 2 * found.numel() * args[-2].shape[-1]
        return found


@dataclass
class ErrorRow:
    """|O - float64| / |O| of one method. share: of exact attention's FLOPs, as it was asked."""

    name: str
    shape: str
    share: float
    kind: str
    error: float


@dataclass
class CostRow:
    """What a call costs. flop: counted, of its products. ratio_to_flash: times as fast as flash,
    ratio_spread its quartiles over the rounds. why: why seconds are not to be believed, or ''.
    """

    name: str
    shape: str
    flop: int
    peak_bytes: int
    seconds: Optional[float] = None
    ratio_to_flash: Optional[float] = None
    ratio_spread: Optional[tuple] = None
    why: str = ""


def errors(case, device, seed):
    """Measure the error of every method on every input, over the shares: ErrorRows."""
    rows = []
    for kind, tensors in track("errors", list(inputs(case.Nq, case.d, seed).items())):
        O = standard_attention(*(x.double() for x in tensors))
        on_device = [x.to(device) for x in tensors]
        for name, attend in ALL.items():
            for share in SHARES if name in METHODS else (SHARE,):
                error = (attend(*on_device, share).cpu() - O).norm() / O.norm()
                rows.append(ErrorRow(name, case.shape, share, kind, error.item()))
    return rows


def costs(case, device, seed):
    """Count and measure what every method costs at SHARE, on random inputs: CostRows."""
    Q, K, V = (x.to(device) for x in inputs(case.Nq, case.d, seed)["random"])
    calls = {name: lambda attend=attend: attend(Q, K, V, SHARE) for name, attend in ALL.items()}
    rows = []
    for name, call in calls.items():
        with Products() as products:
            call()  # on a card the workspaces are allocated in the first call
        peak = measure_peak(call, device).total
        rows.append(CostRow(name, case.shape, products.flop, peak))
    rounds = time_in_turn(calls, device)
    for row in rows:
        row.seconds = rounds.median(row.name)
        row.ratio_to_flash, row.ratio_spread = ratio(rounds["flash"], rounds[row.name])
        row.why = rounds.doubt(row.name)
    return rows


def by_kind(found):
    """Return {kind: {(name, share): error}} of the ErrorRows."""
    errors = {}
    for row in found:
        errors.setdefault(row.kind, {})[row.name, row.share] = row.error
    return errors


def conclusions(found, cost):
    """Return what the rows say, a line each."""
    kinds, lines = by_kind(found), []
    for kind, error in kinds.items():
        good = [name for name in METHODS if error[name, SHARE] <= GOOD]
        vain = [name for name in METHODS if error[name, SHARE] >= error["mean of V", SHARE]]
        lines.append(f"{kind}: error at most {GOOD:.0%}: {listed(good)}; no better than the mean "
                     f"of V: {listed(vain)}")
    always = [name for name in ALL if all(e[name, SHARE] <= GOOD for e in kinds.values())]
    faster = [r.name for r in cost if r.name in METHODS and r.ratio_spread[0] > 1]
    return [*lines, f"error at most {GOOD:.0%} on every input: {listed(always)}",
            f"faster than flash in three of four rounds, on this device: {listed(faster)}"]


def listed(names):
    return ", ".join(names) or "none"


def show(case, found, cost):
    kinds = by_kind(found)
    print_table(
        f"{case.Nq} queries and keys, d = {case.d}, float32; approximations may spend {SHARE:g} of "
        "the FLOPs", ["", "MFLOP", "of exact", *(f"error: {kind}" for kind in kinds), "peak, MiB",
                      "ms", "times as fast as flash"],
        [(r.name, f"{r.flop / 1e6:.4g}", f"{r.flop / cost[0].flop:.3f}",
          *(f"{error[r.name, SHARE]:.2g}" for error in kinds.values()), mib(r.peak_bytes), ms(r),
          f"{r.ratio_to_flash:.3g}") for r in cost])
    print_table("Error over the share of the FLOPs",
                ["input", "", *(f"{share:g}" for share in SHARES)],
                [(kind, name, *(f"{error[name, share]:.2g}" for share in SHARES))
                 for kind, error in kinds.items() for name in METHODS], left=2)
    console.print("\n" + "\n".join(conclusions(found, cost)))
    print_reasons(cost)


def plot(path, found):
    """Draw the error of every method over the share of FLOPs, a panel an input."""
    kinds = by_kind(found)
    with plotted(path, 1, len(kinds), figsize=(11, 3.2), sharey=True) as panels:
        for panel, (kind, error) in zip(panels, kinds.items()):
            for name, marker in zip(METHODS, "osv^"):
                panel.plot(SHARES, [error[name, share] for share in SHARES], marker + "-",
                           label=name)
            panel.axhline(error["mean of V", SHARE], color="grey", linestyle="--",
                          label="mean of V")
            panel.set(title=kind, xlabel="share of FLOPs")
            logarithmic(panel, SHARES)
        panels[0].set_ylabel("error of O")
        panels[0].legend(fontsize="small")


def main():
    options = lesson.parser(__doc__, *"device seq-len head-dim seed json plot".split())
    least = round(BLOCK / min(SHARES))

    def check(args):
        if any(N % least for N in args.seq_len or []):
            options.error(f"argument --seq-len: multiples of {least} are taken, got "
                          f"{' '.join(map(str, args.seq_len))}")

    args, device, cases = lesson.begin(options, (LENGTH,), check)
    rows = []
    for case in cases:
        need_room(f"attention in float64 at N = {case.Nq}", 3 * 8 * case.Nq**2,
                  torch.device("cpu"))
        found, cost = errors(case, device, args.seed), costs(case, device, args.seed)
        show(case, found, cost)
        rows += [*(("errors", row) for row in found), *(("costs", row) for row in cost)]
    if args.plot:
        plot(Path(args.plot) / "approximate.png", found)  # of the last length
    return lesson.finish(args, device, rows)


if __name__ == "__main__":
    cli.serve(main)
