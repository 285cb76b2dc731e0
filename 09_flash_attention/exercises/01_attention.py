"""Attention and its shapes: the three lines, what they hold, and one row of them.

    python exercises/01_attention.py

Write the three functions in their order and run this file after each. Until all are right it says
what is wrong in one line. The chapter: lesson/en/01_attention.md, 中文:
lesson/zh/01_attention.md. Solutions: solutions/.
"""

from check import Case, serve

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def attention(Q, K, V):
    """Return softmax(Q K^T / sqrt(d)) V.

    Q [..., Nq, d], K [..., Nk, d], V [..., Nk, dv] -> [..., Nq, dv], with any number of leading
    dimensions.
    """
    raise NotImplementedError


def bytes_of_S_and_P(B, H, N, bytes_each):
    """Return how many bytes S and P take together. bytes_each: of a number, 4 for float32."""
    raise NotImplementedError


def one_row(Q, K, V, i):
    """Return row i of attention(Q, K, V), [dv], and make no N x N matrix on the way.

    Q [Nq, d], K [Nk, d], V [Nk, dv].
    """
    raise NotImplementedError


# What is checked, and what usual mistakes give


def softmax_attention(scale=lambda Q, K: Q.shape[-1] ** 0.5, dim=-1):
    """Return an `attention` with another divisor, or with a softmax over another dimension."""
    return lambda Q, K, V: torch.softmax(Q @ K.transpose(-2, -1) / scale(Q, K), dim) @ V


right = softmax_attention()
generator = torch.Generator().manual_seed(0)
HEADS = [torch.randn(s, generator=generator) for s in ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6))]
BY_HAND = (torch.tensor([[2.0, 1.0, 3.0, 0.0]]), 2 * torch.eye(3, 4),
           torch.tensor([[1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]))
MISTAKES = {
    "divide the scores by sqrt(d), the square root of Q.shape[-1]": softmax_attention(
        lambda Q, K: 1),
    "divide by sqrt(d), not by d": softmax_attention(lambda Q, K: Q.shape[-1]),
    "d is the number of columns, not of rows": softmax_attention(lambda Q, K: Q.shape[-2] ** 0.5),
    "the softmax runs over the keys of one query: dim=-1": softmax_attention(dim=-2),
    "the scores have to go through the softmax": lambda Q, K, V: (
        Q @ K.transpose(-2, -1) / Q.shape[-1] ** 0.5 @ V),
}
BYTES = {
    "S and P are two matrices": lambda B, H, N, each: B * H * N * N * each,
    "each head has its own S and P": lambda B, H, N, each: 2 * B * N * N * each,
    "each sequence of the batch has its own S and P": lambda B, H, N, each: 2 * H * N * N * each,
    "bytes are asked for, not numbers": lambda B, H, N, each: 2 * B * H * N * N,
    "each of them is N x N": lambda B, H, N, each: 2 * B * H * N * each,
}
ONE_ROW = {
    "the score of key j is the product of query i with key j": lambda Q, K, V, i: (
        torch.softmax(Q @ K[i] / K.shape[1] ** 0.5, 0) @ V),
    "divide the scores by sqrt(d)": lambda Q, K, V, i: torch.softmax(K @ Q[i], 0) @ V,
    "one row has the shape [dv]: take Q[i], not Q[i:i+1]": lambda Q, K, V, i: right(
        Q[i:i + 1], K, V),
}


def watched(one_row, Q, K, V, i):
    """Return the row, and how many numbers the largest tensor on the way had."""
    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                self.largest = max(self.largest, found.numel())
            return found

    with Watch() as watch:
        one_row(Q, K, V, i)
    return "no N x N matrix" if watch.largest < len(Q) * len(K) else "a matrix of N x N numbers"


SQUARE = [x[0, 0, :5] for x in HEADS]
LONG = [torch.ones(200, 4) for _ in range(3)]

CASES = [
    Case("attention", BY_HAND, right(*BY_HAND), MISTAKES, said="the chapter's query 1"),
    Case("attention", HEADS, right(*HEADS), MISTAKES, said="B = 2, H = 3, Nq = 5, Nk = 7, d = 4"),
    Case("bytes_of_S_and_P", (1, 1, 4096, 4), 2**27, BYTES),
    Case("bytes_of_S_and_P", (3, 8, 1024, 2), 3 * 2**25, BYTES),
    Case("one_row", (*SQUARE, 2), right(*SQUARE)[2], ONE_ROW, said="5 tokens, i=2"),
    Case("one_row", (*LONG, 0), "no N x N matrix", call=watched, said="N = 200",
         mistakes={"take row i of Q before the product": lambda Q, K, V, i: right(Q, K, V)[i]}),
]

if __name__ == "__main__":
    serve(globals())
