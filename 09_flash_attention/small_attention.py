"""Attention small enough to follow by hand, and how large its parts are in a model.

    python small_attention.py
    python small_attention.py --heads 32 --seq-len 8192 131072
"""

import sys
from dataclasses import dataclass
from os.path import dirname, realpath

sys.path.insert(0, dirname(realpath(__file__)))  # `python -I` leaves it out
from lab import lesson
from common import cli
from common.report import mib, print_table

import torch

LENGTHS = (64, 1024, 4096)
# Three tokens. Query 0 asks for nothing, query 1 for a bit of everything, query 2 for key 1.
Q = [[0, 0, 0, 0], [2, 1, 3, 0], [0, 8, 0, 0]]
K = [[2, 0, 0, 0], [0, 2, 0, 0], [0, 0, 2, 0]]
V = [[1, 0], [0, 1], [5, 5]]


def attention(Q, K, V):
    """Return S, P and O: softmax(Q K^T / sqrt(d)) V and what stands on the way to it.

    Q [..., Nq, d], K [..., Nk, d], V [..., Nk, dv]: floating point, on one device.
    Source: Attention Is All You Need (arXiv 1706.03762), equation 1.
    """
    S = Q @ K.transpose(-2, -1) / Q.shape[-1] ** 0.5  # [..., Nq, Nk]
    P = torch.softmax(S, dim=-1)  # [..., Nq, Nk], each row sums to 1
    O = P @ V  # [..., Nq, dv]
    return S, P, O


@dataclass
class QueryRow:
    """What one query makes of the three keys."""

    query: int
    scores: list
    weights: list
    output: list


@dataclass
class SizeRow:
    """A tensor of attention at one sequence length N."""

    name: str
    N: int
    shape: tuple
    bytes: int


def by_hand(device):
    """Return the QueryRows of the three tokens."""
    S, P, O = attention(*(torch.tensor(x, dtype=torch.float32, device=device) for x in (Q, K, V)))
    return [QueryRow(i, *rows) for i, rows in enumerate(zip(S.tolist(), P.tolist(), O.tolist()))]


def sizes(B, H, N, d):
    """Return the SizeRows of float32 attention; nothing is allocated."""
    inputs = [torch.empty(B, H, N, d, device="meta") for _ in range(3)]
    tensors = dict(zip(("Q", "K", "V", "S", "P", "O"), (*inputs, *attention(*inputs))))
    return [SizeRow(name, N, tuple(x.shape), x.numel() * x.element_size())
            for name, x in tensors.items()]


def show_sizes(rows, title):
    found = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    letters = {"S": "B x H x N x N", "P": "B x H x N x N"}
    print_table(title, ["", "shape", *(f"N = {row.N}" for row in found["Q"])],
                [(name, letters.get(name, "B x H x N x d"), *(mib(row.bytes) for row in of_name))
                 for name, of_name in found.items()], left=2)


def main():
    options = lesson.parser(__doc__, "device", "batch", "heads", "seq-len", "head-dim", "json")
    args, device, _ = lesson.begin(options)
    rows = by_hand(device)
    print_table("Three queries, three keys, d = 4", ["query", "scores", "weights", "output"],
                [(r.query, *("  ".join(f"{x:.3f}" for x in part)
                             for part in (r.scores, r.weights, r.output))) for r in rows])
    B, H, d = args.batch or 1, args.heads or 8, args.head_dim or 64
    more = [row for N in args.seq_len or LENGTHS for row in sizes(B, H, N, d)]
    show_sizes(more, f"How large it gets: B = {B}, H = {H}, d = {d}, float32, in MiB")
    return lesson.finish(args, device, [("by_hand", row) for row in rows]
                         + [("sizes", row) for row in more])


if __name__ == "__main__":
    cli.serve(main)
