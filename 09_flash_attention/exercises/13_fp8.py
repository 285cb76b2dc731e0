"""FP8: round to a format of few bits, give each block a scale, keep P inside the format.

    python exercises/13_fp8.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/13_fp8.md, 中文: lesson/zh/13_fp8.md. Solutions:
solutions/.
"""

from check import serve

import math  # noqa: F401  for your functions

import torch  # noqa: F401  for your functions


def rounded(x, mantissa, lowest, largest):
    """Return x rounded to a floating format, in x's own dtype and shape.

    From 2^e to 2^(e+1) the format has 2^mantissa numbers at equal distances. Its lowest e is
    `lowest`: below 2^lowest the distance stays what it is above. Beyond `largest` it saturates.
    e4m3 has 3, -6 and 448. `torch.frexp` gives exponents, one larger than e; 0 stays 0.
    """
    raise NotImplementedError


def int8(x, rows):
    """Return x [N, d] rounded to whole multiples of a scale, one for each block of `rows` rows.

    The scale takes the largest absolute value of its block to 127. A block of zeros stays zero.
    """
    raise NotImplementedError


def largest_tau(offset, largest):
    """Return up to which tau no entry of P * 2^offset exceeds `largest`, a number.

    O is rescaled only when the maximum has grown by more than tau powers of two.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
