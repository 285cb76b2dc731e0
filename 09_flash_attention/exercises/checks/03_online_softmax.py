"""What exercises/03_online_softmax.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import math

import torch
from watch import SOFTMAX, Refusal, Watch


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


def step_with(old, new):
    """Return a `step` with these factors of l and term of the score, functions of m, m_new, s."""
    def step(m, l, score):
        m_new = max(m, score)
        return m_new, l * old(m, m_new, score) + new(m, m_new, score)
    return step


def corrected(m, m_new, score):
    return math.exp(m - m_new)


def term(m, m_new, score):
    return math.exp(score - m_new)


def attend_with(start=-torch.inf, correct_O=True, correct_l=True, divide="end", highest=max,
                keep_m=True, minus_m=True):
    """Return an `attend` that may forget something."""
    def attend(scores, values, Bc):
        m, l, O = torch.tensor(start), 0.0, 0.0
        for s, v in zip(scores.split(Bc), values.split(Bc)):
            m_new = highest(m, s.max())
            correction, P = torch.exp(m - m_new), torch.exp(s - m_new * minus_m)
            l = (correction if correct_l else 1) * l + P.sum()
            O = (correction if correct_O else 1) * O + P @ v / (P.sum() if divide == "each" else 1)
            m = m_new if keep_m else m
        return O / l if divide == "end" else O
    return attend


def in_pieces(attend, scores, values, Bc):
    """Refuse a softmax, and an exp or a maximum of more than a piece of the scores."""
    def note(operator, tensors, made):
        if operator in SOFTMAX:
            raise Refusal("no softmax here: keep m, l and O from piece to piece")
        if operator in ("exp", "max", "amax") and tensors[0].numel() > Bc:
            raise Refusal(f"{operator} takes {tensors[0].numel()} numbers: a piece has {Bc}, and "
                          "the scores after it are not known yet")

    with Watch(note):
        return attend(scores, values, Bc)


def merge_with(factor=lambda a, b, m: math.exp(a - m), on_l=True, on_O=True, divide=False):
    """Return a `merge` with factor(its own m, the other's m, the larger m) for each part."""
    def merge(a, b):
        m = max(a[0], b[0])
        factors = factor(a[0], b[0], m), factor(b[0], a[0], m)
        l, O = (sum((f if on else 1) * part[n] for f, part in zip(factors, (a, b)))
                for n, on in ((1, on_l), (2, on_O)))
        return m, l, O / l if divide else O
    return merge


SCORES = torch.tensor([2.0, 1.0, 3.0, -1.0, 0.5, 4.0, 3.5, 6.0, 5.0, -2.0])  # the maximum rises
VALUES = torch.arange(20.0).reshape(10, 2)
FALLING = torch.linspace(200, -200, 10)
NO_RESCALE = "the old l belongs to the old m: multiply it by exp(m - m_new)"
NEW_TERM = "the new score's term is exp(score - m_new), with the new maximum"
STEP_MISTAKES = {
    "m comes first, then l": lambda m, l, s: step_with(corrected, term)(m, l, s)[::-1],
    "the new score has a term of its own: add exp(score - m_new)": step_with(
        corrected, lambda m, m_new, s: 0),
    "exp(score) overflows: the new score's term is exp(score - m_new)": step_with(
        corrected, lambda m, m_new, s: math.exp(s)),
    NO_RESCALE: step_with(lambda m, m_new, s: 1, term),
    "only the old l gets the correction: the new score's term has m_new already": step_with(
        corrected, lambda m, m_new, s: math.exp(m - m_new) * math.exp(s - m_new)),
    "the correction is exp(m - m_new), not exp(m_new - m)": step_with(
        lambda m, m_new, s: math.exp(m_new - m), term),
    NEW_TERM: step_with(corrected, lambda m, m_new, s: math.exp(s - m)),
    "m has to stay where the new score is smaller": lambda m, l, s: (
        s, l * math.exp(m - s) + 1),
}
ATTEND_MISTAKES = {
    "only the last piece counts here: where m is not set to m_new at the end of the loop, it stays "
    "-inf and the correction is 0": attend_with(keep_m=False),
    "O has to shrink with l: multiply it by the correction too": attend_with(correct_O=False),
    "the old l belongs to the old m: multiply it by the correction": attend_with(correct_l=False),
    "neither l nor O was corrected": attend_with(correct_O=False, correct_l=False),
    "don't divide in each piece: O / l once, at the end": attend_with(divide="each"),
    "a piece's weights are exp(s - m_new)": attend_with(minus_m=False),
    "divide by l at the end": attend_with(divide="never"),
}
HIGH = {"exp overflows: take m_new off the scores first": attend_with(highest=lambda m, s: s * 0)}
LOW = {"m has to start at -inf: 0 is above all of these scores, and each exp vanishes":
       attend_with(start=0.0)}
LOWER = {"m_new is the larger of m and the piece's maximum: where a later piece is lower, "
         "exp(m - m_new) overflows": attend_with(highest=lambda m, highest: highest)}
LEFT = summed([2.0, 1.0], [[1.0, 0.0], [0.0, 1.0]])
RIGHT = summed([3.0], [[5.0, 5.0]])
BOTH = summed([2.0, 1.0, 3.0], [[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]])
NOTHING = (-math.inf, 0.0, torch.zeros(2))
MERGE_MISTAKES = {
    "the part with the smaller m has to be multiplied by exp(its m - the larger m)":
        merge_with(on_l=False, on_O=False),
    "O has to be multiplied by the same factor as l": merge_with(on_O=False),
    "l has to be multiplied by the same factor as O": merge_with(on_l=False),
    "a factor is exp(its m - the larger m), not the other way round":
        merge_with(lambda a, b, m: math.exp(m - a)),
    "each part takes its own m into its factor, not the other part's":
        merge_with(lambda a, b, m: math.exp(b - m)),
    "O is not yet divided by l, and must not be here": merge_with(divide=True),
}


def attend_case(scores, Bc, said, mistakes=ATTEND_MISTAKES):
    return Case("attend", (scores, VALUES, Bc), torch.softmax(scores, 0) @ VALUES, mistakes,
                call=in_pieces, said=f"{said}, Bc={Bc}")


CASES = [
    Case("step", (2.0, 1.0, 1.0), (2.0, 1 + math.exp(-1)), STEP_MISTAKES),
    Case("step", (2.0, 1 + math.exp(-1), 3.0), (3.0, 1 + math.exp(-1) + math.exp(-2)),
         STEP_MISTAKES),
    Case("step", (-math.inf, 0.0, 2.0), (2.0, 1.0), STEP_MISTAKES),
    Case("step", ([1000.0, 999.0, 998.0],), (1000.0, 1 + math.exp(-1) + math.exp(-2)),
         {NO_RESCALE: STEP_MISTAKES[NO_RESCALE]}, call=walk, said="1000, then 999, then 998"),
    attend_case(SCORES, 10, "10 scores"),
    attend_case(SCORES, 1, "10 scores"),
    attend_case(SCORES, 4, "10 scores"),
    attend_case(SCORES + 1000, 4, "the same scores + 1000", HIGH),
    attend_case(SCORES - 1000, 4, "the same scores - 1000", LOW),
    attend_case(FALLING, 4, "10 scores that fall from 200 to -200", LOWER),
    Case("merge", (LEFT, RIGHT), BOTH, MERGE_MISTAKES),
    Case("merge", (RIGHT, LEFT), BOTH, MERGE_MISTAKES),
    Case("merge", (LEFT, NOTHING), LEFT, MERGE_MISTAKES, said="a part, and one that saw no key"),
]
