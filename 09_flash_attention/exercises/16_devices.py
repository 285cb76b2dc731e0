"""More devices: who has which rows, what a hop adds, and what is sent.

    python exercises/16_devices.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/16_devices.md, 中文:
lesson/zh/16_devices.md. Solutions: solutions/.
"""

from check import serve

import torch  # noqa: F401  for your functions


def positions(rank, ranks, N):
    """Return a list: which of N positions a rank has in zigzag order.

    The text is cut into 2 * ranks equal pieces, which go to the ranks 0, 1, ..., 1, 0. ranks counts
    them, N is a multiple of 2 * ranks.
    """
    raise NotImplementedError


def merge_hop(so_far, part):
    """Return (O, m, l) of the keys so far and of the block that a hop has brought.

    Both are such triples: O [n, dv] is divided by l already, m [n] is the maximum of a row's scores
    and l [n] its sum of exp(s - m). The returned O is divided, too. A row that has seen no key has
    m = -inf, l = 0 and O = 0; in `so_far` each row has seen a key.
    """
    raise NotImplementedError


def bytes_sent(ranks, n, kv_heads, d, e):
    """Return how many bytes a rank sends round the ring: (in a forward, in a backward).

    It has n rows of K and V, each with kv_heads heads of d numbers of e bytes. A forward passes K
    and V on until each rank has seen all. A backward does the same again; behind K and V go dK and
    dV, in float32, until they are home. There are at least two ranks.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
