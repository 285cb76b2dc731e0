"""One kernel, on the chip: which tile fits, which keys a block meets, and exp2 in place of exp.

    python exercises/11_kernel.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/11_kernel.md, 中文: lesson/zh/11_kernel.md.
Solutions: solutions/.
"""

from check import serve

import math  # noqa: F401  for your functions

import torch  # noqa: F401  for your functions

SIZES = 32, 64, 128, 256  # of Br; Bc is one of them from 64 on


def largest_tile(d, ub, l1, l0c):
    """Return (Br, Bc), the best tile that fits, or None where none does.

    ub, l1, l0c: bytes of a core's memories. They hold at the same time, float32 with 4 bytes a
    number and float16 with 2:

        UB   float32: S_block [Br, Bc], O_block [Br, d], m and l [Br]; float16: P_block [Br, Bc]
        L1   float16: Q_block [Br, d], K_block and V_block [Bc, d], P_block
        L0C  float32: S_block, and after it has left, P_block V_block [Br, d]

    Best: the largest Br of SIZES; then the largest Bc of SIZES, but at least 64.
    """
    raise NotImplementedError


def band(first, last, N, left, right):
    """Return (start, whole, end, stop) for the queries first ... last - 1.

    There are N keys, and query i sees those from i - left to i + right. At least one query of the
    block sees each key from start to stop - 1. All of them see each key from whole to end - 1; if
    there is no such key, end is whole.
    """
    raise NotImplementedError


def softmax_and_L(scores, scale):
    """Return softmax(scale * scores) and L, its log-sum-exp, without any exp.

    scores [N] -> weights [N] and L, a number. Take `torch.exp2`, and fold log2(e) into the scale as
    the kernel does. L stays a natural logarithm.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
