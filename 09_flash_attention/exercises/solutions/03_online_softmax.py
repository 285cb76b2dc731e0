"""A solution of exercises/03_online_softmax.py."""

import math

import torch


def step(m, l, score):
    m_new = max(m, score)
    return m_new, l * math.exp(m - m_new) + math.exp(score - m_new)


def attend(scores, values, Bc):
    m, l, O = torch.tensor(-math.inf), 0.0, 0.0
    for s, v in zip(scores.split(Bc), values.split(Bc)):  # [Bc], [Bc, dv]
        m_new = torch.maximum(m, s.max())
        correction = torch.exp(m - m_new)
        P = torch.exp(s - m_new)  # [Bc]
        l = correction * l + P.sum()
        O = correction * O + P @ v  # [dv]
        m = m_new
    return O / l


def merge(first, second):
    m = max(first[0], second[0])
    weights = [math.exp(part[0] - m) for part in (first, second)]
    l = sum(w * part[1] for w, part in zip(weights, (first, second)))
    O = sum(w * part[2] for w, part in zip(weights, (first, second)))
    return m, l, O
