"""FP8: what FlashAttention-3 does to halve its error, and how P overflows in FlashAttention-4.

    python fp8.py           a quick run: one seed, four heads
    python fp8.py --full    FlashAttention-3's Table 3: three seeds, eight heads, pass or FAIL

Only the rounding is emulated, on the CPU: numbers are rounded to the format and computed with in
float32. So the errors are those of the format, and nothing is faster for it. Sources:
FlashAttention-3 (arXiv 2407.08608), section 3.3 and Table 3; FlashAttention-4 (2603.05451).
"""

import itertools
import sys
from dataclasses import dataclass
from functools import partial
from os.path import dirname, realpath
from typing import Callable, Optional

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, print_table, track
from lab.tiles import LOG2_E

import torch

N, D, ROWS, BLOCK = 8192, 128, 512, 128  # ROWS: queries sampled of the N; BLOCK: rows a scale
LARGEST = 448.0  # of e4m3


def e4m3(x):
    """Return x rounded to float8_e4m3fn (4 bits of exponent, 3 of mantissa), as float32.

    The format has no infinity. Beyond 448 CUDA's conversion saturates (__NV_SATFINITE), while
    torch's own cast gives NaN in older releases: so x is clamped first. NaN stays NaN.
    """
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()


def half(x):
    """Return x rounded to float16, as float32."""
    return x.half().float()


def quantised(x, rows=None):
    """Return x [N, d] rounded to e4m3 under a scale: one for each block of `rows` rows; None: one.

    The scale takes the block's largest entry to 448.
    """
    blocks = x.split(rows or len(x))
    tiny = torch.finfo(x.dtype).tiny  # a block of zeros has a scale too
    scales = [(block.abs().amax() / LARGEST).clamp(min=tiny) for block in blocks]
    return torch.cat([e4m3(block / scale) * scale for block, scale in zip(blocks, scales)])


def hadamard(x, signs):
    """Return x [N, d] times random signs [d], then times the Walsh-Hadamard matrix / sqrt(d).

    Every entry becomes a sum over its row, so an outlier is spread. The map is orthogonal: done to
    both Q and K, it leaves Q K^T as it is. Raises ValueError where d is no power of 2.
    """
    if len(signs) < 1 or len(signs) & (len(signs) - 1):
        raise ValueError(f"d must be a power of 2, got {len(signs)}")
    H = torch.ones(1, 1, dtype=x.dtype)
    while len(H) < len(signs):
        H = torch.cat([torch.cat([H, H], dim=1), torch.cat([H, -H], dim=1)])
    return x * signs @ H / len(signs) ** 0.5


def standard(Q, K, V, rounded):
    """Return softmax(Q K^T / sqrt(d)) V, each result between the operators in float16."""
    S = half(half(Q @ K.T) * Q.shape[1] ** -0.5)  # [Nq, Nk]
    return half(rounded(half(torch.softmax(S, dim=1))) @ V)  # [Nq, d]


def flash(Q, K, V, rounded, tau=0.0, offset=0.0):
    """Return the same from a loop over blocks of keys: m, l, O and the scores stay in float32.

    Only P is rounded, before it meets V. tau, offset: FlashAttention-4's FP8 kernel keeps the
    maximum until it has grown by more than tau, and multiplies P by 2^offset; so an entry of P is
    at most 2^(tau + offset). l sums P as it was before it is rounded.
    """
    m = torch.full_like(Q[:, :1], -torch.inf)  # [Nq, 1], in powers of 2
    l = O = 0
    for K_block, V_block in zip(K.split(BLOCK), V.split(BLOCK)):  # [Bc, d]
        S_block = Q @ K_block.T * (LOG2_E * Q.shape[1] ** -0.5)  # [Nq, Bc]
        highest = torch.maximum(m, S_block.amax(dim=1, keepdim=True))  # [Nq, 1]
        m_new = torch.where(highest - m > tau, highest, m)  # [Nq, 1]
        correction = torch.exp2(m - m_new)  # [Nq, 1]
        P_block = torch.exp2(S_block - m_new + offset)  # [Nq, Bc]
        l = correction * l + P_block.sum(dim=1, keepdim=True)  # [Nq, 1]
        O = correction * O + rounded(P_block) @ V_block  # [Nq, d]
        m = m_new
    return half(O / l)


@dataclass
class Method:
    """A row of Table 3. inputs: rounds Q, K, V. paper: its RMSE; within: how near ours must be."""

    name: str
    transform: bool
    inputs: Callable
    attention: Callable
    paper: float
    within: float = 0.15


