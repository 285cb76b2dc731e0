"""The generations of FlashAttention: loops of a few lines, one result, and what each one saves.

    python generations.py     check the loops, count what they do, who can work side by side

Each loop takes [N, d] tensors. They differ in what stands outside, in what is divided or rescaled
when, and in the order of the steps. FlashAttention-4's stands in lazy_rescale.py. What a loop does
is counted while it runs; shares of a chip's peak are the papers' own.
"""

import math
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import console, print_table
from flash_attention import standard_attention
from lazy_rescale import flash_attention_4, polynomial_exp2
from lab.bench import Candidate, VerifyRow, verify
from lab.machines import CHIPS
from lab.show import print_verify
from lab.traffic import total, traffic

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def plain_standard_attention(Q, K, V):
    """Return softmax(Q K^T / sqrt(d)) V for Q [Nq, d], K [Nk, d], V [Nk, dv], step by step."""
    S = Q @ K.T * Q.shape[1] ** -0.5  # [Nq, Nk]
    P = torch.exp(S - S.amax(dim=1, keepdim=True))  # [Nq, Nk]
    return P / P.sum(dim=1, keepdim=True) @ V  # [Nq, dv]


def flash_attention_1(Q, K, V, Br=64, Bc=64):
    """The same, K and V outside and Q inside: for each block of keys, all queries.

    O, l and m lie in memory and are read and written for each block of keys. O is divided by l in
    every step, so what lies there is always the attention to the keys so far.
    Source: FlashAttention (arXiv 2205.14135), Algorithm 1.
    """
    O, l = Q.new_zeros(len(Q), V.shape[1]), torch.zeros_like(Q[:, :1])  # [Nq, dv], [Nq, 1]
    m, scale = torch.full_like(l, -torch.inf), Q.shape[1] ** -0.5  # [Nq, 1]
    for K_block, V_block in zip(K.split(Bc), V.split(Bc)):
        for Q_i, O_i, l_i, m_i in zip(*(x.split(Br) for x in (Q, O, l, m))):  # views into memory
            S_block = Q_i @ K_block.T * scale  # [Br, Bc]
            m_block = S_block.amax(dim=1, keepdim=True)  # [Br, 1], of this block alone
            P_block = torch.exp(S_block - m_block)  # [Br, Bc]
            l_block = P_block.sum(dim=1, keepdim=True)  # [Br, 1]
            m_new = torch.maximum(m_i, m_block)  # [Br, 1]
            old, new = torch.exp(m_i - m_new) * l_i, torch.exp(m_block - m_new)  # [Br, 1]
            l_new = old + new * l_block  # [Br, 1]
            O_i.copy_((old * O_i + new * (P_block @ V_block)) / l_new)  # [Br, dv]
            l_i.copy_(l_new)
            m_i.copy_(m_new)
    return O


def start(Q_block, V):
    """Return m, l and O_block before the first key: [Br, 1], [Br, 1], [Br, dv]."""
    m = torch.full_like(Q_block[:, :1], -torch.inf)
    return m, torch.zeros_like(m), Q_block.new_zeros(len(Q_block), V.shape[1])


def online_softmax(m, l, S_block):
    """Take a block of scores into m and l; return them, P_block [Br, Bc] and O's correction."""
    m_new = torch.maximum(m, S_block.amax(dim=1, keepdim=True))  # [Br, 1]
    correction = torch.exp(m - m_new)  # [Br, 1]
    P_block = torch.exp(S_block - m_new)  # [Br, Bc]
    return m_new, correction * l + P_block.sum(dim=1, keepdim=True), P_block, correction


