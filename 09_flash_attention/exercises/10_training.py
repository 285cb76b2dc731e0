"""Training: the gradients of attention, on whole matrices, in tiles, and with dropout.

    python exercises/10_training.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/10_training.md, 中文:
lesson/zh/10_training.md. Solutions: solutions/.
"""

from check import serve

import torch  # noqa: F401  for your functions


def backward(Q, K, V, dO):
    """Return dQ, dK, dV of O = softmax(Q K^T / sqrt(d)) V by the five equations, without autograd.

    Q [Nq, d], K [Nk, d], V [Nk, dv], dO [Nq, dv]; each gradient has the shape of its input.
    """
    raise NotImplementedError


def backward_in_tiles(Q, K, V, O, m, l, dO, Br, Bc):
    """Return the same from what the forward kept; no tensor of scores is larger than Br x Bc.

    O [Nq, dv], m [Nq, 1] the maximum of each row, l [Nq, 1] its sum of exp(S - m). Lengths need not
    be multiples of Br and Bc. Start with gradients of zeros and add to their rows.
    """
    raise NotImplementedError


def backward_with_dropout(Q, K, V, Z, dO):
    """Return dQ, dK, dV of O = (softmax(Q K^T / sqrt(d)) * Z) V, on whole matrices.

    Z [Nq, Nk]: 0 where a weight is dropped, 1/(1-p) elsewhere.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
