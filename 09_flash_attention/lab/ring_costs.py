"""What attention over several devices moves, by formula, and the links of servers as data."""

import math
from dataclasses import dataclass

from lab.machines import CHIPS


def sizes(case, ranks):
    """Return the elements of a rank's Q, K, V and O."""
    shapes = [*case.shapes, (*case.shapes[0][:-1], case.shapes[2][-1])]
    return [math.prod(shape) // ranks for shape in shapes]


def ring_bytes(case, ranks):
    """Return the bytes that a rank sends in a forward and in a backward.

    K and V go P - 1 hops, in the backward once more; dK and dV go all P hops, home, and are float32
    at least. One rank sends nothing.
    """
    _, K, V, _ = sizes(case, ranks)
    forward = (ranks - 1) * (K + V) * case.dtype.itemsize
    home = ranks * (K + V) * max(4, case.dtype.itemsize)
    return (forward, forward + home) if ranks > 1 else (0, 0)


def ulysses_bytes(case, ranks):
    """Return the bytes that a rank sends in a forward and in a backward: of Q, K, V and O all but
    its own part, and of their gradients.
    """
    sent = sum(sizes(case, ranks)) * case.dtype.itemsize * (ranks - 1) // ranks
    return sent, sent


@dataclass(frozen=True)
class Links:
    """What connects the devices of a server; bytes/s, one way: to the neighbour that a ring sends
    to, and to all others together.
    """

    name: str
    chip: str
    one: float
    all: float
    source: str


LINKS = (
    Links("A100, NVLink", "A100-80GB", 300e9, 300e9,
          "NVIDIA: 12 links, 600 GB/s both ways; through switches"),
    Links("910B3, HCCS", "910B3", 28e9, 196e9,
          "agent-skills, shmem-ops-design: 7 links of 28 GB/s, one to each other card"),
)


def least_rows(links, backward=False, causal=False, G=1, width=2):
    """Return the rows a rank from which on computing a block takes as long as sending one.

    Heads and d cancel: a block of n rows costs 4 n^2 d FLOP a head, 10 n^2 d in a backward (two and
    five products), and moves 2 n d elements a key/value head, in a backward 2 n d in float32 more.
    Zigzag keeps half of the pairs. G: query heads a key/value head. The chip computes at its peak.
    Source: Ring Attention (arXiv 2310.01889): a block has at least FLOP/s over bytes/s rows.
    """
    bytes_a_row = 2 * width + 2 * 4 * backward
    flop = (10 if backward else 4) / (2 if causal else 1) * G
    return bytes_a_row * CHIPS[links.chip].peak / (flop * links.one)


def seconds(links, N, heads, d, ranks, width=2):
    """Return the seconds of a causal forward on so many devices: of computing at the peak, and of
    sending round the ring and in Ulysses' exchanges. Q, K, V and O have `heads` heads.
    """
    size = N // ranks * heads * d * width  # bytes of a rank's Q, K, V or O
    computing = 2 * N**2 * heads * d / ranks / CHIPS[links.chip].peak
    return computing, 2 * (ranks - 1) * size / links.one, 4 * (ranks - 1) / ranks * size / links.all
