"""Safe softmax: no overflow, whatever the scores are.

    python exercises/02_safe_softmax.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/02_safe_softmax.md, 中文:
lesson/zh/02_safe_softmax.md. Solutions: solutions/.
"""

from check import serve

import math  # noqa: F401  for your functions

import torch  # noqa: F401  for your functions


def safe_softmax(x):
    """Return the softmax over the last dimension, from exp and sum alone. x [..., N] -> [..., N].

    Without torch.softmax.
    """
    raise NotImplementedError


def largest_score(largest, N):
    """Return the largest x for which the sum of N equal exp(x) does not exceed `largest`.

    largest: the largest number of a format, 65504 for float16.
    """
    raise NotImplementedError


def log_sum_exp(x):
    """Return log(sum(exp(x))) over the last dimension, from exp, log and sum. x [..., N] -> [...].

    It has to be right for scores of 1000 and of -1000. Without torch.logsumexp.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
