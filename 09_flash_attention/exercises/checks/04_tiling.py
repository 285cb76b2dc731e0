"""What exercises/04_tiling.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import torch
from watch import Watch, largest


def loop(scale=lambda Q, Bc: Q.shape[1] ** 0.5, rescale_O=True, rescale_l=True, tail=True,
         highest=torch.maximum, keep_m=True, start=-torch.inf, divide="end", keepdim=True,
         sum_keepdim=True, minus_m=True):
    """Return a flash attention that may forget something."""
    def attend(Q, K, V, Br, Bc):
        Nk = len(K) if tail else len(K) // Bc * Bc
        O = []
        for Q_block in Q.split(Br):
            m, l, O_block = torch.full_like(Q_block[:, :1], start), 0.0, 0.0
            for K_block, V_block in zip(K[:Nk].split(Bc), V[:Nk].split(Bc)):
                S = Q_block @ K_block.T / scale(Q, Bc)
                m_new = highest(m, S.amax(1, keepdim=keepdim))
                P, correction = torch.exp(S - m_new * minus_m), torch.exp(m - m_new)
                l = (correction if rescale_l else 1) * l + P.sum(1, keepdim=sum_keepdim)
                O_block = (correction if rescale_O else 1) * O_block + P @ V_block
                O_block = O_block / l if "each" in divide else O_block
                m = m_new if keep_m else m
            O.append(O_block / l if "end" in divide else O_block)
        return torch.cat(O)
    return attend


def one_sum(Q, K, V, Br, Bc):
    """Forgets that each row needs a sum of its own."""
    O = []
    for Q_block in Q.split(Br):
        S = Q_block @ K.T / Q.shape[1] ** 0.5
        P = torch.exp(S - S.max())
        O.append(P @ V / P.sum())
    return torch.cat(O)


def square_for_column(Q, K, V, Br, Bc):
    """Writes what a sum without keepdim leads to, [Br, Br], into rows of l."""
    torch.zeros(len(Q), 1)[:Br] = torch.zeros(Br, Br)


def exact(Q, K, V, *_):
    return torch.softmax(Q @ K.T / Q.shape[1] ** 0.5, 1) @ V


def largest_tensor(attend, Q, K, V, Br, Bc):
    """Say which tensor was the largest on the way."""
    return f"{largest(attend, Q, K, V, Br, Bc)} as the largest tensor"


def loads(attend, Q, K, V, Br, Bc):
    """Say how often a block of V comes after another: the blocks are told by their numbers."""
    used = []

    def note(operator, tensors, made):
        for block in tensors[1:]:
            if operator in ("mm", "bmm", "addmm") and block.shape[-2:] == (Bc, V.shape[1]):
                used.append(block.flatten()[0].item())

    with Watch(note):
        attend(Q, K, V, Br, Bc)
    times = sum(one != other for one, other in zip([None, *used], used))
    return f"{times} loads of a block of V"


def shifted(by):
    """Q, K, V whose scores are those of whole numbers, and `by` more for each key; d = 4.

    Q's first column times K's is 2 * by, and the scores are divided by sqrt(d) = 2. They are exact.
    """
    Q, K = (torch.randint(-2, 3, (8, 4), generator=generator).float() for _ in range(2))
    Q[:, 0], K[:, 0] = 2, by
    return [Q, K, torch.randn(8, 4, generator=generator)]


def count(Tr, Tc):
    return Tr, Tc, Tr * Tc


generator = torch.Generator().manual_seed(0)
EVEN = [2 * torch.randn(8, 4, generator=generator) for _ in range(3)]
ODD = [2 * torch.randn(s, generator=generator) for s in ((7, 4), (10, 4), (10, 3))]
LONG = [torch.ones(96, 4) for _ in range(2)] + [torch.arange(96.0 * 3).view(96, 3)]
MISTAKES = {
    "divide the scores by sqrt(d)": loop(scale=lambda Q, Bc: 1),
    "divide the scores by sqrt(d), not by sqrt(Bc)": loop(scale=lambda Q, Bc: Bc ** 0.5),
    "divide by sqrt(d), not by d": loop(scale=lambda Q, Bc: Q.shape[1]),
    "P_block is exp(S_block - m_new), with the m_new of the correction": loop(minus_m=False),
    "O_block has to be multiplied by the correction": loop(rescale_O=False),
    "l has to be multiplied by the correction": loop(rescale_l=False),
    "neither l nor O_block was corrected": loop(rescale_O=False, rescale_l=False),
    "only the last tile of each row counts: set m to m_new at the end of the loop": loop(
        keep_m=False),
    "O has to be divided by l, after the last block of keys": loop(divide="never"),
    "O is divided in each step: divide by l once, after the last block of keys": loop(
        divide="each"),
    "O is divided in each step and once more at the end: only the last one is right": loop(
        divide="each end"),
    "the last block of keys is shorter, and counts too": loop(tail=False),
    "each row has a sum of its own: sum(dim=1, keepdim=True)": one_sum,
    "m is a column, [Br, 1]: amax(dim=1, keepdim=True)": loop(keepdim=False),
    "l is a column, [Br, 1]: sum(dim=1, keepdim=True)": loop(sum_keepdim=False),
    "l[rows] is a column, [Br, 1]: sum(dim=1, keepdim=True)": square_for_column,
}
HIGH = {"exp overflows: take m_new off the scores first": loop(highest=lambda m, highest: 0 * m)}
LOW = {"m has to start at -inf: 0 is above all of these scores, and each exp vanishes":
       loop(start=0.0)}
LOWER = {"m_new is the larger of m and the tile's maximum: where a later tile is lower, "
         "exp(m - m_new) overflows": loop(highest=lambda m, highest: highest)}
INPUTS = [
    ("8 queries, 8 keys", EVEN, 4, 2, MISTAKES),
    ("7 queries, 10 keys", ODD, 3, 4, MISTAKES),
    ("scores near 1000", shifted(1000.0), 4, 2, HIGH),
    ("scores near -1000", shifted(-1000.0), 4, 2, LOW),
    ("scores that fall from 200 to -200", shifted(torch.linspace(200, -200, 8)), 4, 2, LOWER),
]
SIZES = {
    "the scores of one tile are Q_block @ K_block.T, never Q @ K.T": exact,
    "Br cuts the queries, Bc the keys": lambda Q, K, V, Br, Bc: loop()(Q, K, V, Bc, Br),
    "the queries are cut into blocks of Br as well": lambda Q, K, V, Br, Bc: loop()(
        Q, K, V, len(Q), Bc),
    "the keys are cut into blocks of Bc as well": lambda Q, K, V, Br, Bc: loop()(
        Q, K, V, Br, len(K)),
}
ORDER = {"here the loop over blocks of K and V is outside: each of them is taken once, and meets "
         "all blocks of queries": loop()}
TILES = {
    "the last block may be shorter, and is a block too: round up": lambda Nq, Nk, Br, Bc: count(
        Nq // Br, Nk // Bc),
    "Br cuts the queries, Bc the keys": lambda Nq, Nk, Br, Bc: count(-(-Nq // Bc), -(-Nk // Br)),
    "a length that Br divides gives no block more": lambda Nq, Nk, Br, Bc: count(
        Nq // Br + 1, Nk // Bc + 1),
    "each block of queries meets each block of keys: a product, not a sum":
        lambda Nq, Nk, Br, Bc: (-(-Nq // Br), -(-Nk // Bc), -(-Nq // Br) + -(-Nk // Bc)),
}


def cases(function):
    """Return the cases of both orders: the values first, then what is held."""
    return [*(Case(function, (*inputs, Br, Bc), exact(*inputs), mistakes,
                   said=f"{said}, {Br}x{Bc} tiles") for said, inputs, Br, Bc, mistakes in INPUTS),
            Case(function, (*LONG, 32, 16), "[32, 16] as the largest tensor", SIZES,
                 call=largest_tensor, said="96 queries, 96 keys, d = 4, Br = 32, Bc = 16")]


CASES = [
    Case("tiles", (128, 128, 64, 32), (2, 4, 8), TILES),
    Case("tiles", (130, 70, 64, 32), (3, 3, 9), TILES),
    *cases("flash_attention"),
    *cases("keys_outside"),
    Case("keys_outside", (*LONG, 32, 16), "6 loads of a block of V", ORDER, call=loads,
         said="96 queries, 96 keys, Br = 32, Bc = 16"),
]
