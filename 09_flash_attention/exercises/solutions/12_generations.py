"""A solution of exercises/12_generations.py."""

import math

import torch


def finished_step(m, l, O, scores, values):
    m_new = max(m, scores.max().item())
    old = l * math.exp(m - m_new)
    P = torch.exp(scores - m_new)  # [Bc]
    l_new = old + P.sum().item()
    return m_new, l_new, (old * O + P @ values) / l_new


def lazy_step(m, l, O, scores, values, tau):
    highest = scores.max().item()
    if highest - m > tau:
        correction = 2 ** (m - highest)
        m, l, O = highest, l * correction, O * correction
    P = torch.exp2(scores - m)  # [Bc]
    return m, l + P.sum().item(), O + P @ values


def step_time(stages):
    busy = {}
    for unit, time in stages:
        busy[unit] = busy.get(unit, 0) + time
    return sum(busy.values()), max(busy.values())
