"""What exercises/01_attention.py is checked with.

It gives answers away: write your functions first.
"""

from check import Case

from math import prod

import torch
from watch import largest


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
    "d is the number of columns of Q and K, not of V": lambda Q, K, V: (
        torch.softmax(Q @ K.transpose(-2, -1) / V.shape[-1] ** 0.5, -1) @ V),
    "the softmax runs over the keys of one query: dim=-1": softmax_attention(dim=-2),
    "the keys of one query are the last dimension, dim=-1; dim=1 is another one here":
        softmax_attention(dim=1),
    "K.T turns all dimensions round; only the last two are exchanged: K.transpose(-2, -1)":
        lambda Q, K, V: torch.softmax(Q @ K.T / Q.shape[-1] ** 0.5, -1) @ V,
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


def square(one_row, Q, K, V, i):
    """Say whether a tensor of N x N numbers was made."""
    most = prod(largest(one_row, Q, K, V, i))
    return "no N x N matrix" if most < len(Q) * len(K) else "a matrix of N x N numbers"


SQUARE = [x[0, 0, :5] for x in HEADS]
LONG = [torch.ones(200, 4) for _ in range(3)]

CASES = [
    Case("attention", BY_HAND, right(*BY_HAND), MISTAKES, said="the chapter's query 1"),
    Case("attention", HEADS, right(*HEADS), MISTAKES, said="B = 2, H = 3, Nq = 5, Nk = 7, d = 4"),
    Case("bytes_of_S_and_P", (1, 1, 4096, 4), 2**27, BYTES),
    Case("bytes_of_S_and_P", (3, 8, 1024, 2), 3 * 2**25, BYTES),
    Case("one_row", (*SQUARE, 2), right(*SQUARE)[2], ONE_ROW, said="5 tokens, i=2"),
    Case("one_row", (*LONG, 0), "no N x N matrix", call=square, said="N = 200",
         mistakes={"take row i of Q before the product": lambda Q, K, V, i: right(Q, K, V)[i]}),
]
