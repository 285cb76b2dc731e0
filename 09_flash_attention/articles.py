"""What the two articles say, beside what this machine measures or what their own numbers give.

    python articles.py
"""

import math
import sys
from dataclasses import dataclass
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from approximate import METHODS, SHARE, by_kind, errors
from common import cli
from common.report import mib, print_table
from flash_attention import benchmark_speed, compare_and_verify, profile_memory, trace
from generations import busy_cores, count
from io_model import article_claims, counted
from lab.cases import ARTICLE_CASES, Case
from lab.machines import CHIPS
from overlap import hopper, rates

import torch

MEMORY_N, SPEED_N = 4096, 2048  # the lengths that the first article measures at
APPROXIMATE_N = 1024


@dataclass
class Claim:
    """One line of the table, in words. article: 1 or 2. says and here carry their units."""

    article: int
    claim: str
    says: str
    here: str
    why: str


def differences(device, seed=0):
    """Return the claims of accuracy."""
    said = ("1.19e-07", "1.34e-07", "1.79e-07", "2.09e-07")
    rows = compare_and_verify(ARTICLE_CASES, device=device, seed=seed)
    rows = [row for row in rows if row.name == "flash"]
    each = [Claim(1, f"largest difference, {row.shape}", says, f"{row.max_diff:.2e}",
                  "other inputs and another order of sums: both are roundings" if row.passed
                  else f"it fails: {row.why or 'more than twice the error of standard attention'}")
            for row, says in zip(rows, said)]
    return [*each, Claim(1, "all of these", "below 1e-06", f"{max(r.max_diff for r in rows):.2e}",
                         "its target was 1e-3")]


def peaks(device, seed=0):
    """Return the claims of memory."""
    standard, flash, *_ = profile_memory([Case(MEMORY_N)], device=device, seed=seed)
    if standard.why or flash.why:
        return [_missing(f"peaks, N={MEMORY_N}", "130 MB, 1 MB", standard, flash)]
    total, without = standard.peak_bytes, standard.peak_bytes_without_result
    return [
        Claim(1, f"standard peak, N={MEMORY_N}", "130 MB", f"{mib(total)} MiB",
              f"S and P are {mib(without)} MiB, the result is the rest"),
        Claim(1, f"flash peak, N={MEMORY_N}", "1 MB", f"{mib(flash.peak_bytes)} MiB",
              f"all but {mib(flash.peak_bytes_without_result)} MiB is the result"),
        Claim(1, "saved", "95 %", f"{1 - flash.peak_bytes / total:.1%}",
              f"its own 130 and 1 MB give {1 - 1 / 130:.1%}"),
    ]


