"""What exercises/06_io.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import math


def blocks(N, rows):
    return math.ceil(N / rows)


def queries_outside(N, d, Br, Bc):
    return 2 * N * d + 2 * N * d * blocks(N, Br)


def keys_outside(N, d, Br, Bc):
    return 3 * N * d + 3 * N * d * blocks(N, Bc)


def order(queries, keys):
    """Return a `loop_traffic` of these two; None takes the right one."""
    def loop_traffic(N, d, Br, Bc, outside):
        chosen = queries or queries_outside if outside == "Q" else keys or keys_outside
        return chosen(N, d, Br, Bc)
    return loop_traffic


def times(flop, moved, peak, bandwidth):
    return {"products": flop / peak, "memory": moved / bandwidth}


def slowest(flop, moved, peak, bandwidth):
    taken = times(flop, moved, peak, bandwidth)
    decides = max(taken, key=taken.get)
    return taken[decides], decides


def fastest(*sizes):
    return min(times(*sizes).values()), slowest(*sizes)[1]


def exchanged(*sizes):
    return slowest(*sizes)[0], "memory" if slowest(*sizes)[1] == "products" else "products"


STANDARD = {
    "the six trips differ in size: S and P move twice each, Q, K, V and O once":
        lambda N, d: 6 * (2 * N * N + N * d),
    "S and P are written, and read again by the next operator: four N x N in all":
        lambda N, d: 2 * N * N + 4 * N * d,
    "Q, K, V and O move as well: N d numbers each": lambda N, d: 4 * N * N,
    "the softmax reads S, and the second product reads P: each is written and read":
        lambda N, d: 3 * N * N + 4 * N * d,
    "numbers are asked for, not bytes of float16": lambda N, d: 2 * (4 * N * N + 4 * N * d),
    "numbers are asked for, not bytes of float32": lambda N, d: 4 * (4 * N * N + 4 * N * d),
    "O is written too": lambda N, d: 4 * N * N + 3 * N * d,
    "these are FLOPs, not numbers moved": lambda N, d: 4 * N * N * d,
}
LOOP = {
    "the last block may be shorter, and is a block too: round up": lambda N, d, Br, Bc, outside: (
        2 * N * d + 2 * N * d * (N // Br) if outside == "Q" else
        3 * N * d + 3 * N * d * (N // Bc)),
    "with the queries outside K and V pass once for each block of queries: N / Br times":
        order(lambda N, d, Br, Bc: queries_outside(N, d, Bc, Br), None),
    "K and V are two arrays: both pass":
        order(lambda N, d, Br, Bc: 2 * N * d + N * d * blocks(N, Br), None),
    "Q is read once and O written once, beside what passes":
        order(lambda N, d, Br, Bc: 2 * N * d * blocks(N, Br), None),
    "with the queries outside a block of O stays on the chip until it is done":
        order(lambda N, d, Br, Bc: N * d + 3 * N * d * blocks(N, Br), None),
    "with the keys outside Q and O pass once for each block of keys: N / Bc times":
        order(None, lambda N, d, Br, Bc: keys_outside(N, d, Bc, Br)),
    "with the keys outside O is read and written for each block of keys":
        order(None, lambda N, d, Br, Bc: 3 * N * d + 2 * N * d * blocks(N, Bc)),
    "each block of K and V is read once, beside what passes":
        order(None, lambda N, d, Br, Bc: N * d + 3 * N * d * blocks(N, Bc)),
    "numbers are asked for, not bytes of float16": lambda *sizes: 2 * order(None, None)(*sizes),
    "numbers are asked for, not bytes of float32": lambda *sizes: 4 * order(None, None)(*sizes),
    "O is written once with zeros before the keys' loop begins":
        order(None, lambda N, d, Br, Bc: 2 * N * d + 3 * N * d * blocks(N, Bc)),
}
ROOF = {
    "both go on at the same time: the longer one counts, not the sum":
        lambda *sizes: (sum(times(*sizes).values()), slowest(*sizes)[1]),
    "the slower one decides, not the faster": fastest,
    "what takes longer decides": exchanged,
    "a time is a number over a number a second": lambda flop, moved, peak, bandwidth: slowest(
        peak, bandwidth, flop, moved),
    "the bytes go through the bandwidth, the FLOPs through the peak":
        lambda flop, moved, peak, bandwidth: slowest(flop, moved, bandwidth, peak),
}
A100 = (312e12, 1.555e12)
N, d, HEADS = 65536, 64, 2048
WORK, CACHE = 4 * N * N * d, HEADS * 4096 * d

CASES = [
    Case("standard_traffic", (1024, 64), 4456448, STANDARD),
    Case("standard_traffic", (512, 128), 1310720, STANDARD),
    Case("loop_traffic", (512, 64, 32, 16, "Q"), 1114112, LOOP),
    Case("loop_traffic", (512, 64, 32, 16, "K"), 3244032, LOOP),
    Case("loop_traffic", (1000, 64, 128, 96, "Q"), 1152000, LOOP),
    Case("loop_traffic", (1000, 64, 128, 96, "K"), 2304000, LOOP),
    Case("roofline", (100, 20, 10, 5), (10.0, "products"), ROOF),
    Case("roofline", (WORK, 2 * (4 * N * N + 4 * N * d), *A100), (0.02211796, "memory"), ROOF,
         said="standard attention, N = 65536, d = 64, float16, A100"),
    Case("roofline", (WORK, 2 * queries_outside(N, d, 440, 64), *A100), (0.003524072, "products"),
         ROOF, said="queries outside, Br = 440, the same"),
    Case("roofline", (4 * CACHE, 4 * CACHE, *A100), (0.001381018, "memory"), ROOF,
         said=f"{HEADS} heads of one query and 4096 keys, K and V in float16, the same"),
]
