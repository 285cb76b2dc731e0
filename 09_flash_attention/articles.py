"""What the two articles say, beside what this machine measures or what their own numbers give.

    python articles.py
"""

import math
import sys
from dataclasses import dataclass
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import mib, print_table
from flash_attention import benchmark_speed, compare_and_verify, profile_memory, trace
from lab.cases import ARTICLE_CASES, Case

import torch

MEMORY_N, SPEED_N = 4096, 2048  # the lengths that the first article measures at


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
    return [Claim(1, f"largest difference, {row.shape}", says, f"{row.max_diff:.2e}",
                  "other inputs and another order of sums: both are roundings" if row.passed
                  else f"it fails: {row.why or 'more than twice the error of standard attention'}")
            for row, says in zip((row for row in rows if row.name == "flash"), said)]


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


def times(device, seed=0):
    """Return the claims of time. Each reason follows from what was measured."""
    standard, small, *_ = benchmark_speed([Case(SPEED_N)], 64, 64, device=device, seed=seed)
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
        Claim(1, "Python can't be faster", "0.0003 x standard",
              f"{large.ratio_to_standard:.2g} x standard", reason),
    ]


def computed(device="cpu", seed=0):
    """Return the claims that arithmetic settles, anywhere."""
    n, d, trips = 65536, 64, 6
    moved = trips * (2 * n * n + n * d) * 2  # bytes, float16
    counted = (4 * n * n + 4 * n * d) * 2  # read Q K, write S; read S, write P; read P V, write O
    flop = 4 * n * n * d
    short = trips * (2 * 1024**2 + 1024 * d) * 2
    steps, P = trace(torch.ones(1, 1), torch.tensor([[2.0], [1.0], [3.0]]), torch.eye(3), 1, 1,
                     scale=1.0)
    literal, numerator = softmax_j_errors()
    return [
        Claim(1, "the saving tends to N^2/(Br Bc)", "4096 at N=4096",
              f"{2 * 4096 / d + 1:.0f} at N=4096, d=64",
              "flash still holds its result: (2N^2 + Nd) / Nd = 2N/d + 1 is the limit"),
        Claim(1, "S and P of GPT-3 at N=2048", "16 GB", f"{2 * 96 * 2048**2 * 4 / 1e9:.1f} GB",
              "one layer, 96 heads, float32, batch 1"),
        Claim(2, "traffic, n=1024", "25 MB", f"{short / 1e6:.1f} MB", "its formula"),
        Claim(2, "traffic, n=64K", "96 GB", f"{moved / 1e9:.0f} GB = {moved / 2**30:.0f} GiB",
              "its six trips of 2n^2 + nd; counted read by read, 4n^2 + 4nd: "
              f"{counted / 1e9:.0f} GB"),
        Claim(2, "time to move it at 2 TB/s", "40 ms", f"{moved / 2e12 * 1e3:.1f} ms",
              f"{counted / 2e12 * 1e3:.0f} ms for the traffic counted read by read"),
        Claim(2, "arithmetic at 312 TFLOP/s", "under 1 ms", f"{flop / 312e12 * 1e3:.1f} ms",
              f"4 n^2 d = {flop / 1e12:.2f} TFLOP; moving still takes longer"),
        Claim(2, "d of [2, 1, 3]", "1, 1.368, 1.503", ", ".join(f"{s.l:.4g}" for s in steps), ""),
        Claim(2, "softmax of [2, 1, 3]", "0.245, 0.090, 0.665",
              ", ".join(f"{p:.3f}" for p in P[0].tolist()), ""),
        Claim(2, "softmax_j in the update of O", "exact", f"error {literal:.2g} of 1",
              f"read as the numerator exp(S_j - m_j): error {numerator:.0e}"),
    ]


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


def _missing(claim, says, *rows):
    return Claim(1, claim, says, "-", ", ".join(f"{r.name}: {r.why}" for r in rows if r.why))


def _ms(row):
    return f"{row.seconds * 1e3:.3g} ms"


def main():
    options = lesson.parser(__doc__, "device", "seed", "json")
    args, device, _ = lesson.begin(options)
    claims = []
    for title, find in (("accuracy", differences), ("memory", peaks), ("time", times),
                        ("arithmetic", computed)):
        part = find(device, args.seed)
        print_table(f"The articles' claims: {title}",
                    ["", "claim", "article says", "here", "why"],
                    [(c.article, c.claim, c.says, c.here, c.why) for c in part], left=5)
        claims += part
    return lesson.finish(args, device, [("articles", claim) for claim in claims])


if __name__ == "__main__":
    cli.serve(main)
