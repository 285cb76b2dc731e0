"""What it costs: how many calls a loop makes, how large its tiles must be, how its time grows.

    python exercises/07_cost.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/07_cost.md, 中文:
lesson/zh/07_cost.md. Solutions: solutions/.
"""

from check import serve

import math  # noqa: F401  for your functions


def launches(N, Br, Bc):
    """Return how many operators the loop calls: 14 for each tile, 7 for each block of queries."""
    raise NotImplementedError


def smallest_tile(N, d, call, rate):
    """Return the smallest power of two B, at most N, with which calls take no more than products.

    The tiles are B x B. call: seconds of one operator call. rate: FLOPs a second of the products,
    which are 4 N^2 d FLOPs in all. Return None where there is no such B.
    """
    raise NotImplementedError


def exponent(lengths, seconds):
    """Return p where the times grow as N^p: the slope of log(seconds) over log(lengths).

    The line is the one that fits all points best (least squares): with x and y the logarithms less
    their means, the slope is sum(x y) / sum(x x).
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
