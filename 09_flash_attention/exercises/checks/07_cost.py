"""What exercises/07_cost.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import math


def calls(N, Br, Bc, up=math.ceil):
    Tr, Tc = up(N / Br), up(N / Bc)
    return 14 * Tr * Tc + 7 * Tr


def fitting(N, d, call, rate, products=2):
    """The tiles whose calls take no longer than the products."""
    time = products * 2 * N * N * d / rate
    return [2**i for i in range(N.bit_length()) if calls(N, 2**i, 2**i) * call <= time]


def slope(x, y, centred=True):
    mean_x, mean_y = (sum(z) / len(z) if centred else 0 for z in (x, y))
    return (sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y))
            / sum((a - mean_x) ** 2 for a in x))


def logs(values):
    return [math.log(v) for v in values]


LAUNCHES = {
    "the last block may be shorter, and is a block too: round up":
        lambda N, Br, Bc: calls(N, Br, Bc, math.floor),
    "each block of queries adds 7 calls": lambda N, Br, Bc: calls(N, Br, Bc) - 7 * -(-N // Br),
    "the 7 calls come once for each block of queries, not for each tile":
        lambda N, Br, Bc: 21 * -(-N // Br) * -(-N // Bc),
    "the 7 calls belong to the blocks of queries, and these have Br rows":
        lambda N, Br, Bc: calls(N, Bc, Br),
    "a tile is one block of queries and one of keys: there are Tr * Tc tiles, not Tr + Tc":
        lambda N, Br, Bc: 14 * (-(-N // Br) + -(-N // Bc)) + 7 * -(-N // Br),
}
TILES = {
    "there are two products, of 2 N^2 d FLOPs each":
        lambda *sizes: min(fitting(*sizes, products=1), default=None),
    "the smallest such tile is asked for, not the largest":
        lambda *sizes: max(fitting(*sizes), default=None),
    "where a single tile still takes longer for its calls, there is none: return None":
        lambda N, *rest: min(fitting(N, *rest), default=N),
    "with this tile the calls still take longer": lambda *sizes: (
        min(fitting(*sizes)) // 2 if fitting(*sizes) else 1),
    "the calls take launches(N, B, B) * call seconds, and not 14 calls for each block of queries":
        lambda N, d, call, rate: next((2**i for i in range(N.bit_length()) if 14 * math.ceil(
            N / 2**i) * call <= 4 * N * N * d / rate), None),
}
GROWTH = {
    "take the logarithm of both: a power of N is a line then": lambda N, s: slope(N, s),
    "take the logarithm of the lengths too": lambda N, s: slope(N, logs(s)),
    "take the logarithm of the seconds too": lambda N, s: slope(logs(N), s),
    "y is the time and x the length: sum(x y) / sum(x x)": lambda N, s: slope(logs(s), logs(N)),
    "take the mean off both logarithms first": lambda N, s: slope(logs(N), logs(s), False),
    "all points count, not the first and the last alone":
        lambda N, s: math.log(s[-1] / s[0]) / math.log(N[-1] / N[0]),
}

CASES = [
    Case("launches", (2048, 64, 64), 14560, LAUNCHES),
    Case("launches", (2048, 1024, 512), 126, LAUNCHES),
    Case("launches", (1000, 128, 64), 1848, LAUNCHES),
    Case("smallest_tile", (2048, 64, 5e-6, 180e9), 256, TILES,
         said="N=2048, d=64, 5 us a call, 0.18 TFLOP/s: a CPU"),
    Case("smallest_tile", (65536, 128, 25e-6, 294.9e12), 16384, TILES,
         said="N=65536, d=128, 25 us a call, 294.9 TFLOP/s: a 910B3"),
    Case("smallest_tile", (2048, 64, 25e-6, 294.9e12), None, TILES,
         said="N=2048, d=64, 25 us a call, 294.9 TFLOP/s: a 910B3"),
    Case("exponent", ([512, 1024, 2048], [1.0, 4.0, 16.0]), 2.0, GROWTH),
    Case("exponent", ([512, 1024, 4096], [0.02, 0.04, 0.16]), 1.0, GROWTH),
    Case("exponent", ([512, 1024, 2048, 4096], [5.0, 21.0, 80.0, 310.0]), 1.979220, GROWTH),
]
