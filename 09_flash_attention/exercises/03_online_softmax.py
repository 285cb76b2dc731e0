"""Online softmax: take the scores one after another, and keep what is needed for the rest.

    python exercises/03_online_softmax.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/03_online_softmax.md, 中文:
lesson/zh/03_online_softmax.md. Solutions: solutions/.
"""

from check import serve

import math  # noqa: F401  for your functions

import torch  # noqa: F401  for your functions


def step(m, l, score):
    """Take one more score into the softmax. Return the new m and the new l, two numbers.

    m: the largest score so far, -inf before the first. l: the sum of exp(s - m) over the scores s
    so far, 0 before the first.
    """
    raise NotImplementedError


def attend(scores, values, Bc):
    """Return sum(softmax(scores)_i * values_i) in one pass over pieces of Bc scores.

    scores [N], values [N, dv] -> [dv]. Keep m, l and O, and divide once, at the end.
    `scores.split(Bc)` gives the pieces. Without torch.softmax.
    """
    raise NotImplementedError


def merge(first, second):
    """Merge two parts of one row. Each is (m, l, O), O not yet divided; return one such triple.

    m and l are numbers, O is [dv]. Two workers have each walked over half of the keys.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