def flash_attention_2(Q, K, V, Br=64, Bc=64):
    """The same, Q outside and K and V inside: m, l and O never leave the chip.

    O is divided once, at the end. Until then both parts of the sum have the same maximum, so only
    what was summed before is rescaled, and the product P V adds into it by itself.
    Source: FlashAttention-2 (arXiv 2307.08691), Algorithm 1.
    """
    O, scale = [], Q.shape[1] ** -0.5
    for Q_block in Q.split(Br):  # [Br, d]
        m, l, O_block = start(Q_block, V)
        for K_block, V_block in zip(K.split(Bc), V.split(Bc)):
            S_block = Q_block @ K_block.T * scale  # [Br, Bc]
            m, l, P_block, correction = online_softmax(m, l, S_block)
            O_block = torch.addmm(correction * O_block, P_block, V_block)  # [Br, dv]
        O.append(O_block / l)
    return torch.cat(O)  # [Nq, dv]


def flash_attention_3(Q, K, V, Br=64, Bc=64):
    """The same as FlashAttention-2, in an order that keeps two units busy.

    Both products of a step are issued before its softmax: they run on the tensor cores while the
    softmax runs elsewhere. On one unit, as here, the order changes no bit of the result.
    Source: FlashAttention-3 (arXiv 2407.08608), Algorithm 2.
    """
    O, scale = [], Q.shape[1] ** -0.5
    K_blocks, V_blocks = K.split(Bc), V.split(Bc)
    for Q_block in Q.split(Br):  # [Br, d]
        m, l, O_block = start(Q_block, V)
        S_next = Q_block @ K_blocks[0].T * scale  # [Br, Bc]
        m, l, P_block, _ = online_softmax(m, l, S_next)
        for K_next, V_block in zip(K_blocks[1:], V_blocks):
            S_next = Q_block @ K_next.T * scale  # issued, not waited for
            O_block = torch.addmm(O_block, P_block, V_block)  # issued: P_block of the step before
            m, l, P_block, correction = online_softmax(m, l, S_next)  # beside that product
            O_block = correction * O_block  # waits for it
        O.append(torch.addmm(O_block, P_block, V_blocks[-1]) / l)
    return torch.cat(O)  # [Nq, dv]


GENERATIONS = {"FA1": flash_attention_1, "FA2": flash_attention_2, "FA3": flash_attention_3,
               "FA4": flash_attention_4,
               "FA4, polynomial": partial(flash_attention_4, exp2=polynomial_exp2)}
REPORTED = {"FA1": "25-40 % of an A100", "FA2": "50-73 % of an A100, 35 % of an H100",
            "FA3": "75 % of an H100"}  # the papers' own figures


def each_head(attend, Q, K, V):
    """Call `attend` on each [N, d] of [B, N, d], in float32 or wider; return O in Q's dtype."""
    wide = torch.promote_types(Q.dtype, torch.float32)
    return torch.stack([attend(*x) for x in zip(*(x.to(wide) for x in (Q, K, V)))]).to(Q.dtype)


def verify_generations(case, Br, Bc, device, seed):
    """Compare each with standard attention and float64, then again in bfloat16: VerifyRows.

    The polynomial's error is far above float32's, so it is compared in bfloat16 alone.
    """
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        loops = dict(GENERATIONS)
        polynomial = loops.pop("FA4, polynomial")
        if dtype == torch.bfloat16:
            loops["FA4, polynomial"] = partial(polynomial, P_dtype=dtype)
        rows += verify(replace(case, dtype=dtype), [Candidate("standard", standard_attention), *(
            Candidate(name, partial(each_head, partial(loop, Br=Br, Bc=Bc)))
            for name, loop in loops.items())], device=device, seed=seed)
    return rows


class Flops(TorchDispatchMode):
    """While it is entered, counts FLOPs by operator: {"products": ..., "exp": ..., "div": ...}.

    A product of [a, b] and [b, c] has 2 a b c; a maximum or sum over rows one for each element that
    it reads; any other operator one for each that it makes. Moving and choosing are no FLOPs.
    """

    READ = {"amax", "sum"}
    MADE = {"add", "sub", "mul", "div", "exp", "exp2", "maximum", "clamp", "floor",
            "ldexp"}  # which older torch shows as pow and mul

    def __init__(self):
        super().__init__()
        self.by = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out, name = operator(*args, **(kwargs or {})), operator.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.by["products"] += 2 * args[-2].numel() * args[-1].shape[1]
        elif name in self.READ | self.MADE:
            self.by[name] += (args[0] if name in self.READ else out).numel()
        return out

    @property
    def outside(self):
        """FLOPs outside the products."""
        return sum(self.by.values()) - self.by["products"]