def growth(device, seed=0):
    """Return the claims of how memory grows: twice the length, in one run."""
    short, long = ({row.name: row for row in profile_memory([Case(N)], device=device, seed=seed)}
                   for N in (MEMORY_N // 2, MEMORY_N))
    if any(rows[name].why for rows in (short, long) for name in ("standard", "flash")):
        return [_missing("twice the length", "4 x", *short.values(), *long.values())]

    def factor(name, field="peak_bytes"):
        return f"{getattr(long[name], field) / getattr(short[name], field):.2f} x"

    without = "peak_bytes_without_result"
    return [
        Claim(2, "memory at twice the length, standard", "4 x", factor("standard"),
              f"peak of N={MEMORY_N} over that of {MEMORY_N // 2}; S and P alone: "
              f"{factor('standard', without)}"),
        Claim(2, "the same, flash: O(n)", "2 x", factor("flash"),
              f"the result; what stands beside it, a tile: {factor('flash', without)}"),
        Claim(2, "arithmetic at twice the length", "4 x",
              f"{Case(MEMORY_N).flop / Case(MEMORY_N // 2).flop:.2f} x", "4 n^2 d FLOPs, counted"),
    ]


def times(device, seed=0):
    """Return the claims of time. Each reason follows from what was measured."""
    standard, small, *others = benchmark_speed([Case(SPEED_N)], 64, 64, device=device, seed=seed)
    large = benchmark_speed([Case(SPEED_N)], "auto", "auto", device=device, seed=seed)[1]
    if None in (standard.seconds, small.seconds, large.seconds):
        return [_missing(f"times, N={SPEED_N}", "0.1 ms, 341 ms", standard, small, large)]
    a_call = small.seconds / small.launches * 1e6
    calls = f"{small.launches} operator calls of {a_call:.2g} us each"
    its = f"its 341 ms would be {341e3 / small.launches:.2g} us each"
    tile = f"{large.Br}x{large.Bc} tiles: {large.launches} calls"
    if large.why:
        reason = f"not to be believed: {large.why}"
    elif large.ratio_to_standard > 1:
        reason = f"{tile}, and no N x N matrix to write and to read"
    else:
        reason = f"{tile}; here they cost more than the N x N matrices of standard attention"
    return [
        Claim(1, f"standard, N={SPEED_N}", "0.1 ms", _ms(standard), standard.why and
              f"not to be believed: {standard.why}" or f"it was a 910B3, this is {device}"),
        Claim(1, f"flash, N={SPEED_N}, 64x64 tiles", "341 ms", _ms(small), small.why and
              f"not to be believed: {small.why}" or f"{calls}; {its}"),
        *(Claim(2, "speed of a fused kernel", "2 to 4 x standard",
                f"{row.ratio_to_standard:.2g} x standard", row.why and
                f"not to be believed: {row.why}" or f"the platform's own on {device}, N={SPEED_N}; "
                f"this loop with {large.Br}x{large.Bc} tiles: {large.ratio_to_standard:.2g} x")
          for row in others if row.name == "fused" and row.seconds is not None),
        Claim(1, "Python can't be faster", "0.0003 x standard",
              f"{large.ratio_to_standard:.2g} x standard", reason),
    ]


def computed(device="cpu", seed=0):
    """Return the claims that arithmetic settles, anywhere."""
    return memory_computed() + formulas_computed()


def memory_computed(d=64, Br=64, Bc=64):
    """Return the first article's figures of memory, and what follows from the same arithmetic."""
    matrix = {N: N * N * 4 for N in (2048, 4096, 16384)}  # bytes of S, float32
    limit = {N: 2 * N / d + 1 for N in matrix}
    short, far = (limit[N] * Br * Bc / N**2 for N in (4096, 16384))
    chip = CHIPS["910B3"]
    moved = 4 * (matrix[2048] + 2048 * d * 4)
    return [
        Claim(1, "the saving tends to N^2/(Br Bc)", "4096 at N=4096",
              f"{limit[4096]:.0f} at N=4096, d=64",
              "flash still holds its result: (2N^2 + Nd) / Nd = 2N/d + 1 is the limit"),
        Claim(1, "a larger N brings it nearer", "nearer", f"from {short:.1%} of it to {far:.1%}",
              "N=4096, then 16384: the limit grows with N, N^2/(Br Bc) with N^2"),
        Claim(1, "S and P of GPT-3 at N=2048", "16 GB", f"{2 * 96 * matrix[2048] / 1e9:.1f} GB",
              "one layer, 96 heads, float32, batch 1"),
        Claim(1, "S and P at N=4096", "128 MB, elsewhere 256 MB",
              f"{2 * matrix[4096] / 2**20:.0f} MiB",
              "64 MiB each; its 256 has no second pair that stands at the same time"),
        Claim(1, "P written over S, at N=4096", "still 128 MB", f"{matrix[4096] / 2**20:.0f} MiB",
              "in one place only one of them stands; 128 MiB takes both"),
        Claim(1, "S and P at N=16384", "1 GB each", f"{matrix[16384] / 2**30:.0f} GiB each", ""),
        Claim(1, "a tile, and two of them", "0.016, 0.03 MB",
              f"{Br * Bc * 4 / 1e6:.3f}, {2 * Br * Bc * 4 / 1e6:.3f} MB", "64 x 64 in float32"),
        Claim(1, "m, l and O of a block", "3 Br d, 12 KB",
              f"{(Br * d + 2 * Br) * 4 / 1e3:.1f} KB",
              f"m and l are columns: Br (d + 2). 3 Br d = {3 * Br * d} numbers would be "
              f"{3 * Br * d * 4 / 1e3:.0f} KB"),
        Claim(1, "standard on a 910B3, N=2048", "0.1 ms",
              f"above {moved / chip.bandwidth * 1e3:.3f} ms",
              f"{moved / 1e6:.0f} MB at {chip.bandwidth / 1e12} TB/s, if the L2 cache holds none"),
        Claim(1, "the backward against the forward", "3 to 5 x as complex", "2.5 x the products",
              "a tile of S has five products there (S, dV, dP, dQ, dK), and two here"),
    ]


def formulas_computed(d=64):
    """Return the claims of both articles' formulas, put to numbers."""
    steps, P = trace(torch.ones(1, 1), torch.tensor([[2.0], [1.0], [3.0]]), torch.eye(3), 1, 1,
                     scale=1.0)
    large = torch.tensor(1000.0).exp()
    literal, numerator = softmax_j_errors()
    n, heads = 1024, 8
    return [
        Claim(1, "exp(100) overflows", "2.7e43", f"{math.exp(100):.1e}",
              f"in float32, above {math.log(torch.finfo(torch.float32).max):.1f}; float16 above "
              f"{math.log(torch.finfo(torch.float16).max):.1f}"),
        Claim(2, "a softmax without its maximum, x = 1000", "inf, then NaN",
              f"{large:.0f}, then {large / large:.0f}",
              "inf / inf; with the maximum off, exp(0) = 1"),
        Claim(2, "d of [2, 1, 3]", "1, 1.368, 1.503", ", ".join(f"{s.l:.4g}" for s in steps), ""),
        Claim(2, "softmax of [2, 1, 3]", "0.245, 0.090, 0.665",
              ", ".join(f"{p:.3f}" for p in P[0].tolist()), ""),
        Claim(2, "softmax_j in the update of O", "exact", f"error {literal:.2g} of 1",
              f"read as the numerator exp(S_j - m_j): error {numerator:.0e}"),
        Claim(2, "S_j = Q K_j^T", "the scores", f"error {unscaled_error(d):.2g} x largest O",
              f"1/sqrt(d) is missing; at d={d} the softmax is then nearly a maximum"),
        Claim(2, "d = 64 is all heads together", "25 MB",
              f"{6 * (2 * heads * n * n + n * d) * 2 / 1e6:.0f} MB with {heads} heads",
              "each head has an S and a P of its own; its formula counts those of one"),
    ]


def traffic(device="cpu", seed=0):
    """Return the second article's claims of what is moved, by io_model.py; nothing is timed."""
    N, d, tile = 256, 64, 32
    whole = N * d * 4
    rows = {row.name: row for row in counted(N, d, 65536, tile=(tile, tile))}
    passes = {name: {array: moved / whole for array, moved in row.arrays.items()}
              for name, row in rows.items()}
    flash, keys_outside = passes["FA2"], passes["FA1"]
    return [*(Claim(2, c.claim, c.says, c.here, c.why) for c in article_claims()),
            Claim(2, "Q, K, V read once, O written once", "once",
                  f"Q, O {flash['Q']:.0f}, {flash['O']:.0f}; K, V {flash['K']:.0f} times",
                  f"counted, N={N}, {tile}x{tile} tiles: every block of Q needs all of K and V"),
            Claim(2, "S and P are not written back", "0 bytes",
                  f"{flash.get('N x N', 0) + flash.get('tiles', 0):.0f} bytes",
                  f"counted; standard: {rows['standard'].arrays['N x N'] / 1e6:.2f} MB"),
            Claim(2, "the loop over K, V is the outer one", "outer",
                  "outer in FA1, inner in FA2",
                  "it also says: fix a block of Q. With K, V outside O moves "
                  f"{keys_outside['O']:.0f} times, with Q outside {flash['O']:.0f}")]


def generations(device="cpu", seed=0):
    """Return the claims of FlashAttention 1 to 3: counted, or by published rates.

    A share of the peak needs the chip itself. What stands here is a bound: products, and 16 times
    what is outside of them (on an A100, FlashAttention-2, section 3.1).
    """
    case, tile = Case(1024, d=128), (64, 64)
    Q, K, V = (x[0] for x in case.inputs("cpu", seed))
    rows = {name: count(name, Q, K, V, *tile) for name in ("standard", "FA1", "FA2")}
    most = {name: r.products / (r.products + 16 * r.outside) for name, r in rows.items()}
    exchanged = 4 * tile[0] * (case.d + 2) * 4  # bytes of m, l and O of each of four warps
    standard, flash = rows["standard"], rows["FA2"]
    busy = next(row for row in busy_cores(64) if row.batch == 1)
    H100, overlap = CHIPS["H100-SXM"].peak / 1e12, rates(hopper())
    at_most = "not measured: it takes the chip. A bound, by FLOPs outside the products at d=128"
    return [
        Claim(1, "arithmetic, flash against standard", "the same",
              f"{flash.products / standard.products:.2f} x and "
              f"{flash.outside / standard.outside:.2f} x",
              "the products, and what is outside of them: flash rescales O, but divides it once"),
        Claim(2, "FA1 on an A100", "25-40 %", f"under {most['FA1']:.0%}",
              f"{at_most}; one sequence of {busy.N} keeps {busy.fa1_busy:.0%} of the SMs busy"),
        Claim(2, "FA2 on an A100", "50-73 %", f"under {most['FA2']:.0%}",
              f"{at_most}; of the SMs {busy.fa2_busy:.0%}"),
        Claim(2, "warps meet in shared memory", "in FA1",
              f"{exchanged / 1e3:.0f} KB a tile, FA2 0",
              "FA1's 4 warps split K and exchange their m, l and O; FA2's split Q"),
        Claim(2, "FA2 against FA1", "2 x", f"{most['FA2'] / most['FA1']:.2f} x and "
              f"{busy.fa2_busy / busy.fa1_busy:.1f} x",
              f"by fewer such FLOPs; by busy SMs, batch 1, {busy.heads} heads"),
        Claim(2, "FA3 on an H100, float16", "75 %", f"{740 / H100:.0%}",
              f"its paper's 740 of {H100:.0f} TFLOP/s; FP8, 1200 of twice that: "
              f"{1200 / (2 * H100):.0%}, for the article's 60 %"),
        Claim(2, "FA3 against FA2", "1.5-2 x", f"{740 / (0.35 * H100):.1f} x",
              "its own 75 % over 35 %; by overlap alone, simulated: "
              f"{overlap.turns_tflops / overlap.serial_tflops:.2f} x"),
    ]


def other_route(device, seed=0):
    """Return the second article's claim of approximations: what they give up at equal FLOPs."""
    found = by_kind(errors(Case(APPROXIMATE_N), device, seed))
    worst = {name: max(error[name, SHARE] for error in found.values()) for name in METHODS}
    best = min(worst, key=worst.get)
    flash = max(error["flash", SHARE] for error in found.values())
    return [Claim(2, "approximations pay with quality", "each its own way",
                  f"error {worst[best]:.0%} or more",
                  f"at {SHARE:g} of the FLOPs, N={APPROXIMATE_N}, on the worst of {len(found)} "
                  f"inputs; {best} is the best of {len(worst)}"),
            Claim(2, "FlashAttention gives up no accuracy", "exact", f"error {flash:.0e}",
                  "on the same inputs, against float64")]


def softmax_j_errors(n=8, Bc=4, seed=0):
    """Apply the second article's update of O with softmax_j read both ways; return both errors.

    It says O_new = d_prev/d_new e^(m_prev - m_new) O_prev
                    + e^(m_j - m_new)/d_new softmax_j(S_j) V_j.
    The errors are in float64, as a share of the largest output.
    """
    generator = torch.Generator().manual_seed(seed)
    S = torch.randn(n, generator=generator, dtype=torch.float64)
    V = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    exact = torch.softmax(S, 0) @ V
    errors = []
    for normalise in (True, False):
        m, d, O = -math.inf, 0.0, torch.zeros(3, dtype=torch.float64)
        for S_j, V_j in zip(S.split(Bc), V.split(Bc)):
            m_j = S_j.max().item()
            P_j = torch.exp(S_j - m_j)
            m_new = max(m, m_j)
            d_new = math.exp(m - m_new) * d + math.exp(m_j - m_new) * P_j.sum().item()
            softmax_j = P_j / P_j.sum() if normalise else P_j
            O = (d / d_new * math.exp(m - m_new) * O
                 + math.exp(m_j - m_new) / d_new * (softmax_j @ V_j))
            m, d = m_new, d_new
        errors.append(((O - exact).abs().max() / exact.abs().max()).item())
    return errors


def unscaled_error(d, n=256, seed=0):
    """Return the error of attention without 1/sqrt(d), as a share of the largest output."""
    generator = torch.Generator().manual_seed(seed)
    Q, K, V = torch.randn(3, n, d, generator=generator, dtype=torch.float64)
    unscaled, exact = (torch.softmax(Q @ K.T * scale, dim=1) @ V for scale in (1, d**-0.5))
    return ((unscaled - exact).abs().max() / exact.abs().max()).item()


def _missing(claim, says, *rows):
    return Claim(1, claim, says, "-", ", ".join(f"{r.name}: {r.why}" for r in rows if r.why))


def _ms(row):
    return f"{row.seconds * 1e3:.3g} ms"


def main():
    options = lesson.parser(__doc__, "device", "seed", "json")
    args, device, _ = lesson.begin(options)
    claims = []
    for title, find in (("accuracy", differences), ("memory", peaks), ("growth", growth),
                        ("time", times), ("arithmetic", computed), ("traffic", traffic),
                        ("generations", generations), ("the other route", other_route)):
        part = find(device, args.seed)
        print_table(f"The articles' claims: {title}",
                    ["", "claim", "article says", "here", "why"],
                    [(c.article, c.claim, c.says, c.here, c.why) for c in part], left=5)
        claims += part
    return lesson.finish(args, device, [("articles", claim) for claim in claims])


if __name__ == "__main__":
    cli.serve(main)
