"""What exercises/16_devices.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import torch


def in_pieces(rank, ranks, N, order):
    size = N // (2 * ranks)
    return [i for piece in order(rank, ranks) for i in range(piece * size, (piece + 1) * size)]


def zigzag(rank, ranks, N):
    return in_pieces(rank, ranks, N, lambda r, P: (r, 2 * P - 1 - r))


def part_of(scores, values):
    """What a block of keys gives: O, m and l."""
    m = scores.amax(1)
    P = torch.exp(scores - m[:, None])
    return P @ values / P.sum(1, keepdim=True), m, P.sum(1)


def merge(first, second, on_O=True, times_l=True, divide=True, largest=True):
    """Merges two parts, and can forget something."""
    m = torch.maximum(first[1], second[1]) if largest else second[1]
    factors = [torch.exp(part[1] - m) for part in (first, second)]
    l = sum(factor * part[2] for factor, part in zip(factors, (first, second)))
    weights = [(factor if on_O else 1) * (part[2] if times_l else 1)
               for factor, part in zip(factors, (first, second))]
    O = sum(weight[:, None] * part[0] for weight, part in zip(weights, (first, second)))
    return O / l[:, None] if divide else O, m, l


def sent(hops=1, home=0, width=4, both=2):
    """Return a `bytes_sent`; hops, home: less than P that K and V, dK and dV go."""
    def count(P, n, kv_heads, d, e):
        size = both * n * kv_heads * d
        return (P - hops) * size * e, (P - hops) * size * e + (P - home) * size * (width or e)
    return count


def no_m(first, second):
    l = first[2] + second[2]
    O = first[2][:, None] * first[0] + second[2][:, None] * second[0]
    return O / l[:, None], torch.maximum(first[1], second[1]), l


generator = torch.Generator().manual_seed(0)
S, V = 3 * torch.randn(4, 6, generator=generator), torch.randn(6, 2, generator=generator)
LEFT, RIGHT, ALL = part_of(S[:, :3], V[:3]), part_of(S[:, 3:], V[3:]), part_of(S, V)
NOTHING = torch.zeros(4, 2), torch.full((4,), -torch.inf), torch.zeros(4)
ORDER = {
    "this is the plain order: one piece from the front, one from the end": lambda r, P, N: list(
        range(r * N // P, (r + 1) * N // P)),
    "the second piece is as far from the end as the first is from the front":
        lambda r, P, N: in_pieces(r, P, N, lambda r, P: (r, P + r)),
    "there are 2 * ranks pieces, numbered from 0: the last is 2 * ranks - 1":
        lambda r, P, N: in_pieces(r, P, N, lambda r, P: (r, 2 * P - r)),
    "earlier rows first": lambda r, P, N: in_pieces(r, P, N, lambda r, P: (2 * P - 1 - r, r)),
    "a piece is in one piece: its rows are neighbours": lambda r, P, N: list(range(r, N, P)),
}
MERGE = {
    "the parts have different m: multiply by exp(its m - the larger m)": no_m,
    "O of a part is divided by its l: multiply by it before you add":
        lambda a, b: merge(a, b, times_l=False),
    "O has to be multiplied by exp(its m - the larger m), as l is":
        lambda a, b: merge(a, b, on_O=False),
    "divide O by the new l": lambda a, b: merge(a, b, divide=False),
    "m is the larger of the two": lambda a, b: merge(a, b, largest=False),
}
BYTES = {
    "K and V make P - 1 hops: from the last rank they need not go on": sent(hops=0),
    "dK and dV make P hops: one more takes them home": sent(home=1),
    "dK and dV are float32: 4 bytes, whatever e is": sent(width=0),
    "both K and V are sent": sent(both=1),
    "the backward sends K and V once more": lambda *shape: (
        sent()(*shape)[0], sent()(*shape)[1] - sent()(*shape)[0]),
}

CASES = [
    *(Case("positions", (rank, ranks, N), zigzag(rank, ranks, N), ORDER)
      for rank, ranks, N in ((0, 4, 8), (3, 4, 8), (1, 4, 16), (0, 1, 4))),
    Case("merge_hop", (LEFT, RIGHT), ALL, MERGE, said="4 rows, 3 keys and 3 more"),
    Case("merge_hop", (RIGHT, LEFT), ALL, MERGE, said="the same the other way round"),
    Case("merge_hop", (ALL, NOTHING), ALL, MERGE, said="4 rows, and a block that no row may see"),
    Case("bytes_sent", (2, 1, 1, 1, 4), (8, 24), BYTES),
    Case("bytes_sent", (4, 1024, 4, 64, 2), (6 * 2**19, 6 * 2**19 + 16 * 2**19), BYTES),
]
