"""What exercises/12_generations.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import math

import torch


def walk(step, scores, values, Bc, *options):
    """Take blocks of Bc keys; return what the last step returns."""
    state = -math.inf, 0.0, torch.zeros(values.shape[1])
    for block in zip(scores.split(Bc), values.split(Bc)):
        state = step(*state, *block, *options)
    return state


def divided(step, scores, values, Bc, *options):
    """Return O / l after the last step."""
    _, l, O = walk(step, scores, values, Bc, *options)
    return O / l


def finish(m, l, O, scores, values, *, l_old=True, numerators=True, divide=True, correct=True):
    """Return FlashAttention-1's step, or one that forgets something."""
    m_new = max(m, scores.max().item())
    correction, P = (math.exp(m - m_new) if correct else 1.0), torch.exp(scores - m_new)
    l_new = correction * l + P.sum().item()
    part = P if numerators else P / P.sum()
    O_new = (l if l_old else 1.0) * correction * O + part @ values
    return m_new, l_new, O_new / l_new if divide else O_new


def lazy(m, l, O, scores, values, tau, *, keep=True, rescale_l=True, rescale_O=True):
    """Return FlashAttention-4's step, or one with a mistake."""
    highest = max(m, scores.max().item())
    m_new = highest if highest - m > tau or not keep else m
    correction, P = 2 ** (m - m_new), torch.exp2(scores - m_new)
    return (m_new, (correction if rescale_l else 1.0) * l + P.sum().item(),
            (correction if rescale_O else 1.0) * O + P @ values)


def mistaken(step, **options):
    return lambda *arguments: step(*arguments, **options)


SCORES = torch.tensor([2.0, 1.0, 3.0, -1.0, 0.5, 4.0, 3.5, 16.0, 5.0, -2.0])  # the maximum rises
VALUES = torch.arange(20.0).reshape(10, 2)
FINISHED = {
    "O is divided already: multiply it by the old l first": mistaken(finish, l_old=False),
    "the new block's part is exp(S - m_new), not yet divided": mistaken(finish, numerators=False),
    "divide by the new l: O is a finished output after each step": mistaken(finish, divide=False),
    "the old l and the old O belong to the old m": mistaken(finish, correct=False),
}
LAZY = {
    "m has to stay where the maximum grows by tau or less": mistaken(lazy, keep=False),
    "l has to be rescaled with O": mistaken(lazy, rescale_l=False),
    "O has to be rescaled with l": mistaken(lazy, rescale_O=False),
    "powers of 2: take 2^x for P and for the correction": lambda m, l, O, s, v, tau: (
        lazy(m, l, O, s, v, tau)[0], *finish(m, l, O, s, v, l_old=False, divide=False)[1:]),
}
TURNS = {
    "a unit has all its stages to do: add them up for each unit": lambda stages: (
        sum(t for _, t in stages), max(t for _, t in stages)),
    "the units need not be equally busy: the busier one sets the time": lambda stages: (
        sum(t for _, t in stages), sum(t for _, t in stages) / 2),
}


def in_powers_of_2(scores, values):
    return torch.softmax(scores * math.log(2), 0) @ values


def finished_case(n, Bc):
    scores, values = SCORES[:n], VALUES[:n]
    m = scores.max()
    expected = m, torch.exp(scores - m).sum(), torch.softmax(scores, 0) @ values
    return Case("finished_step", (scores, values, Bc), expected, FINISHED, call=walk,
                said=f"the first {n} scores, {Bc} a step")


def lazy_case(m, l, O, score, tau, expected):
    return Case("lazy_step", (m, l, torch.tensor([O]), torch.tensor([score]), torch.tensor([[1.0]]),
                              tau), (*expected[:2], torch.tensor([expected[2]])), LAZY,
                said=f"m={m}, l={l}, O=[{O}], scores=[{score}], values=[[1.0]], tau={tau}")


ON_910B2 = [("cube", 2487), ("vector", 2489), ("cube", 1617), ("vector", 834)]

CASES = [
    finished_case(4, 4),
    finished_case(4, 2),
    finished_case(10, 3),
    lazy_case(-math.inf, 0.0, 0.0, 3.0, 8, (3.0, 1.0, 1.0)),
    lazy_case(3.0, 1.0, 2.0, 5.0, 8, (3.0, 5.0, 6.0)),
    lazy_case(3.0, 1.0, 2.0, 5.0, 1, (5.0, 1.25, 1.5)),
    lazy_case(3.0, 4.0, 2.0, 11.0, 8, (3.0, 260.0, 258.0)),
    *(Case("lazy_step", (SCORES, VALUES, 2, tau), in_powers_of_2(SCORES, VALUES), LAZY,
           call=divided, said=f"10 scores, 2 a step, tau={tau}, then O / l") for tau in (0, 8)),
    Case("step_time", (ON_910B2,), (7427, 4104), TURNS, said="the stages of a 910B2, in cycles"),
    Case("step_time", ([("cube", 1.0), ("vector", 5.0), ("cube", 2.0)],), (8.0, 5.0), TURNS),
]
