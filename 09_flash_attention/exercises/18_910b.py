"""On an Ascend 910B: what launches cost, which tile UB can hold, and the fused operator's traps.

    python exercises/18_910b.py

Write the three functions in their order and run this file after each; none needs a card. Until all
are right it says what is wrong in one line. The chapter: lesson/en/18_910b.md, 中文:
lesson/zh/18_910b.md. Solutions: solutions/.
"""

from check import serve

import math  # noqa: F401  for your functions

import torch  # noqa: F401  for your functions

UB = 192 * 1024  # bytes: where a vector unit of a 910B computes


def launch_ms(N, Br, Bc, us):
    """Return the milliseconds of the tiled loop, if a launch takes `us` microseconds and all else
    nothing.

    N queries and N keys. The loop launches 14 operators for each tile of Br x Bc and 7 more for
    each block of Br queries. The last blocks may be shorter.
    """
    raise NotImplementedError


def most_rows(d, Bc):
    """Return the largest Br, a power of 2, with which a tile can fit into UB.

    At the least UB holds, in float32: S_block [Br, Bc], in whose place P_block comes; O_block
    [Br, d]; m and l, a number a row each. A compiler needs more, so the result is a bound.
    """
    raise NotImplementedError


def call_npu(operator, Q, K, V, visible=None):
    """Return softmax(Q K^T / sqrt(d)) V, with `operator` in the place of npu_fusion_attention.

    Q, K, V [B, H, N, d]. visible: None, or a bool mask [B, 1, Nq, Nk], True where a query sees a
    key, as SDPA takes it; a row that sees no key has to be 0.

    operator(Q, K, V, head_num, input_layout, *, atten_mask=None, scale=1.0, inner_precise=0)
    returns seven things, the output first. input_layout: "BNSD", where N is the heads and S the
    sequence. atten_mask: True hides. inner_precise: 2 makes rows that see no key 0.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
