"""The generations: an O that is always finished, an O that is rarely rescaled, two units in turn.

    python exercises/12_generations.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/12_generations.md, 中文:
lesson/zh/12_generations.md. Solutions: solutions/.
"""

from check import serve

import math  # noqa: F401  for your functions

import torch  # noqa: F401  for your functions


def finished_step(m, l, O, scores, values):
    """Take one more block of keys into a row as FlashAttention-1 does. Return the new m, l and O.

    m, l: two numbers, -inf and 0 before the first block. O [dv]: the attention to the keys so far,
    divided by l already; zeros before the first block. scores [Bc], values [Bc, dv].
    """
    raise NotImplementedError


def lazy_step(m, l, O, scores, values, tau):
    """Take one more block of keys into a row as FlashAttention-4 does. Return the new m, l and O.

    All in powers of 2: an entry of P is 2^(score - m). m stays unless the largest score exceeds it
    by more than tau; then m becomes that score, and l and O are rescaled. O [dv] is not divided.
    m, l, O are -inf, 0 and zeros before the first block. scores [Bc], values [Bc, dv].
    """
    raise NotImplementedError


def step_time(stages):
    """Return what a step takes: (one stage after another, two blocks in turns), in the long run.

    stages: [(unit, time), ...] of one step, in the order in which they need each other. In turns a
    unit works for one block while the other unit works for the other. The start and the end of the
    walk don't count.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
