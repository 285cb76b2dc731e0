"""Online softmax: take the scores one after another, and keep what is needed for the rest.

    python exercises/03_online_softmax.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/03_online_softmax.md, 中文:
lesson/zh/03_online_softmax.md. Solutions: solutions/.
"""

from check import Case, serve

import math

import torch


def step(m, l, score):
    """Take one more score into the softmax. Return the new m and the new l, two numbers.

    m: the largest score so far, -inf before the first. l: the sum of exp(s - m) over the scores s
    so far, 0 before the first.
    """
    raise NotImplementedError


def attend(scores, values, Bc):
    """Return sum(softmax(scores)_i * values_i) in one pass over pieces of Bc scores.

    scores [N], values [N, dv] -> [dv]. Keep m, l and O, and divide once, at the end.
    `scores.split(Bc)` gives the pieces.
    """
    raise NotImplementedError


def merge(first, second):
    """Merge two parts of one row. Each is (m, l, O), O not yet divided; return one such triple.

    m and l are numbers, O is [dv]. Two workers have each walked over half of the keys.
    """
    raise NotImplementedError


# What is checked, and what usual mistakes give


def walk(step, scores):
    m, l = -math.inf, 0.0
    for score in scores:
        m, l = step(m, l, score)
    return m, l


def summed(scores, values):
    """What one part holds: m, l and O."""
    m = max(scores)
    weights = [math.exp(s - m) for s in scores]
    return m, sum(weights), sum(w * torch.tensor(v) for w, v in zip(weights, values))


def attend_wrongly(correct_O=True, correct_l=True, divide_each=False):
    """Return an `attend` that forgets something."""
    def attend(scores, values, Bc):
        m, l, O = -math.inf, 0.0, 0.0
        for s, v in zip(scores.split(Bc), values.split(Bc)):
            m_new = max(m, s.max().item())
            correction = math.exp(m - m_new)
            P = torch.exp(s - m_new)
            l = (correction if correct_l else 1) * l + P.sum()
            O = (correction if correct_O else 1) * O + P @ v / (P.sum() if divide_each else 1)
            m = m_new
        return O if divide_each else O / l
    return attend


def last_m(scores, values, Bc):
    return torch.softmax(scores.split(Bc)[-1], 0) @ values.split(Bc)[-1]


SCORES = torch.tensor([2.0, 1.0, 3.0, -1.0, 0.5, 4.0, 3.5, 6.0, 5.0, -2.0])  # the maximum rises
VALUES = torch.arange(20.0).reshape(10, 2)
EXPECTED = torch.softmax(SCORES, 0) @ VALUES
NO_RESCALE = "the old l belongs to the old m: multiply it by exp(m - m_new)"
STEP_MISTAKES = {
    NO_RESCALE: lambda m, l, s: (max(m, s), l + math.exp(s - max(m, s))),
    "the correction is exp(m - m_new), not exp(m_new - m)":
        lambda m, l, s: (max(m, s), l * math.exp(max(m, s) - m) + math.exp(s - max(m, s))),
    "the new score's term is exp(score - m_new), with the new maximum":
        lambda m, l, s: (max(m, s), l * math.exp(m - max(m, s)) + math.exp(s - m)),
    "m has to stay where the new score is smaller": lambda m, l, s: (
        s, l * math.exp(m - s) + 1),
}
ATTEND_MISTAKES = {
    "O has to shrink with l: multiply it by the correction too": attend_wrongly(correct_O=False),
    "the old l belongs to the old m: multiply it by the correction":
        attend_wrongly(correct_l=False),
    "neither l nor O was corrected": attend_wrongly(False, False),
    "don't divide in each piece: O / l once, at the end": attend_wrongly(divide_each=True),
    "only the last piece counts here: what was summed before has to be kept": last_m,
    "divide by l at the end": lambda s, v, Bc: torch.exp(s - s.max()) @ v,
}
LEFT = summed([2.0, 1.0], [[1.0, 0.0], [0.0, 1.0]])
RIGHT = summed([3.0], [[5.0, 5.0]])
BOTH = summed([2.0, 1.0, 3.0], [[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
NOTHING = (-math.inf, 0.0, torch.zeros(2))
MERGE_MISTAKES = {
    "the part with the smaller m has to be multiplied by exp(its m - the larger m)":
        lambda a, b: (max(a[0], b[0]), a[1] + b[1], a[2] + b[2]),
    "O has to be multiplied by the same factor as l": lambda a, b: (
        BOTH[0], BOTH[1], a[2] + b[2]),
    "O is not yet divided by l, and must not be here": lambda a, b: (*BOTH[:2], BOTH[2] / BOTH[1]),
}

CASES = [
    Case("step", (-math.inf, 0.0, 2.0), (2.0, 1.0), STEP_MISTAKES),
    Case("step", (2.0, 1.0, 1.0), (2.0, 1 + math.exp(-1)), STEP_MISTAKES),
    Case("step", (2.0, 1 + math.exp(-1), 3.0), (3.0, 1 + math.exp(-1) + math.exp(-2)),
         STEP_MISTAKES),
    Case("step", ([1000.0, 999.0, 998.0],), (1000.0, 1 + math.exp(-1) + math.exp(-2)),
         {NO_RESCALE: STEP_MISTAKES[NO_RESCALE]}, call=walk, said="1000, then 999, then 998"),
    Case("attend", (SCORES, VALUES, 10), EXPECTED, ATTEND_MISTAKES, said="10 scores, Bc=10"),
    Case("attend", (SCORES, VALUES, 1), EXPECTED, ATTEND_MISTAKES, said="10 scores, Bc=1"),
    Case("attend", (SCORES, VALUES, 4), EXPECTED, ATTEND_MISTAKES, said="10 scores, Bc=4"),
    Case("attend", (SCORES + 1000, VALUES, 4), EXPECTED, ATTEND_MISTAKES,
         said="the same scores + 1000"),
    Case("merge", (LEFT, RIGHT), BOTH, MERGE_MISTAKES),
    Case("merge", (RIGHT, LEFT), BOTH, MERGE_MISTAKES),
    Case("merge", (LEFT, NOTHING), LEFT, MERGE_MISTAKES, said="a part, and one that saw no key"),
]

if __name__ == "__main__":
    serve(globals())
