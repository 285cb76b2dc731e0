"""Approximation: compute less, and bet on where the weight lies.

    python exercises/14_approximation.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/14_approximation.md, 中文:
lesson/zh/14_approximation.md. Solutions: solutions/.
"""

from check import serve

import torch  # noqa: F401  for your functions


def low_rank(Q, K, V, k):
    """Return exact attention to k means of neighbouring keys, and of their values.

    Q [N, d], K [N, d], V [N, dv] -> [N, dv]. k divides N: each mean is of N / k keys in a row.
    """
    raise NotImplementedError


def linear_attention(f_Q, f_K, V):
    """Return O [N, dv], where the weight of query i and key j is f_Q[i] @ f_K[j] over their sum.

    f_Q [N, r], f_K [N, r], all positive, V [N, dv]. Sum up keys and values once, for all queries:
    no [N, N] tensor may be made.
    """
    raise NotImplementedError


def choose_blocks(Q, K, size, count):
    """Return [N / size, count]: which blocks of keys each block of queries visits, in rising order.

    Q, K [N, d] are cut into blocks of `size` rows. A block of keys is as good as the product of
    the mean query and the mean key of the two blocks. The `count` best are visited.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
