"""Tiling: the loop over blocks, in both orders.

    python exercises/04_tiling.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/04_tiling.md, 中文:
lesson/zh/04_tiling.md. Solutions: solutions/.
"""

from check import Case, serve

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def tiles(Nq, Nk, Br, Bc):
    """Return how many blocks of queries, blocks of keys, and tiles there are: three numbers."""
    raise NotImplementedError


def flash_attention(Q, K, V, Br, Bc):
    """Return softmax(Q K^T / sqrt(d)) V; no tensor of scores is larger than Br x Bc.

    Q [Nq, d], K [Nk, d], V [Nk, dv] -> [Nq, dv]. Lengths need not be multiples of Br and Bc.
    """
    raise NotImplementedError


def keys_outside(Q, K, V, Br, Bc):
    """Return the same, with the loop over blocks of K and V outside and that over Q inside.

    Keep m [Nq, 1], l [Nq, 1] and O [Nq, dv] for all queries; `m[i:i + Br]` is a block of it.
    """
    raise NotImplementedError


# What is checked, and what usual mistakes give


def loop(scale=True, rescale_O=True, rescale_l=True, tail=True, last_m=False):
    """Return a flash attention that forgets something."""
    def attend(Q, K, V, Br, Bc):
        Nk = len(K) if tail else len(K) // Bc * Bc
        O = []
        for Q_block in Q.split(Br):
            m, l, O_block = torch.full_like(Q_block[:, :1], -torch.inf), 0.0, 0.0
            for K_block, V_block in zip(K[:Nk].split(Bc), V[:Nk].split(Bc)):
                S = Q_block @ K_block.T / (Q.shape[1] ** 0.5 if scale else 1)
                highest = S.amax(1, keepdim=True)
                m_new = highest if last_m else torch.maximum(m, highest)
                P, correction = torch.exp(S - m_new), torch.exp(m - m_new)
                l = (correction if rescale_l else 1) * l + P.sum(1, keepdim=True)
                O_block = (correction if rescale_O else 1) * O_block + P @ V_block
                m = torch.maximum(m, highest)
            O.append(O_block / l)
        return torch.cat(O)
    return attend


def one_m_for_a_block(Q, K, V, Br, Bc):
    """Forgets that each row needs a sum of its own."""
    O = []
    for Q_block in Q.split(Br):
        S = Q_block @ K.T / Q.shape[1] ** 0.5
        P = torch.exp(S - S.max())
        O.append(P @ V / P.sum())
    return torch.cat(O)


def largest_square(attend, Q, K, V, Br, Bc):
    """Return whether a tensor with more numbers than a tile or a block was made on the way."""
    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor) and found.shape != Q.shape:
                self.largest = max(self.largest, found.numel())
            return found

    with Watch() as watch:
        attend(Q, K, V, Br, Bc)
    return "no tensor larger than Q" if watch.largest <= Q.numel() else "a larger tensor than Q"


def exact(Q, K, V, *_):
    return torch.softmax(Q @ K.T / Q.shape[1] ** 0.5, 1) @ V


generator = torch.Generator().manual_seed(0)
EVEN = [2 * torch.randn(8, 4, generator=generator) for _ in range(3)]
ODD = [2 * torch.randn(s, generator=generator) for s in ((7, 4), (10, 4), (10, 3))]
LONG = [torch.ones(128, 4) for _ in range(3)]
MISTAKES = {
    "divide the scores by sqrt(d)": loop(scale=False),
    "O_block has to be multiplied by the correction": loop(rescale_O=False),
    "l has to be multiplied by the correction": loop(rescale_l=False),
    "neither l nor O_block was corrected": loop(rescale_O=False, rescale_l=False),
    "m_new is the larger of m and the tile's maximum": loop(last_m=True),
    "the last block of keys is shorter, and counts too": loop(tail=False),
    "each row has a sum of its own: sum(dim=1, keepdim=True)": one_m_for_a_block,
}
WHOLE = {"the scores of one tile are Q_block @ K_block.T, never Q @ K.T": exact}


def count(Tr, Tc):
    return Tr, Tc, Tr * Tc


TILES = {
    "the last block may be shorter, and is a block too: round up": lambda Nq, Nk, Br, Bc: count(
        Nq // Br, Nk // Bc),
    "Br cuts the queries, Bc the keys": lambda Nq, Nk, Br, Bc: count(-(-Nq // Bc), -(-Nk // Br)),
    "a length that Br divides gives no block more": lambda Nq, Nk, Br, Bc: count(
        Nq // Br + 1, Nk // Bc + 1),
}

CASES = [
    Case("tiles", (128, 128, 64, 32), (2, 4, 8), TILES),
    Case("tiles", (130, 70, 64, 32), (3, 3, 9), TILES),
    *(Case(function, (*inputs, Br, Bc), exact(*inputs), MISTAKES, said=f"{said}, {Br}x{Bc} tiles")
      for function in ("flash_attention", "keys_outside")
      for said, inputs, Br, Bc in (("8 queries, 8 keys", EVEN, 4, 2),
                                   ("7 queries, 10 keys", ODD, 3, 4))),
    *(Case(function, (*LONG, 16, 16), "no tensor larger than Q", WHOLE, call=largest_square,
           said="N = 128, d = 4, 16x16 tiles") for function in ("flash_attention", "keys_outside")),
]

if __name__ == "__main__":
    serve(globals())
