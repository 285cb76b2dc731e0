"""Masks: which keys a query sees, which tiles are visited, and rows that see nothing.

    python exercises/08_masks.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/08_masks.md, 中文:
lesson/zh/08_masks.md. Solutions: solutions/.
"""

from check import serve

import math  # noqa: F401  for your functions

import torch  # noqa: F401  for your functions


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


if __name__ == "__main__":
    serve(globals())
