"""A solution of exercises/06_io.py."""

import math


def standard_traffic(N, d):
    scores = 2 * N * d + N * N  # Q and K in, S out
    softmax = 2 * N * N  # S in, P out
    output = N * N + 2 * N * d  # P and V in, O out
    return scores + softmax + output


def loop_traffic(N, d, Br, Bc, outside):
    matrix = N * d
    if outside == "Q":  # Q in and O out once; K and V in for each block of queries
        return 2 * matrix + 2 * matrix * math.ceil(N / Br)
    # O out, K and V in once; Q and O in, O out for each block of keys
    return 3 * matrix + 3 * matrix * math.ceil(N / Bc)


def roofline(flop, moved, peak, bandwidth):
    products, memory = flop / peak, moved / bandwidth
    return max(products, memory), "products" if products >= memory else "memory"