BY_BLOCK, FP8_FLASH = partial(quantised, rows=BLOCK), partial(flash, rounded=e4m3)
METHODS = [
    Method("fp16 standard", False, half, partial(standard, rounded=half), 3.2e-4),
    Method("fp16 flash", False, half, partial(flash, rounded=half), 1.9e-4),
    # P that is divided by l is small: without the 448 most of it lies below what e4m3 can hold
    Method("fp8 standard", False, quantised,
           partial(standard, rounded=lambda P: e4m3(P * LARGEST) / LARGEST), 2.4e-2),
    Method("fp8 FA3", True, BY_BLOCK, FP8_FLASH, 9.1e-3),
    Method("FA3 without block scales", True, quantised, FP8_FLASH, 9.3e-3),
    Method("FA3 without the transform", False, BY_BLOCK, FP8_FLASH, 2.4e-2, within=0.25),
]


@dataclass
class ErrorRow:
    """Root mean squares over all heads: rmse of O; scores: the error that the rounding of Q and K
    gives a score, weighted by P; inputs: the error of Q, K and V, as a share of themselves.
    by_head: rmse of each head.
    """

    name: str
    rmse: float
    paper: float
    scores: float
    inputs: float
    by_head: list


def with_outliers(generator, n):
    """Return [n, D]: N(0, 1), and to one entry of 1000 another 10 N(0, 1) is added."""
    x, outliers = (torch.randn(n, D, generator=generator) for _ in range(2))
    return x + 10 * outliers * (torch.rand(n, D, generator=generator) < 0.001)


def head_errors(seed, n=N, rows=ROWS):
    """Return the mean squares of one head, [methods, 3]: rmse, scores, inputs of ErrorRow."""
    generator = torch.Generator().manual_seed(seed)
    Q, K, V = (with_outliers(generator, n) for _ in range(3))
    sample = torch.randperm(n, generator=generator)[:rows]
    signs = torch.randint(2, (D,), generator=generator) * 2.0 - 1
    S = Q[sample].double() @ K.double().T * D**-0.5  # [rows, n]
    P = torch.softmax(S, dim=1)
    O, S, P, found = P @ V.double(), S.float(), P.float(), []
    for method in METHODS:
        wide = [hadamard(Q, signs), hadamard(K, signs), V] if method.transform else [Q, K, V]
        q, k, v = narrow = [method.inputs(x) for x in wide]
        error = method.attention(q[sample], k, v).double() - O
        error_S = q[sample] @ k.T * D**-0.5 - S
        shares = [(a - b).square().mean() / b.square().mean() for a, b in zip(narrow, wide)]
        found.append([error.square().mean(), (P * error_S.square()).sum(dim=1).mean(),
                      sum(shares) / 3])
    return torch.tensor(found)


def table_3(seeds, heads, n=N, rows=ROWS):
    """Return an ErrorRow for each of METHODS, over so many heads of each seed."""
    found = [head_errors(1000 * seed + head, n, rows)
             for seed, head in track("heads", list(itertools.product(seeds, range(heads))))]
    squares = torch.stack(found)  # [heads, methods, 3]
    return [ErrorRow(method.name, rmse, method.paper, scores, inputs, by_head)
            for method, (rmse, scores, inputs), by_head in zip(
                METHODS, squares.mean(dim=0).sqrt().tolist(), squares[..., 0].sqrt().T.tolist())]


@dataclass
class Condition:
    """What --full asks of Table 3. found, asked: in words."""

    condition: str
    found: str
    asked: str
    passed: bool


def conditions(rows):
    """Return what must hold of the rows of `table_3`."""
    near = [Condition(f"{r.name}, RMSE / paper", f"{r.rmse / r.paper:.3f}",
                      f"1 +- {method.within:g}", abs(r.rmse / r.paper - 1) <= method.within)
            for r, method in zip(rows, METHODS)]
    share = rows[3].rmse / rows[2].rmse
    return near + [Condition("fp8 FA3 / fp8 standard", f"{share:.3f}", "at most 0.5", share <= 0.5)]


@dataclass
class OverflowRow:
    """P * 2^offset under the threshold tau. beyond: the share of P's entries above 448; error:
    |O - float64| / |O|, and what others measured.
    """

    offset: float
    tau: float
    deviation: float
    beyond: float
    error: float
    theirs: Optional[float]


# {(offset, tau): {deviation of the scores: error}}. Theirs: a B300 against its own bfloat16,
# github.com/Dao-AILab/flash-attention/pull/2694.
OFFSETS = {(8, 4): {1: 0.136, 1.5: 0.305}, (4, 4): {1: 0.027, 1.5: 0.024},
           (8, 0): {1: None, 1.5: None}}


