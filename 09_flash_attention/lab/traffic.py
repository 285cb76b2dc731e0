"""What attention moves between the large memory (HBM, GM) and the chip: which array, in which step.

Each step is written as what it reads -> what it writes, and how often. `io_model.py` counts the
same on running code.
"""

import math
from dataclasses import dataclass

SQUARE = {"S", "P", "P_dropped", "dP", "dS"}  # N x N; m, l, L and D are columns, the others N x d

# The paper's Algorithm 0 and its derivative: each operator reads and writes whole arrays.
STANDARD = [
    ("S = Q K^T", "Q K -> S"),
    ("P = softmax(S)", "S -> P"),
    ("O = P V", "P V -> O"),
]
STANDARD_BACKWARD = [
    ("dV = P^T dO", "P dO -> dV"),
    ("dP = dO V^T", "dO V -> dP"),
    ("dS = P * (dP - D)", "P dP -> dS"),
    ("dQ = dS K", "dS K -> dQ"),
    ("dK = dS^T Q", "dS Q -> dK"),
]
# The same as GPT-2 trains: causal mask and dropout are operators too (the paper's Figure 2, v2).
GPT2 = [
    STANDARD[0],
    ("causal mask", "S -> S"),
    STANDARD[1],
    ("dropout", "P -> P_dropped mask"),
    ("O = P_dropped V", "P_dropped V -> O"),
    ("dV = P_dropped^T dO", "P_dropped dO -> dV"),
    STANDARD_BACKWARD[1],
    ("dropout, backward", "dP mask -> dP"),
    *STANDARD_BACKWARD[2:],
]


def steps(name, N, Br, Bc, backward):
    """Return [(times, step, "what it reads -> what it writes")] of one head."""
    by_rows, by_keys = math.ceil(N / (Br or N)), math.ceil(N / (Bc or N))
    if name == "standard":
        return [(1, *step) for step in (STANDARD_BACKWARD if backward else STANDARD)]
    if name == "FA1" and not backward:  # 2205.14135, Algorithm 1
        return [(1, "start", "-> O m l"), (1, "each K, V block", "K V ->"),
                (by_keys, "Q blocks for each K block", "Q O m l -> O m l")]
    if name == "FA1":  # 2205.14135, Algorithm 4
        return [(1, "start", "-> dQ dK dV"), (1, "each K, V block", "K V -> dK dV"),
                (by_keys, "Q blocks for each K block", "Q O dO dQ m l -> dQ")]
    if name == "FA2" and not backward:  # 2307.08691, Algorithm 1
        return [(1, "each Q block", "Q -> O"), (by_rows, "K, V blocks for each Q block", "K V ->")]
    if name == "FA2":  # 2307.08691, Algorithm 2
        return [(1, "D = rowsum(dO * O)", "dO O -> D"), (1, "each K, V block", "K V -> dK dV"),
                (by_keys, "Q blocks for each K block", "Q dO dQ L D -> dQ")]
    if name == "ours" and backward:  # flash_backward.py: dK and dV are summed in memory
        return [(1, "start", "-> dK dV"), (1, "each Q block", "Q O dO m l -> dQ"),
                (by_rows, "K, V blocks for each Q block", "K V dK dV -> dK dV"),
                (1, "dK * scale", "dK -> dK")]
    raise ValueError(f"name must be 'standard', 'FA1' or 'FA2', got {name!r}")


@dataclass
class Pass:
    """Elements of one array that one step moves, over the whole call and for one head."""

    step: str
    array: str
    read: float
    written: float


def traffic(name, N, d, Br=None, Bc=None, backward=False):
    """Return the Passes of 'standard', 'FA1' (keys outside) or 'FA2' (queries outside).

    N queries and keys, d columns of Q, K and V, Br x Bc tiles (None: N). In a product each operand
    of 'standard' counts once: its best case. backward: of the backward alone.
    """
    return moves(steps(name, N, Br, Bc, backward), N, d)


def moves(steps, N, d):
    """Return the Passes of [(times, step, "what it reads -> what it writes")]."""
    passes = []
    for times, step, arrays in steps:
        reads, writes = (side.split() for side in arrays.split("->"))
        for array in dict.fromkeys(reads + writes):
            size = times * elements(array, N, d)
            passes.append(Pass(step, array, size * (array in reads), size * (array in writes)))
    return passes


def elements(array, N, d):
    """Return how many elements an array has; a dropout mask of bytes counts half for float16."""
    if array == "mask":
        return N * N / 2
    return N * N if array in SQUARE else N if array in {"m", "l", "L", "D"} else N * d


def total(passes):
    """Return the elements that were read and written."""
    return sum(p.read + p.written for p in passes)


def flop(name, N, d, backward=False):
    """Return the FLOPs of the products of one head: 2 of N^2 d forward; 4 backward, with S 5."""
    products = (4 if name == "standard" else 5) if backward else 2
    return products * 2 * N * N * d


def on_chip(Br, Bc, d):
    """Return the elements that a tile needs on the chip: Q_block, O_block, S_block, K_block,
    V_block, and the columns m, m_new, correction, l.
    """
    return Br * (2 * d + Bc + 4) + Bc * 2 * d


def square_tile(M, d):
    """Return the largest power of two B for which a B x B tile fits into M elements.

    Raises ValueError where not even a 1 x 1 tile does.
    """
    if on_chip(1, 1, d) > M:
        raise ValueError(f"M must hold a 1 x 1 tile, {on_chip(1, 1, d)} elements at d = {d}, got "
                         f"{M}")
    return max(B for B in (2**i for i in range(40)) if on_chip(B, B, d) <= M)


def tallest_tile(M, d, Bc=64):
    """Return the most rows Br for which a Br x Bc tile fits into M elements."""
    return (M - Bc * 2 * d) // (2 * d + Bc + 4)
