"""Tiling: the loop over blocks, in both orders.

    python exercises/04_tiling.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/04_tiling.md, 中文:
lesson/zh/04_tiling.md. Solutions: solutions/.
"""

from check import serve

import torch  # noqa: F401  for your functions


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


if __name__ == "__main__":
    serve(globals())
