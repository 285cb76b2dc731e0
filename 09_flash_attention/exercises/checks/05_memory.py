"""What exercises/05_memory.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

import torch
from common.memory import measure_peak


def running(events):
    """What is held after each event, from nothing on."""
    held = [0]
    for event in events:
        held.append(held[-1] + event)
    return held


def matrices(attend, Q, K, V):
    """Say how many N x N matrices a call held at its peak."""
    peak = measure_peak(lambda: attend(Q, K, V), torch.device("cpu")).total
    count = round(peak / (4 * len(Q) ** 2))
    return f"{count} N x N matri{'x' if count == 1 else 'ces'} at the peak"


def plain(Q, K, V):
    S = Q @ K.T / Q.shape[1] ** 0.5
    return torch.softmax(S, 1) @ V


def in_place(Q, K, V, scale=True, divide=True):
    """Attention in one matrix that may forget something."""
    S = Q @ K.T
    S.div_(Q.shape[1] ** 0.5 if scale else 1)
    S.sub_(S.amax(1, keepdim=True)).exp_()
    return (S.div_(S.sum(1, keepdim=True)) if divide else S) @ V


STANDARD = [100, 100, -100, 100, 25, -100, -100]  # Q K^T, S, P, and O, which stays
LOOP = [25, 4, 4, 1, -1, 1, -1, -4, -4]
EVENTS = {
    "what was freed is used again: add the releases too, and take the highest sum":
        lambda e: (sum(x for x in e if x > 0), sum(x for x in e if x > 0) - sum(e)),
    "the largest single allocation is not what stands beside the others": lambda e: (
        max(e), max(e) - sum(e)),
    "what is held at the end is the result, not the peak": lambda e: (sum(e), 0),
    "without the result means the peak minus what is held after the last event": lambda e: (
        max(running(e)), max(running(e))),
}
SIZES = {
    "this counts numbers, and one of float32 takes 4 bytes":
        lambda N, d, Br, Bc: N * d + Br * (Bc + d + 5),
    "the result O, N x d, is held as well": lambda N, d, Br, Bc: 4 * Br * (Bc + d + 5),
    "P_block takes S_block's place: count the tile once":
        lambda N, d, Br, Bc: 4 * (N * d + Br * (2 * Bc + d + 5)),
    "O_block is missing, Br x d": lambda N, d, Br, Bc: 4 * (N * d + Br * (Bc + 5)),
    "five columns of Br numbers stand beside the tile: m, m_new, correction, l, row sums":
        lambda N, d, Br, Bc: 4 * (N * d + Br * (Bc + d)),
    "a column has one number for each query of the block, so Br and not Bc":
        lambda N, d, Br, Bc: 4 * (N * d + Br * (Bc + d) + 5 * Bc),
    "O_block has a row for each query of the block, so Br and not Bc":
        lambda N, d, Br, Bc: 4 * (N * d + Br * (Bc + 5) + Bc * d),
    "this is standard attention: the loop has no N x N matrix":
        lambda N, d, Br, Bc: 4 * (2 * N * N + N * d),
}
VALUES = {
    "divide the scores by sqrt(d)": lambda Q, K, V: in_place(Q, K, V, scale=False),
    "divide each row by its sum": lambda Q, K, V: in_place(Q, K, V, divide=False),
}
COPIES = {"a division with `/` and torch.softmax each make a second matrix beside the first: "
          "write over S instead, with div_, sub_ and exp_": plain}

generator = torch.Generator().manual_seed(0)
SMALL = [2 * torch.randn(6, 4, generator=generator) for _ in range(3)]
LARGE = [torch.randn(256, 4, generator=generator) for _ in range(3)]

CASES = [
    Case("peaks", (STANDARD,), (225, 200), EVENTS),
    Case("peaks", (LOOP,), (34, 9), EVENTS),
    Case("flash_bytes", (4096, 64, 64, 64), 1082624, SIZES),
    Case("flash_bytes", (4096, 64, 1024, 512), 3428352, SIZES),
    Case("flash_bytes", (1024, 128, 32, 64), 549504, SIZES),
    Case("one_matrix", SMALL, plain(*SMALL), VALUES, said="6 queries, 6 keys"),
    Case("one_matrix", LARGE, "1 N x N matrix at the peak", COPIES, call=matrices,
         said="N = 256, d = 4"),
]