@dataclass
class CountRow:
    """FLOPs of one head. exp, divisions, on_O: of those outside the products, the exponentials, the
    divisions and what V's columns cost. bytes_moved: float16, to and from memory (lab/traffic.py).
    """

    name: str
    N: int
    d: int
    Br: int
    Bc: int
    products: int
    outside: int
    exp: int
    divisions: int
    on_O: int
    bytes_moved: int


def count(name, Q, K, V, Br, Bc):
    """Run one head, [N, d] tensors, and count: a CountRow. name: of GENERATIONS, or 'standard'."""
    attend = plain_standard_attention
    if name != "standard":
        attend = partial(GENERATIONS[name], Br=Br, Bc=Bc)
    with Flops() as flops:
        attend(Q, K, V)
    with Flops() as without_O:
        attend(Q, K, V[:, :0])
    order = name if name in ("standard", "FA1") else "FA2"  # FA3 and FA4 keep FA2's loops
    return CountRow(name, *Q.shape, Br, Bc, flops.by["products"], flops.outside,
                    flops.by["exp"] + flops.by["exp2"], flops.by["div"],
                    flops.outside - without_O.outside,
                    2 * total(traffic(order, *Q.shape, Br, Bc)))


@dataclass
class BusyRow:
    """Blocks that can run side by side, and the share of the cores that they keep busy."""

    chip: str
    batch: int
    heads: int
    N: int
    fa1_blocks: int
    fa1_busy: float
    fa2_blocks: int
    fa2_busy: float


