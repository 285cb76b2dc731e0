"""What exercises/19_articles.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import math

import torch


def right_update(m, d, O, S_j, V_j, normalise=False, old=True, new=True, denominator=True):
    """An `update`, or one that does a thing in another way."""
    m_j = S_j.max().item()
    P_j = torch.exp(S_j - m_j)
    m_new = max(m, m_j)
    before, here = math.exp(m - m_new), math.exp(m_j - m_new) if new else 1.0
    d_new = before * d + here * P_j.sum().item()
    weights = P_j / P_j.sum() if normalise else P_j
    O = (d if denominator else 1.0) * (before if old else 1.0) * O + here * weights @ V_j
    return m_new, d_new, O / d_new


def right_saving(N, d, Br, Bc):
    return (2 * N * N + N * d) / (N * d + Br * Bc + Br * d + 5 * Br)


def steps(scores, values, Bc):
    """Return call(update): m, d and O after all blocks."""
    def call(update, *inputs):
        m, d, O = -math.inf, 0.0, torch.zeros(values.shape[1])
        for S_j, V_j in zip(scores.split(Bc), values.split(Bc)):
            m, d, O = update(m, d, O, S_j, V_j)
        return m, d, O
    return call


MOVED_MISTAKES = {
    "that is the article's: six trips, but each carries one array or two, not all":
        lambda n, d, heads=1: 6 * (2 * n * n + n * d) * 2,
    "float16 has 2 bytes": lambda n, d, heads=1: 4 * heads * n * n + 4 * n * d,
    "each head has an S and a P of its own": lambda n, d, heads=1: (4 * n * n + 4 * n * d) * 2,
    "d is already that of all heads": lambda n, d, heads=1: 2 * heads * (4 * n * n + 4 * n * d),
    "S is written and read, and so is P: four times n^2":
        lambda n, d, heads=1: (2 * heads * n * n + 4 * n * d) * 2,
    "Q, K and V are read and O is written: four times n d":
        lambda n, d, heads=1: (4 * heads * n * n + 3 * n * d) * 2,
}
SAVING_MISTAKES = {
    "that is the article's: flash attention has to hold its result as well":
        lambda N, d, Br, Bc: N * N / (Br * Bc),
    "S and P are two": lambda N, d, Br, Bc: (
        (N * N + N * d) / (N * d + Br * Bc + Br * d + 5 * Br)),
    "standard attention holds its result too": lambda N, d, Br, Bc: (
        2 * N * N / (N * d + Br * Bc + Br * d + 5 * Br)),
    "the result of flash attention is missing": lambda N, d, Br, Bc: (
        (2 * N * N + N * d) / (Br * Bc + Br * d + 5 * Br)),
    "that is the limit, 2 N / d + 1, without the tile": lambda N, d, Br, Bc: 2 * N / d + 1,
}


def mistaken(**options):
    return lambda *inputs: right_update(*inputs, **options)


UPDATE_MISTAKES = {
    "the block's weights are exp(S_j - m_j), not yet divided": mistaken(normalise=True),
    "O so far belongs to the old m: multiply it by exp(m - m_new)": mistaken(old=False),
    "the block has its own maximum: multiply what it adds by exp(m_j - m_new)": mistaken(new=False),
    "O was divided by the old d: multiply it by d first": mistaken(denominator=False),
    "O has to leave divided by the new d": lambda m, d, O, S_j, V_j: (
        *right_update(m, d, O, S_j, V_j)[:2],
        right_update(m, d, O, S_j, V_j)[2] * right_update(m, d, O, S_j, V_j)[1]),
}
SCORES = torch.tensor([2.0, 1.0, 3.0, -1.0, 0.5, 4.0, 3.5, 6.0, 5.0, -2.0])
VALUES = torch.arange(20.0).reshape(10, 2) / 10
WHOLE = (6.0, torch.exp(SCORES - 6).sum().item(), torch.softmax(SCORES, 0) @ VALUES)
FALLING = SCORES.sort(descending=True).values  # the first block has the maximum
FALLEN = (6.0, WHOLE[1], torch.softmax(FALLING, 0) @ VALUES)

CASES = [
    Case("moved", (1024, 64), (4 * 1024**2 + 4 * 1024 * 64) * 2, MOVED_MISTAKES),
    Case("moved", (1024, 64, 8), (4 * 8 * 1024**2 + 4 * 1024 * 64) * 2, MOVED_MISTAKES),
    Case("moved", (65536, 64), (4 * 65536**2 + 4 * 65536 * 64) * 2, MOVED_MISTAKES),
    Case("saving", (4096, 64, 64, 64), right_saving(4096, 64, 64, 64), SAVING_MISTAKES),
    Case("saving", (16384, 64, 64, 64), right_saving(16384, 64, 64, 64), SAVING_MISTAKES),
    Case("saving", (512, 64, 512, 512), right_saving(512, 64, 512, 512), SAVING_MISTAKES),
    Case("update", (), WHOLE, UPDATE_MISTAKES, call=steps(SCORES, VALUES, 10),
         said="10 scores in one block"),
    Case("update", (), WHOLE, UPDATE_MISTAKES, call=steps(SCORES, VALUES, 3),
         said="10 scores in blocks of 3"),
    Case("update", (), FALLEN, UPDATE_MISTAKES, call=steps(FALLING, VALUES, 3),
         said="the same, the largest first"),
]
