"""What the two articles say, beside what this machine measures or what their own numbers give.

    python articles.py
"""

import math
from dataclasses import dataclass

from flash_attention import (  # first: finds common
    benchmark_speed,
    cli,
    compare_and_verify,
    profile_memory,
    trace,
)
from cases import ARTICLE_CASES, Case, parser
from common.device import choose, describe
from common.report import console, mib, print_table, write_json

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


def measured(device, seed=0):
    """Return the claims that this machine can measure: accuracy, memory and time."""
    claims = []
    said = ("1.19e-07", "1.34e-07", "1.79e-07", "2.09e-07")
    rows = compare_and_verify(ARTICLE_CASES, device=device, seed=seed)
    for row, says in zip((row for row in rows if row.name == "flash"), said):
        claims.append(Claim(1, f"largest difference, {row.shape}", says, f"{row.max_diff:.2e}",
                            "other inputs and another order of sums"))
    standard, flash, *_ = profile_memory([Case(MEMORY_N)], device=device, seed=seed)
    total, without = standard.peak_bytes, standard.peak_bytes_without_result
    claims += [
        Claim(1, f"standard peak, N={MEMORY_N}", "130 MB", f"{mib(total)} MiB",
              f"S and P are {mib(without)} MiB, the result is the rest"),
        Claim(1, f"flash peak, N={MEMORY_N}", "1 MB", f"{mib(flash.peak_bytes)} MiB",
              f"all but {mib(flash.peak_bytes_without_result)} MiB is the result"),
        Claim(1, "saved", "95 %", f"{1 - flash.peak_bytes / total:.1%}",
              f"its own 130 and 1 MB give {1 - 1 / 130:.1%}"),
    ]
    standard, small, *_ = benchmark_speed([Case(SPEED_N)], 64, 64, device=device, seed=seed)
    large = benchmark_speed([Case(SPEED_N)], "auto", "auto", device=device, seed=seed)[1]
    claims += [
        Claim(1, f"standard, N={SPEED_N}", "0.1 ms", _ms(standard), "its device is a 910B3"),
        Claim(1, f"flash, N={SPEED_N}, 64x64 tiles", "341 ms", _ms(small),
              f"{small.launches} operator calls: each costs more than its tile's arithmetic"),
        Claim(1, "Python can't be faster", "0.0003 x standard",
              f"{large.ratio_to_standard:.2g} x standard",
              f"{large.Br}x{large.Bc} tiles: {large.launches} calls, and less memory to touch"),
    ]
    return claims


def computed():
    """Return the claims that arithmetic settles."""
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


def _ms(row):
    return f"{row.seconds * 1e3:.3g} ms"


def main():
    options = parser(__doc__.splitlines()[0], "device", "seed", "json")
    args = options.parse_args()
    device = choose(args.device)
    console.print(f"device: {describe(device)}")
    claims = measured(device, args.seed) + computed()
    print_table("The articles' claims", ["", "claim", "article says", "here", "why"],
                [(c.article, c.claim, c.says, c.here, c.why) for c in claims], left=5)
    if args.json:
        write_json(args.json, device, [("articles", claim) for claim in claims])


if __name__ == "__main__":
    cli.serve(main)
