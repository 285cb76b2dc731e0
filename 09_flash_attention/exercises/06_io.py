"""What is moved: the traffic of three algorithms by formula, and the time that it takes.

    python exercises/06_io.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/06_io.md, 中文:
lesson/zh/06_io.md. Solutions: solutions/.
"""

from check import serve

import math  # noqa: F401  for your functions


def standard_traffic(N, d):
    """Return how many numbers standard attention moves: three operators, read by read.

    One head, N queries and keys, d columns of Q, K and V.
    """
    raise NotImplementedError


def loop_traffic(N, d, Br, Bc, outside):
    """Return how many numbers the loop over Br x Bc tiles moves.

    outside: 'Q', the queries are outside; or 'K', the keys are. With the keys outside, O is written
    once with zeros before the loop begins. m and l are left out in both.
    """
    raise NotImplementedError


def roofline(flop, moved, peak, bandwidth):
    """Return the seconds that the roofline allows, and what decides: 'products' or 'memory'.

    flop: FLOPs of the products. moved: bytes. peak: FLOPs a second. bandwidth: bytes a second.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
