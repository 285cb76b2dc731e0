"""Attention and its shapes: the three lines, what they hold, and one row of them.

    python exercises/01_attention.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/01_attention.md, 中文:
lesson/zh/01_attention.md. Solutions: solutions/.
"""

from check import serve

import torch  # noqa: F401  for your functions


def attention(Q, K, V):
    """Return softmax(Q K^T / sqrt(d)) V.

    Q [..., Nq, d], K [..., Nk, d], V [..., Nk, dv] -> [..., Nq, dv], with any number of leading
    dimensions.
    """
    raise NotImplementedError


def bytes_of_S_and_P(B, H, N, bytes_each):
    """Return how many bytes S and P take together. bytes_each: of a number, 4 for float32."""
    raise NotImplementedError


def one_row(Q, K, V, i):
    """Return row i of attention(Q, K, V), [dv], and make no N x N matrix on the way.

    Q [Nq, d], K [Nk, d], V [Nk, dv].
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
