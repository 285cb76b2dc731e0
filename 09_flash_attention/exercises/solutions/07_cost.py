"""A solution of exercises/07_cost.py."""

import math


def launches(N, Br, Bc):
    Tr, Tc = math.ceil(N / Br), math.ceil(N / Bc)
    return 14 * Tr * Tc + 7 * Tr


def smallest_tile(N, d, call, rate):
    products = 4 * N * N * d / rate  # seconds
    B = 1
    while B <= N:
        if launches(N, B, B) * call <= products:
            return B
        B *= 2
    return None


def exponent(lengths, seconds):
    x, y = ([math.log(v) for v in values] for values in (lengths, seconds))
    mean_x, mean_y = (sum(z) / len(z) for z in (x, y))
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y))
    return covariance / sum((a - mean_x) ** 2 for a in x)
