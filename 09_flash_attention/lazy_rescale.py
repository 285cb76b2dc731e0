"""FlashAttention-4: rescale O only where it is worth it, and compute 2^x without an exponential.

    python lazy_rescale.py                how often the maximum rises, and what the two tricks cost
    python lazy_rescale.py --plot DIR     and draw how often it rises

The shares are of random scores drawn on the CPU, the same on every device.
"""

import functools
import math
import sys
from dataclasses import dataclass
from os.path import dirname, realpath
from pathlib import Path

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, logarithmic, plotted, print_table
from flash_attention import standard_attention
from lab.judge import largest
from lab.tiles import LOG2_E

import torch

TAU = 8.0  # the paper's threshold
LENGTHS, KEYS, WARP = (1024, 4096, 16384), 128, 32
DEVIATIONS = (1, 5)  # of the scores


def flash_attention_4(Q, K, V, Br=64, Bc=64, tau=TAU, exp2=torch.exp2, P_dtype=None):
    """Return softmax(Q K^T / sqrt(d)) V for Q [Nq, d], K [Nk, d], V [Nk, dv]: O [Nq, dv].

    O is rescaled only where the maximum has grown by more than tau. Scores are in powers of 2, so
    m may be up to tau below the true maximum, and an entry of P is at most 2^tau. l is summed with
    the same m, so O / l is right whatever m is.
    exp2: what computes P; the paper takes `polynomial_exp2` for a part of the entries.
    P_dtype: what P is rounded to before it meets V; None is V's own.
    Source: FlashAttention-4 (arXiv 2603.05451).
    """
    O, scale = [], LOG2_E * Q.shape[1] ** -0.5
    for Q_block in Q.split(Br):  # [Br, d]
        m = torch.full_like(Q_block[:, :1], -torch.inf)  # [Br, 1]
        l, O_block = torch.zeros_like(m), Q.new_zeros(len(m), V.shape[1])  # [Br, 1], [Br, dv]
        for K_block, V_block in zip(K.split(Bc), V.split(Bc)):
            S_block = Q_block @ K_block.T * scale  # [Br, Bc]
            highest = torch.maximum(m, S_block.amax(dim=1, keepdim=True))  # [Br, 1]
            m_new = torch.where(highest - m > tau, highest, m)  # [Br, 1]
            if (m_new > m).any():  # a GPU asks this for the 32 rows of a warp
                correction = torch.exp2(m - m_new)  # [Br, 1], 1 where m stays
                l, O_block = correction * l, correction * O_block
            P_block = exp2(S_block - m_new)  # [Br, Bc]
            l = l + P_block.sum(dim=1, keepdim=True)  # [Br, 1]
            P_block = P_block.to(P_dtype or V.dtype).to(V.dtype)
            m, O_block = m_new, torch.addmm(O_block, P_block, V_block)  # [Br, dv]
        O.append(O_block / l)
    return torch.cat(O)  # [Nq, dv]


def polynomial_exp2(x, degree=3):
    """Return 2^x by multiplications and additions alone, for x up to 127.

    x = n + f with n = floor(x): 2^n only changes the exponent's bits, and 2^f, from 1 to 2, is a
    polynomial in f (Cody and Waite's range reduction). Below -126 x counts as -126.
    """
    x = x.clamp(min=-126)
    n = x.floor()
    f = x - n  # from 0 to 1
    *lower, p = exp2_coefficients(degree)
    for c in reversed(lower):  # Horner: ((c3 f + c2) f + c1) f + 1
        p = p * f + c
    return torch.ldexp(p, n)


@functools.cache
def exp2_coefficients(degree=3, points=32):
    """Return [1, c_1, ...] of the polynomial for 2^f: least squares of the relative error.

    At Chebyshev's points that comes close to the smallest largest error. The constant is 1, so
    that 2^0, the weight of a row's maximum, stays exact.
    """
    f = 0.5 - 0.5 * torch.cos((torch.arange(points).double()[:, None] + 0.5) * math.pi / points)
    powers = f ** torch.arange(1, degree + 1)  # [points, degree]
    return [1.0, *torch.linalg.lstsq(powers / 2**f, 1 - 2**-f).solution.flatten().tolist()]


@dataclass
class RiseRow:
    """Shares of the row updates after the first tile. share: the maximum rises; expected: 1/(t+1)
    on average; warp_*: of 32 rows any rises; tau_share, warp_tau_share: it grows by more than tau,
    by deviation.
    """

    N: int
    rows: int
    share: float
    expected: float
    warp_share: float
    warp_expected: float
    tau_share: dict
    warp_tau_share: dict


