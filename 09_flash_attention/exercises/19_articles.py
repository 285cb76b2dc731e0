"""What the articles say: three of their formulas, mended.

    python exercises/19_articles.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/19_articles.md, 中文: lesson/zh/19_articles.md.
Solutions: solutions/.
"""

from check import serve

import math  # noqa: F401  for your functions

import torch  # noqa: F401  for your functions


def moved(n, d, heads=1):
    """Return the bytes that standard attention moves between memory and chip, in float16.

    n queries and n keys. d: the columns of all heads together. Three operators, each of which reads
    its inputs and writes its result once: S = Q K^T, P = softmax(S), O = P V. The second article
    has 6 (2 n^2 + n d) 2 in this place.
    """
    raise NotImplementedError


def saving(N, d, Br, Bc):
    """Return the peak of standard attention over that of flash attention, one head.

    Both hold their result, [N, d]. Standard attention holds S and P beside it. Flash attention
    holds a tile of S [Br, Bc], one of O [Br, d], and five columns of Br numbers. The first article
    has N^2 / (Br Bc) in this place.
    """
    raise NotImplementedError


def update(m, d, O, S_j, V_j):
    """Take one more block of keys into the output of a query. Return the new m, d and O.

    m: the largest score so far, -inf before the first block. d: the sum of exp(s - m) so far, 0
    before the first. O [dv]: the finished output for the keys so far, divided by d. S_j [Bc]: the
    scores of the block, V_j [Bc, dv] its values. This is the second article's update, the one of
    FlashAttention-1.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
