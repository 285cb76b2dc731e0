"""Masks: which keys a query sees, which tiles are visited, and rows that see nothing.

    python exercises/08_masks.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/08_masks.md, 中文:
lesson/zh/08_masks.md. Solutions: solutions/.
"""

from check import Case, serve

import math

import torch


def causal_mask(Nq, Nk):
    """Return the causal mask, bool [Nq, Nk]: True where query i sees key j.

    The last query sees the last key, the one before it all but the last, and so on.
    """
    raise NotImplementedError


def visited(Nq, Nk, Br, Bc):
    """Return how many Br x Bc tiles hold a score that `causal_mask(Nq, Nk)` keeps, a number.

    Compute it from the place of a block's last query. No mask may be made.
    """
    raise NotImplementedError


def masked_attention(Q, K, V, mask, Bc):
    """Return softmax(Q K^T / sqrt(d)) V of the keys that the mask keeps, Bc keys at a time.

    Q [Nq, d], K [Nk, d], V [Nk, dv], mask bool [Nq, Nk] -> [Nq, dv]. A row that sees no key gives
    0, also where the first piece hides all of a row. A key that no query sees changes nothing, even
    where V holds NaN.
    """
    raise NotImplementedError


# What is checked, and what usual mistakes give


def count(Nq, Nk, Br, Bc, q_start=None, last=1, up=True):
    """Count tiles; the parameters are what the mistakes get wrong."""
    q_start, total = Nk - Nq if q_start is None else q_start, 0
    for i in range(0, Nq, Br):
        keys = max(0, min(Nk, q_start + (min(i + Br, Nq) if last else i + 1)))
        total += -(-keys // Bc) if up else keys // Bc
    return total


def loop(start=None, hidden=-math.inf, divide=None, after=False, clean=True):
    """Return a masked attention that forgets something."""
    def attend(Q, K, V, mask, Bc):
        m = torch.full((len(Q), 1), torch.finfo(Q.dtype).min if start is None else start)
        l = O = 0.0
        V = V.masked_fill(~mask.any(0).unsqueeze(1), 0) if clean else V
        for K_block, V_block, seen in zip(K.split(Bc), V.split(Bc), mask.split(Bc, 1)):
            S = Q @ K_block.T / Q.shape[1] ** 0.5
            S = S if after else S.masked_fill(~seen, hidden)
            m_new = torch.maximum(m, S.amax(1, keepdim=True))
            correction, P = torch.exp(m - m_new), torch.exp(S - m_new)
            l = correction * l + P.sum(1, keepdim=True)
            O = correction * O + (P * seen if after else P) @ V_block
            m = m_new
        return O / (l if divide == "by l" else l.masked_fill(l == 0, 1))
    return attend


def exact(Q, K, V, mask):
    """Row by row, over the keys that it sees alone."""
    rows = [torch.softmax(K[seen] @ q / len(q) ** 0.5, 0) @ V[seen] for q, seen in zip(Q, mask)]
    return torch.stack(rows)


def corner(Nq, Nk, q_start, diagonal=0):
    return torch.ones(Nq, Nk, dtype=torch.bool).tril(q_start + diagonal)


UPPER_LEFT = "the last query has to see the last key: key j <= Nk - Nq + i"
CORNERS = {
    UPPER_LEFT: lambda Nq, Nk: corner(Nq, Nk, 0),
    "a query sees its own key too: <= and not <": lambda Nq, Nk: corner(Nq, Nk, Nk - Nq, -1),
    "True is what a query sees, not what is hidden": lambda Nq, Nk: ~corner(Nq, Nk, Nk - Nq),
}
COUNTS = {
    UPPER_LEFT: lambda Nq, Nk, Br, Bc: count(Nq, Nk, Br, Bc, q_start=0),
    "a tile that only the block's last query sees is visited too":
        lambda Nq, Nk, Br, Bc: count(Nq, Nk, Br, Bc, last=0),
    "a tile that is seen in part is visited too: round up":
        lambda Nq, Nk, Br, Bc: count(Nq, Nk, Br, Bc, up=False),
    "these are all tiles; causal skips some": lambda Nq, Nk, Br, Bc: -(-Nq // Br) * -(-Nk // Bc),
    "a block of queries before the first key visits no tile, not less than none":
        lambda Nq, Nk, Br, Bc: sum(-(-min(Nk, Nk - Nq + min(i + Br, Nq)) // Bc)
                                   for i in range(0, Nq, Br)),
    "the tiles on the edge count too": lambda Nq, Nk, Br, Bc: (
        -(-Nq // Br) * -(-Nk // Bc) // 2),
}
LOOPS = {
    "l = 0 where a row sees nothing: divide by 1 there, 0 / 0 is NaN": loop(divide="by l"),
    "start m at the lowest finite number: -inf - -inf is NaN":
        loop(start=-math.inf, divide="by l"),
    "-1e9 gives weights to a row that sees nothing; -inf gives none": loop(hidden=-1e9),
    "a hidden score must not count in l either: hide it before the exp": loop(after=True),
    "0 * NaN is NaN: put zeros into the rows of V that no query sees": loop(clean=False),
    "hidden is where the mask is False": lambda Q, K, V, mask, Bc: loop()(Q, K, V, ~mask, Bc),
    "the mask is ignored": lambda Q, K, V, mask, Bc: loop()(Q, K, V, mask | True, Bc),
}

generator = torch.Generator().manual_seed(0)
Q, K = (2 * torch.randn(6, 4, generator=generator) for _ in range(2))
V = torch.randn(6, 3, generator=generator)
CAUSAL, WINDOW = corner(6, 6, 0), corner(6, 6, 0).triu(-1)
BLIND = CAUSAL & (torch.arange(6) != 2).unsqueeze(1)  # query 2 sees nothing
UNUSED = CAUSAL & (torch.arange(6) != 3)  # no query sees key 3
WITH_NAN = V.masked_fill((torch.arange(6) == 3).unsqueeze(1), math.nan)

CASES = [
    *(Case("causal_mask", sizes, corner(*sizes, sizes[1] - sizes[0]), CORNERS)
      for sizes in ((3, 3), (2, 5), (1, 4), (4, 2))),
    *(Case("visited", sizes, expected, COUNTS) for sizes, expected in (
        ((6, 6, 2, 2), 6), ((8, 8, 4, 2), 6), ((2, 8, 2, 2), 4), ((7, 7, 4, 4), 3),
        ((1, 100, 64, 16), 7), ((9, 3, 2, 2), 3), ((4096, 4096, 64, 64), 2080))),
    *(Case("masked_attention", (Q, K, values, mask, Bc), exact(Q, K, values, mask), LOOPS,
           said=f"{said}, Bc={Bc}") for said, values, mask, Bc in (
        ("causal", V, CAUSAL, 6), ("causal", V, CAUSAL, 2), ("a window of 2 keys", V, WINDOW, 2),
        ("query 2 sees nothing", V, BLIND, 4), ("no query sees key 3", WITH_NAN, UNUSED, 4))),
]

if __name__ == "__main__":
    serve(globals())