def count_rises(N, tau=TAU, seed=0):
    """Walk rows of N random scores in tiles of 128 and count how often m has to grow: a RiseRow.

    Of t+1 tiles each is as likely as any other to hold the largest score, so in tile t (the first
    is 0) the maximum rises with probability 1/(t+1), whatever the scores' deviation. That it grows
    by more than tau does depend on it.
    Raises ValueError where N has fewer than two tiles.
    """
    if N < 2 * KEYS:
        raise ValueError(f"N must be at least {2 * KEYS}, two tiles of {KEYS} keys, got {N}")
    generator = torch.Generator().manual_seed(seed)
    p = [1 / (t + 1) for t in range(1, N // KEYS)]
    rows, tiles = rows_needed(p), len(p)
    to_bits = torch.tensor(DEVIATIONS) * LOG2_E  # a score of deviation 1 -> powers of 2
    m = torch.randn(rows, KEYS, generator=generator).amax(dim=1)  # [rows]
    m_tau = m[:, None] * to_bits  # [rows, deviations]
    rose, warps_rose, grew, warps_grew = 0, 0, *torch.zeros(2, len(DEVIATIONS))
    for _ in range(tiles):
        highest = torch.randn(rows, KEYS, generator=generator).amax(dim=1)
        rises = highest > m
        rose += rises.sum().item()
        warps_rose += rises.view(-1, WARP).any(dim=1).sum().item()
        m = torch.maximum(m, highest)
        grows = highest[:, None] * to_bits - m_tau > tau
        grew += grows.sum(dim=0)
        warps_grew += grows.view(-1, WARP, len(DEVIATIONS)).any(dim=1).sum(dim=0)
        m_tau = torch.where(grows, highest[:, None] * to_bits, m_tau)
    updates = rows * tiles
    return RiseRow(N, rows, rose / updates, sum(p) / tiles, warps_rose * WARP / updates,
                   sum(1 - (1 - x) ** WARP for x in p) / tiles,
                   {str(d): x / updates for d, x in zip(DEVIATIONS, grew.tolist())},
                   {str(d): x * WARP / updates for d, x in zip(DEVIATIONS, warps_grew.tolist())})


def rows_needed(p, within=0.02, deviations=4):
    """Return how many rows keep the share within 2 % of the mean of p at 4 standard deviations.

    Rows are independent, and so are the rises of a row (Renyi, on records): a row's number of rises
    has the mean sum(p) and the variance sum(p (1 - p)). Whole warps.
    """
    variance = sum(x * (1 - x) for x in p)
    return WARP * math.ceil((deviations / within) ** 2 * variance / sum(p) ** 2 / WARP)


@dataclass
class ErrorRow:
    """Largest |O - float64|, in float32 and with P rounded to bfloat16 before it meets V."""

    name: str
    error: float
    error_bfloat16: float


def errors(case, device, seed=0):
    """Measure what tau and the polynomial cost on one head: ErrorRows."""
    Q, K, V = (x[0] for x in case.inputs(device, seed))
    exact = standard_attention(*(x.cpu().double() for x in (Q, K, V)))

    def error(**options):
        return largest(flash_attention_4(Q, K, V, 128, KEYS, **options).cpu() - exact)

    tricks = {"exp2, each rise": {"tau": 0}, f"exp2, tau = {TAU:g}": {},
              "polynomial, each rise": {"tau": 0, "exp2": polynomial_exp2},
              f"polynomial, tau = {TAU:g}": {"exp2": polynomial_exp2}}
    return [ErrorRow(name, error(**options), error(P_dtype=torch.bfloat16, **options))
            for name, options in tricks.items()]


def show_rises(rows):
    print_table(
        f"The share of row updates that find a larger maximum, {KEYS} keys a tile",
        ["N", "rows", "it rises", "mean of 1/(t+1)", f"in any of {WARP} rows", "by formula",
         *(f"by more than {TAU:g}{where}, deviation {d}" for where in ("", f" in any of {WARP}")
           for d in DEVIATIONS)],
        [(r.N, r.rows, *(f"{x:.2%}" for x in (r.share, r.expected, r.warp_share, r.warp_expected,
                                              *r.tau_share.values(),
                                              *r.warp_tau_share.values()))) for r in rows])
    console.print(
        f"\nm in powers of 2. A warp of {WARP} rows rescales together. With {TAU:g} an entry of P "
        f"is at most 2^{TAU:g} = {2**TAU:.0f}.")


def show_errors(case, rows):
    print_table(f"Largest difference of O from float64, {case.shape}, random inputs",
                ["", "float32", "P in bfloat16"],
                [(r.name, f"{r.error:.1e}", f"{r.error_bfloat16:.1e}") for r in rows])
    x = torch.linspace(-20, 0, 100_001, dtype=torch.float64)
    relative = largest(polynomial_exp2(x) / torch.exp2(x) - 1)
    console.print(f"\nrelative error of the polynomial: {relative:.1e}; of one rounding to "
                  f"bfloat16: {torch.finfo(torch.bfloat16).eps / 2:.1e}")


def plot(path, rows):
    """Draw the measured shares as points, the formulas as lines."""
    N = [r.N for r in rows]
    with plotted(path, figsize=(7, 4)) as axes:
        for marker, label, measured, formula in (
                ("o", "a row", "share", "expected"),
                ("s", f"any of {WARP} rows", "warp_share", "warp_expected")):
            axes.plot(N, [getattr(r, formula) for r in rows], color="grey")
            axes.plot(N, [getattr(r, measured) for r in rows], marker, label=label)
        logarithmic(axes, N)
        axes.set(xlabel=f"sequence length N, {KEYS} keys a tile", ylabel="share of updates",
                 title="How often the maximum rises: counted, and lines by 1/(t+1)")
        axes.legend()


def main():
    options = lesson.parser(__doc__, *"device head-dim seed json plot".split())
    args, device, [case] = lesson.begin(options, lengths=LENGTHS[:1])
    rises = [count_rises(N, seed=args.seed) for N in LENGTHS]
    show_rises(rises)
    found = errors(case, device, args.seed)
    show_errors(case, found)
    if args.plot:
        plot(Path(args.plot) / "rising_maxima.png", rises)
    return lesson.finish(args, device, [*(("rises", row) for row in rises),
                                        *(("errors", row) for row in found)])


if __name__ == "__main__":
    cli.serve(main)
