"""What exercises/08_masks.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import math

import torch
from watch import Refusal, Watch


def count(Nq, Nk, Br, Bc, q_start=None, last=1, up=True):
    """Count tiles; the parameters are what the mistakes get wrong."""
    q_start, total = Nk - Nq if q_start is None else q_start, 0
    for i in range(0, Nq, Br):
        keys = max(0, min(Nk, q_start + (min(i + Br, Nq) if last else i + 1)))
        total += -(-keys // Bc) if up else keys // Bc
    return total


def triangle(T):
    return T * (T + 1) // 2


def loop(start=None, hidden=-math.inf, divide=None, after=False, clean=True,
         times=False):
    """Return a masked attention that forgets something."""
    def attend(Q, K, V, mask, Bc):
        m = torch.full((len(Q), 1), torch.finfo(Q.dtype).min if start is None else start)
        l = O = 0.0
        V = V.masked_fill(~mask.any(0).unsqueeze(1), 0) if clean else V
        for K_block, V_block, seen in zip(K.split(Bc), V.split(Bc), mask.split(Bc, 1)):
            S = Q @ K_block.T / Q.shape[1] ** 0.5
            S = S * seen if times else S if after else S.masked_fill(~seen, hidden)
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


def by_count(visited, Nq, Nk, Br, Bc):
    """Refuse a mask: any tensor with more numbers than there are queries and keys."""
    def note(operator, tensors, made):
        if isinstance(made, torch.Tensor) and made.numel() > Nq + Nk:
            raise Refusal(f"{operator} makes a tensor of {made.numel()} numbers: count the keys "
                          "that the block's last query sees, without a mask")

    with Watch(note):
        return visited(Nq, Nk, Br, Bc)


def corner(Nq, Nk, q_start, diagonal=0):
    return torch.ones(Nq, Nk, dtype=torch.bool).tril(q_start + diagonal)


UPPER_LEFT = "the last query has to see the last key: key j <= Nk - Nq + i"
CORNERS = {
    UPPER_LEFT: lambda Nq, Nk: corner(Nq, Nk, 0),
    "triu keeps what lies above the diagonal; a query sees what is below: tril(Nk - Nq)":
        lambda Nq, Nk: torch.ones(Nq, Nk, dtype=torch.bool).triu(Nk - Nq),
    "triu keeps what lies above the diagonal; a query sees what is below: tril":
        lambda Nq, Nk: torch.ones(Nq, Nk, dtype=torch.bool).triu(),
    "a mask of bool is asked for: compare, or .bool()":
        lambda Nq, Nk: corner(Nq, Nk, Nk - Nq).float(),
    "a mask of bool is asked for, not one that is added to the scores": lambda Nq, Nk: (
        torch.zeros(Nq, Nk).masked_fill(~corner(Nq, Nk, Nk - Nq), -torch.inf)),
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
    "T (T + 1) / 2 holds where Br and Bc are equal: go over the blocks of queries":
        lambda Nq, Nk, Br, Bc: triangle(-(-Nq // Br)),
    "T (T + 1) / 2 holds where Br and Bc are equal; go over the blocks of queries":
        lambda Nq, Nk, Br, Bc: triangle(-(-Nk // Bc)),
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
    "S * mask makes a hidden score 0, and exp(0) is 1: it has to be -inf": loop(times=True),
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
    *(Case("visited", sizes, expected, COUNTS, by_count) for sizes, expected in (
        ((6, 6, 2, 2), 6), ((8, 8, 4, 2), 6), ((2, 8, 2, 2), 4), ((7, 7, 4, 4), 3),
        ((1, 100, 64, 16), 7), ((9, 3, 2, 2), 3), ((4096, 4096, 64, 64), 2080))),
    *(Case("masked_attention", (Q, K, values, mask, Bc), exact(Q, K, values, mask), LOOPS,
           said=f"{said}, Bc={Bc}") for said, values, mask, Bc in (
        ("causal", V, CAUSAL, 6), ("causal", V, CAUSAL, 2), ("a window of 2 keys", V, WINDOW, 2),
        ("query 2 sees nothing", V, BLIND, 4), ("no query sees key 3", WITH_NAN, UNUSED, 4))),
]
