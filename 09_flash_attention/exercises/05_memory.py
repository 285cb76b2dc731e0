"""Memory: what is held at the highest moment, measured and by formula.

    python exercises/05_memory.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/05_memory.md, 中文:
lesson/zh/05_memory.md. Solutions: solutions/.
"""

from check import serve

import torch  # noqa: F401  for your functions


def peaks(events):
    """Return the peak of a call in bytes, and the same without its result: two numbers.

    events: what the allocator logged, in order. A positive number was allocated, a negative one was
    freed. What is still held after the last event is the result.
    """
    raise NotImplementedError


def flash_bytes(N, d, Br, Bc):
    """Return the bytes that the loop holds at its highest moment, the result included.

    One head, float32, N queries and keys, V with d columns too. The chapter's table has the four
    lines.
    """
    raise NotImplementedError


def one_matrix(Q, K, V):
    """Return softmax(Q K^T / sqrt(d)) V, and hold one N x N matrix at most.

    Q, K, V [N, d] -> [N, d]. What ends in `_` writes in place: `S.sub_(x)`, `S.exp_()`.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