def busy_cores(Br, heads=16, tokens=16384):
    """Share `tokens` tokens out to long and short sequences; one block a core: BusyRows.

    FA1 makes a block of a head, FA2 also of each Br queries: its outer loop has no order to keep.
    """
    def busy(blocks, cores):
        return blocks, blocks / (cores * math.ceil(blocks / cores))

    return [BusyRow(chip, tokens // N, heads, N, *busy(tokens // N * heads, CHIPS[chip].cores),
                    *busy(tokens // N * heads * math.ceil(N / Br), CHIPS[chip].cores))
            for chip in ("A100-80GB", "910B3") for N in (1024, 4096, 16384)]


def split_k(Q_block, K_block, V_block, warps, shared):
    """Attention to one block, a part of the keys for each warp (FA1's way): O [Br, dv].

    Each warp sees a part of every row, so maxima, sums and outputs meet in shared memory: what a
    warp writes there is appended to `shared`. Source: FlashAttention-2, section 3.3.
    """
    def exchange(parts):
        shared.extend(parts)
        return torch.stack(parts)

    S = [Q_block @ K_w.T * Q_block.shape[1] ** -0.5 for K_w in K_block.chunk(warps)]
    m = exchange([S_w.amax(dim=1, keepdim=True) for S_w in S]).amax(0)  # [Br, 1]
    P = [torch.exp(S_w - m) for S_w in S]  # [Br, Bc / warps] each
    l = exchange([P_w.sum(dim=1, keepdim=True) for P_w in P]).sum(0)  # [Br, 1]
    return exchange([P_w @ V_w for P_w, V_w in zip(P, V_block.chunk(warps))]).sum(0) / l


def split_q(Q_block, K_block, V_block, warps, shared):
    """The same, a part of the queries for each warp (FA2's way): its rows are its own."""
    return torch.cat([plain_standard_attention(Q_w, K_block, V_block)
                      for Q_w in Q_block.chunk(warps)])


@dataclass
class SplitRow(VerifyRow):
    """A VerifyRow of one block; shared_bytes: what its warps write to shared memory, in float32."""

    shared_bytes: int = 0


def compare_splits(case, Br, Bc, device, seed, warps=4):
    """Run both on one block and compare them with standard attention and float64: SplitRows."""
    block, written = replace(case, Nq=Br, Nk=Bc), {"split K": [], "split Q": []}
    rows = verify(block, [Candidate("standard", standard_attention), *(
        Candidate(name, partial(each_head, partial(split, warps=warps, shared=written[name])))
        for name, split in zip(written, (split_k, split_q)))], device=device, seed=seed)
    return [SplitRow(**vars(row), shared_bytes=sum(4 * x.numel() for x in written[row.name]))
            for row in rows]


def show_counts(rows):
    def share(row, flop):
        return f"{flop / row.products:.2%}"

    r = rows[0]
    unit = r.N * r.N * r.d / r.Bc
    print_table(
        f"What one head does, N = {r.N}, d = {r.d}, tiles {r.Br}x{r.Bc}: MFLOP, divisions in N d",
        ["", "products", "outside them", "share", "exponentials", "on O", "in N^2 d / Bc",
         "divisions", "MB moved, float16", "of the peak (theirs)"],
        [(r.name, *(f"{x / 1e6:.4g}" for x in (r.products, r.outside)), share(r, r.outside),
          f"{r.exp / 1e6:.4g}", f"{r.on_O / 1e6:.4g}", f"{r.on_O / unit:.3f}",
          f"{r.divisions / (r.N * r.d):.3g}", f"{r.bytes_moved / 1e6:.4g}",
          REPORTED.get(r.name, "-")) for r in rows])
    console.print(
        "\non O: what is neither a product nor done to scores, m and l. FA1 multiplies both parts "
        "of the sum, adds and divides: 4. FA2 multiplies one, the product adds. FA4 makes 2^x by "
        "multiplications: more FLOPs, on a unit that has time.")


def show_busy(rows, Br):
    print_table(
        f"Blocks side by side, one a core, {Br} queries a block",
        ["chip", "batch", "heads", "N", "FA1: blocks", "cores busy", "FA2: blocks", "cores busy"],
        [(r.chip, r.batch, r.heads, r.N, r.fa1_blocks, f"{r.fa1_busy:.0%}", r.fa2_blocks,
          f"{r.fa2_busy:.0%}") for r in rows])


def show_splits(rows, case, Br, Bc):
    blocks = math.ceil(case.Nq / Br) * math.ceil(case.Nq / Bc)
    print_verify("Inside a block of scores: up to 4 warps, and the bytes that they exchange", rows,
                 ("name", "shared_bytes"))
    console.print(f"\nsplit K: {rows[0].shared_bytes * blocks / 1e6:.4g} MB for {blocks} such "
                  f"blocks of one head of N = {case.Nq}.")


def main():
    options = lesson.parser(__doc__, *"device seq-len head-dim br bc seed json".split())
    args, device, cases = lesson.begin(options, lengths=(1024,))
    found = []
    for case in cases:
        Br, Bc, _ = case.tile(*lesson.tile(args), device)
        Q, K, V = (x[0] for x in case.inputs(device, args.seed))
        checked = verify_generations(case, Br, Bc, device, args.seed)
        print_verify(f"Verify: largest differences, tiles {Br}x{Bc}", checked)
        counts = [count(name, Q, K, V, Br, Bc) for name in ("standard", *GENERATIONS)]
        show_counts(counts)
        busy = busy_cores(Br)
        show_busy(busy, Br)
        splits = compare_splits(case, Br, Bc, device, args.seed)
        show_splits(splits, case, Br, Bc)
        found += [(tool, row) for tool, rows in (("verify", checked), ("count", counts),
                  ("busy", busy), ("split", splits)) for row in rows]
    return lesson.finish(args, device, found)


if __name__ == "__main__":
    cli.serve(main)