def overflow(seed=0, n=N, rows=ROWS):
    """Let P saturate: OverflowRows. Q, K and V hold numbers of e4m3, so P alone is rounded."""
    found = []
    for (offset, tau), errors in OFFSETS.items():
        for deviation, theirs in errors.items():
            generator = torch.Generator().manual_seed(seed)
            Q, K, V = (e4m3(torch.randn(size, D, generator=generator) * scale)
                       for size, scale in ((rows, deviation), (n, 1), (n, 1)))
            O = torch.softmax(Q.double() @ K.double().T * D**-0.5, dim=1) @ V.double()
            seen = []
            error = flash(Q, K, V, lambda P, seen=seen: seen.append(P) or e4m3(P), tau, offset) - O
            found.append(OverflowRow(
                offset, tau, deviation, (torch.cat(seen, dim=1) > LARGEST).float().mean().item(),
                (error.norm() / O.norm()).item(), theirs))
    return found


def show_table_3(rows, seeds, heads):
    print_table(
        f"FlashAttention-3, Table 3: N = {N}, d = {D}, {ROWS} queries a head, "
        f"{heads} heads of each seed: {', '.join(map(str, seeds))}",
        ["", "transform", "scales", "RMSE of O", "paper (theirs)", "RMSE / paper",
         "error of a score", "of Q, K, V"],
        [(r.name, "yes" if method.transform else "-",
          {half: "-", quantised: "one"}.get(method.inputs, f"{BLOCK} rows"), f"{r.rmse:.2e}",
          f"{r.paper:.1e}", f"{r.rmse / r.paper:.2f}", f"{r.scores:.2g}", f"{r.inputs:.2%}")
         for r, method in zip(rows, METHODS)], left=3)
    full, one, plain = rows[3:]
    console.print(
        f"\nIn FA3 the block scales multiply the error by {factor(full, one)}, the transform by "
        f"{factor(full, plain)}.\ne4m3 is a floating format: it rounds an entry relative to its "
        "own size. A scale moves the exponents and helps only where entries would underflow: the "
        f"error of Q, K and V is {one.inputs:.2%} with one scale each, {full.inputs:.2%} with one "
        "a block.\nThe transform leaves Q K^T as it is and mixes its products. Where one outlier "
        "times another is most of a score, its rounding is the score's; "
        f"{D} products of like size have roundings that cancel in part. The error of a score, "
        f"weighted by P, is {plain.scores:.2g} without the transform, {full.scores:.2g} with it.")


def factor(row, other):
    each = [a / b for a, b in zip(row.by_head, other.by_head)]
    return f"{row.rmse / other.rmse:.2f} (a head: {min(each):.2f} to {max(each):.2f})"


def show_overflow(rows):
    print_table(
        f"P * 2^offset in e4m3 under a tau: relative error of O, N = {N}, d = {D}",
        ["offset", "tau", "P at most", "deviation of scores", "P beyond 448", "error", "theirs"],
        [(r.offset, r.tau, f"{2 ** (r.offset + r.tau):g}", r.deviation, f"{r.beyond:.3%}",
          f"{r.error:.3f}", r.theirs or "-") for r in rows], left=0)
    over, fit = ([f"{r.error:.3f}" for r in rows if bool(r.beyond) == beyond]
                 for beyond in (True, False))
    console.print(
        f"\nWith entries of P beyond {LARGEST:g} the error is {', '.join(over) or '-'}; without "
        f"{', '.join(fit) or '-'}. These entries are the largest of their rows. They saturate on "
        "their way to V, while l has summed them in full.")


def main():
    options = lesson.parser(__doc__, "seed", "json")
    options.add_argument("--full", action="store_true", help="three seeds and eight heads")
    options.set_defaults(device="cpu")
    args, device, _ = lesson.begin(options)
    count, heads = (3, 8) if args.full else (1, 4)
    seeds = range(args.seed, args.seed + count)
    rows = table_3(seeds, heads)
    show_table_3(rows, seeds, heads)
    asked = conditions(rows) if args.full else []
    if asked:
        print_table("What must hold of Table 3", ["", "here", "asked", "result"],
                    [(c.condition, c.found, c.asked, "pass" if c.passed else "FAIL")
                     for c in asked])
    else:
        console.print("\nA quick run of four heads: --full takes 24 and says pass or FAIL.")
    saturated = overflow(args.seed)
    show_overflow(saturated)
    return lesson.finish(args, device, [*(("table_3", row) for row in rows),
                                        *(("conditions", row) for row in asked),
                                        *(("overflow", row) for row in saturated)])


if __name__ == "__main__":
    cli.serve(main)
