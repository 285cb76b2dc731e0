"""Decoding: what the KV cache takes, parts that are merged, and keys in pages.

    python exercises/09_decoding.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/09_decoding.md, 中文:
lesson/zh/09_decoding.md. Solutions: solutions/.
"""

from check import serve

import math  # noqa: F401  for your functions

import torch  # noqa: F401  for your functions


def cache_bytes(layers, Hkv, d, tokens, bytes_each):
    """Return the bytes of the KV cache of one sequence, a number.

    Each layer keeps a key and a value of d numbers for each token and each of Hkv heads.
    """
    raise NotImplementedError


def merge(O_parts, m_parts, l_parts):
    """Merge P parts of one row's keys. Return O [dv], m and l of all keys.

    O_parts [P, dv], each already divided by its l; m_parts, l_parts [P]. A part that saw no key is
    (0, -inf, 0). Where no part saw one, O is 0.
    """
    raise NotImplementedError


def paged_attention(q, K_pages, V_pages, table, length):
    """Return softmax(q K^T / sqrt(d)) V of one query over the `length` keys of one sequence.

    q [d], K_pages [P, page, d], V_pages [P, page, dv], table: a list of page numbers -> [dv].
    Key j is row j % page of page table[j // page]. What lies behind the last key is not to be read,
    and entries of the table that no key needs are -1.
    """
    raise NotImplementedError


if __name__ == "__main__":
    serve(globals())
